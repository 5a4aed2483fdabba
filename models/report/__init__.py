"""``python -m models report RUN``: one HTML page about a run, which needs nothing but itself."""

import argparse
from pathlib import Path

from models.errors import UseError
from models.report.html import page
from models.report.sections import SECTIONS
from models.results import writable


def write_report(run: Path) -> Path:
    """Write ``report.html`` into the folder of a run, from what lies there.

    Raises:
        UseError: If that is not the folder of a run, or cannot be written to.
    """
    if not (run / "config.yaml").is_file():
        raise UseError(
            f"{run} is not the folder of a run: it has no config.yaml. Runs lie where the "
            "configuration's loggers put them, for instance demo/run/version_0."
        )
    parts = [(title, section(run)) for title, section in SECTIONS.items()]
    path = writable(run) / "report.html"
    try:
        path.write_text(page(f"Run {run.name}", parts), encoding="utf-8")
    except OSError as error:
        raise UseError(
            f"{path} cannot be written: {error.strerror}. Remove or rename what lies there."
        ) from error
    return path


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m models report",
        description="Write RUN/report.html about a run.",
        allow_abbrev=False,
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("run", nargs="?", type=Path, help="folder of the run, as demo/run/version_0")
    where.add_argument("--config", type=Path, help="instead of the folder: its config.yaml")
    options = parser.parse_args(arguments)
    print(f"report written to {write_report(options.run or options.config.parent)}")
