from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ranks import WIRES


@pytest.fixture(params=WIRES)
def wires(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Makes pairs of wires between two ranks, real ones and those in memory."""
    made: list[Any] = []

    def make(timeout_s: float = 30) -> Any:
        made.append(WIRES[request.param](timeout_s))
        return made[-1]

    yield make
    for each in made:
        each.close()
