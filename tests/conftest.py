import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Profiles are kept beside the tests' other files; processes that tests start inherit it."""
    before = os.environ.get("LIGHTNING_HYBRID_CACHE")
    os.environ["LIGHTNING_HYBRID_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    del os.environ["LIGHTNING_HYBRID_CACHE"]
    if before is not None:
        os.environ["LIGHTNING_HYBRID_CACHE"] = before
