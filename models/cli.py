"""``python -m models``: one command of many, each with the imports that it needs alone."""

import sys

from datamodules import DataError
from models.errors import UseError


def main() -> None:
    """Run one command of ``python -m models``."""
    try:
        if sys.argv[1:2] == ["report"]:
            from models.report import main as report

            report(sys.argv[2:])
        elif sys.argv[1:2] == ["folds"]:
            from models.folds import main as folds

            folds(sys.argv[2:])
        elif sys.argv[1:2] == ["compare"]:
            from models.compare import main as compare

            compare(sys.argv[2:])
        elif sys.argv[1:2] == ["groups"]:
            from models.commands.groups import main as groups

            groups(sys.argv[2:])
        elif sys.argv[1:2] == ["export"]:
            from models.commands.export import main as export

            export(sys.argv[2:])
        elif sys.argv[1:2] == ["test"] and _has("--cohort"):
            from models.commands.external import main as external

            sys.exit(external(sys.argv[2:]))
        elif sys.argv[1:2] == ["predict"] and _has("--scans"):
            from models.commands.predict_scans import main as predict_scans

            sys.exit(predict_scans(sys.argv[2:]))
        else:
            from models.commands.training import main as training

            training()
    except (DataError, UseError) as error:  # say themselves what is wrong, and what to do
        print(error, file=sys.stderr)
        sys.exit(2)


def _has(option: str) -> bool:
    """Whether the command line has an option, which makes another command of its name."""
    return any(argument.partition("=")[0] == option for argument in sys.argv[2:])
