"""What is public, with its signatures, is what `tests/public_names.txt` says, and no more.

A change there is a change for users: it wants an entry in the changelog. To write the file anew:
python tests/test_public_names.py
"""

import inspect
from collections.abc import Iterator
from pathlib import Path

import lightning_hybrid
from lightning_hybrid._registration import NAMES

FILE = Path(__file__).with_name("public_names.txt")


def members(kind: type) -> Iterator[tuple[str, str]]:
    """Public functions and properties that a class of this package defines itself."""
    for name, value in vars(kind).items():
        function = getattr(value, "__func__", value)
        if not name.startswith("_") and inspect.isfunction(function):
            yield name, str(inspect.signature(function))
        elif not name.startswith("_") and isinstance(value, property):
            yield name, ""


def public_names() -> str:
    lines = [f"{who}(strategy={name!r})" for who in ("Trainer", "Fabric") for name in NAMES]
    for name in lightning_hybrid.__all__:
        kind = getattr(lightning_hybrid, name)
        parameters = inspect.signature(kind).parameters.values()
        named = [f"    {'*, ' * (p.kind is p.KEYWORD_ONLY)}{p}" for p in parameters]
        lines += [f"{name}(", *named, ")"]
        if kind is lightning_hybrid.Plan:  # the strategy's others are Lightning's
            lines += [f"{name}.{member}{signature}" for member, signature in members(kind)]
    strategy = lightning_hybrid.HybridGabraStrategy
    for member in ("full_state_dict", "optimizer_state"):
        signature = inspect.signature(getattr(strategy, member))
        lines.append(f"HybridGabraStrategy.{member}{signature}")
    lines += ["HybridGabraFabricStrategy.plan", "HybridGabraStrategy.plan"]
    return "\n".join([*lines, ""])


def test_the_public_names_and_their_signatures_are_these() -> None:
    assert public_names() == FILE.read_text(), "python tests/test_public_names.py writes it anew"


def test_the_page_of_public_names_has_each_of_them() -> None:
    page = (FILE.parents[1] / "docs" / "api.md").read_text()
    for name in NAMES:
        assert f'"{name}"' in page
    for name in lightning_hybrid.__all__:
        assert f"::: lightning_hybrid.{name}" in page


if __name__ == "__main__":
    FILE.write_text(public_names())
