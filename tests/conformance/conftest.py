from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from session import Session, selected
from suite import Conformance, Record, Row


@pytest.fixture(scope="session")
def records(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[type[Conformance], type[Row]], list[Record]]:
    """What each rank has recorded of a row, under the strategy of a suite."""
    wanted = selected(request.session.items)

    @cache
    def run(suite: type[Conformance]) -> Session:
        return Session(suite, wanted[suite], tmp_path_factory.mktemp(suite.__name__))

    return lambda suite, row: run(suite).records[row.__name__]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests of one file may run apart (`make real`), those of rows do not: their suites
    run all rows that were asked for, once.
    """
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
