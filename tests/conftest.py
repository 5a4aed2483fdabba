import os
from collections.abc import Iterator
from zlib import crc32

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--third",
        metavar="TEXT",
        help="run a third of the tests that are selected; the text (a commit) decides which",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # what takes long comes first, so that no worker is left with it at the end
    items.sort(key=lambda item: item.get_closest_marker("distributed") is None)
    text = config.getoption("--third")
    if text is None:
        return
    third = crc32(text.encode()) % 3
    left_out = [item for item in items if crc32(item.nodeid.encode()) % 3 != third]
    items[:] = [item for item in items if crc32(item.nodeid.encode()) % 3 == third]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(autouse=True, scope="session")
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Profiles are kept beside the tests' other files; processes that tests start inherit it."""
    before = os.environ.get("LIGHTNING_HYBRID_CACHE")
    os.environ["LIGHTNING_HYBRID_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    del os.environ["LIGHTNING_HYBRID_CACHE"]
    if before is not None:
        os.environ["LIGHTNING_HYBRID_CACHE"] = before
