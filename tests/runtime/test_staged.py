"""Which rank owns a parameter that several stages use."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_hybrid.runtime.staged import borrowed_parameters


def stages(*names: str) -> list[Any]:
    """Stages with parameters of one letter each."""
    return [SimpleNamespace(parameter_names=tuple(name)) for name in names]


@pytest.mark.parametrize(
    ("names", "devices", "borrowed"),
    [
        # a chain: the earliest stage owns
        (("ab", "ac", "ad"), (1, 2, 0), ["a", "", "a"]),
        # both uses on one rank: nothing to borrow
        (("ab", "c", "ad", "e"), (1, 0, 1, 0), ["", ""]),
        # the driver borrows, though its stage comes first
        (("ab", "ac", "d"), (0, 1, 0), ["a", ""]),
        (("a", "b", "c", "a"), (0, 1, 2, 0), ["", "", ""]),
        (("a", "a", "a", "b"), (0, 2, 1, 0), ["a", "a", ""]),
    ],
)
def test_the_earliest_worker_owns_what_several_ranks_use(
    names: tuple[str, ...], devices: tuple[int, ...], borrowed: list[str]
) -> None:
    found = borrowed_parameters(stages(*names), devices)
    assert found == [frozenset(each) for each in borrowed]
