from collections.abc import Callable
from functools import cache

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
