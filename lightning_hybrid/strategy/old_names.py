"""Advice for arguments that had other names before version 0.1; kept for one release."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

P = ParamSpec("P")

NEW_WAYS = {
    "delayed_weights": "schedule=Delayed(NAME, weights=...)",
    "gradient_shrinking": "schedule=Delayed('fdg', shrink=...)",
    "allocation": "plan=[...] for cut points, and search=Search(method=...) for the others",
    "objective": "search=Search(objective=...)",
    "contiguous": "search=Search(contiguous=...)",
    "device_capacity": "search=Search(capacity=...)",
    "shard_optimizer_states": "replicas=Equal(shard_states=True)",
    "balance": "replicas=BySpeed()",
    "replan": "search=Search(replan='epoch') for cuts, and replicas=BySpeed(replan='epoch')",
    "gradient_sync": "replicas=Asynchronous(staleness=...)",
    "staleness": "replicas=Asynchronous(staleness=...)",
    "lost_replica": "replicas=BySpeed(on_loss='continue')",
}


def tells_new_names(init: Callable[P, None]) -> Callable[P, None]:
    """Decorate a constructor: an argument with an old name raises an error that says the new way.

    That is a TypeError, as Python raises it for any unexpected keyword. The old names are those of
    `NEW_WAYS`.

    Args:
        init: the constructor of a strategy.
    """

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        for name in kwargs:
            if name in NEW_WAYS:
                raise TypeError(f"{name}=... is no argument any more: write {NEW_WAYS[name]}.")
        init(*args, **kwargs)

    return checked
