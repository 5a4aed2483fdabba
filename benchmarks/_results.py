"""What a benchmark has measured, as rows of a CSV file under `benchmarks/results`."""

import csv
import os
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).with_name("results")
COLUMNS = ("date", "torch", "machine", "command", "name", "value", "unit")


def record(values: Mapping[str, float], unit: str, folder: Path = FOLDER) -> Path:
    """Append one row for each value to the file that is named after the script that runs.

    Args:
        values: what was measured, by name.
        unit: of all these values; "" for a ratio.
        folder: where the file lies, or is made with its heading.

    Returns:
        The path of the file.
    """
    script, *arguments = sys.argv
    command = shlex.join([Path(script).name, *arguments])
    path = folder / f"{Path(script).stem}.csv"
    folder.mkdir(parents=True, exist_ok=True)
    begins = not path.exists()
    common = (f"{datetime.now(UTC):%Y-%m-%d}", version("torch"), _machine(), command)
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if begins:
            writer.writerow(COLUMNS)
        writer.writerows((*common, name, f"{value:.6g}", unit) for name, value in values.items())
    return path


def _machine() -> str:
    """The number of cores, and the name of the GPU if torch is loaded and finds one."""
    torch = sys.modules.get("torch")
    gpu = torch is not None and torch.cuda.is_available()
    cores = f"{os.cpu_count()} cores"
    return f"{cores}, {torch.cuda.get_device_name()}" if torch is not None and gpu else cores
