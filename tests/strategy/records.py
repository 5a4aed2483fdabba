"""Records of options in the JSON that scripts are given."""

from typing import Any

import lightning_hybrid


def written(record: Any) -> dict[str, Any]:
    """A record as JSON has it: the ``default`` of `json.dumps`."""
    return {"record": type(record).__name__, **vars(record)}


def read(value: dict[str, Any]) -> Any:
    """The record again: the ``object_hook`` of `json.loads`."""
    if "record" not in value:
        return value
    return getattr(lightning_hybrid, value.pop("record"))(**value)
