import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def write_table(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write rows with the same keys as tab-separated values, fractions to four digits."""
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]) if rows else [], delimiter="\t")
        table.writeheader()
        for row in rows:
            rounded = {k: round(v, 4) for k, v in row.items() if isinstance(v, float)}
            table.writerow({**row, **rounded})


def prediction_rows(batches: Iterable[Any]) -> list[dict[str, Any]]:
    """One row per scan of the batches that ``predict_step`` returned."""
    rows = []
    for batch in batches:
        probabilities = batch["probabilities"][:, 1].tolist()
        ids = {name: values for name, values in batch.items() if name != "probabilities"}
        for i, probability in enumerate(probabilities):
            row = {name: _plain(values[i]) for name, values in ids.items()}
            rows.append(row | {"probability": probability})
    return rows


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
