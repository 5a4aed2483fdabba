import ast
from pathlib import Path

import pytest

import models

ROOT = Path(models.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.add("models" if node.level else str(node.module).split(".")[0])
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_models_know_nothing_of_the_strategy_and_only_the_command_line_knows_the_data(path) -> None:
    assert "lightning_hybrid" not in imported(path)
    of_the_command_line = path == ROOT / "cli.py" or path.parent == ROOT / "commands"
    assert "datamodules" not in imported(path) or of_the_command_line


def test_exported_names() -> None:
    assert models.__all__ == ["GradCAM3D", "ResAttNet3D", "ResAttNetClassifier"]
