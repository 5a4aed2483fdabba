"""``python -m models report RUN``: one HTML page about a run, which needs nothing but itself."""

import argparse
from datetime import date
from pathlib import Path

import yaml

from models.errors import UseError
from models.report.html import page
from models.report.sections import SECTIONS
from models.results import writable
from models.tasks import title_of


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
        path.write_text(page(_title(run), parts), encoding="utf-8")
    except OSError as error:
        raise UseError(
            f"{path} cannot be written: {error.strerror}. Remove or rename what lies there."
        ) from error
    return path


def _title(run: Path) -> str:
    """Task, recipe, date, and the name of the run, as far as its configuration says."""
    config = run / "config.yaml"
    try:
        settings = yaml.safe_load(config.read_text()) or {}
        model, data = settings.get("model") or {}, settings.get("data") or {}
    except (yaml.YAMLError, AttributeError):
        model, data = {}, {}
    classes = title_of(data["task"]) if data.get("task") else ""
    recipe = " ".join(str(model[name]) for name in ("optimizer", "lr_schedule") if name in model)
    day = date.fromtimestamp(config.stat().st_mtime).isoformat()
    return ", ".join(part for part in (classes, recipe, day, f"run {run.name}") if part)


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
