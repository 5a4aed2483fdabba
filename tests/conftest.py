import gc
import logging
import os
from collections.abc import Iterator
from zlib import crc32

import pytest
from hypothesis import settings

PARTS = 12
"""Of the slow tier; each takes about ten minutes on two cores."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        metavar="TEXT",
        help=f"run one of {PARTS} parts of the selected tests; the text (a commit) decides which",
    )


settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


def pytest_configure() -> None:
    gc.disable()  # while a million objects are imported that stay


def pytest_collection_finish() -> None:
    # torch describes each step of a capture to the handlers of this logger, if it has some; it does
    # not propagate, and to such loggers pytest gives its own
    logging.getLogger("torch.__trace").propagate = True
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # captures make many objects, and few cycles of them
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # what takes long comes first, so that no worker is left with it at the end
    items.sort(key=lambda item: item.get_closest_marker("distributed") is None)
    text = config.getoption("--part")
    if text is None:
        return
    part = crc32(text.encode()) % PARTS
    left_out = [item for item in items if _part_of(item) != part]
    items[:] = [item for item in items if _part_of(item) == part]
    config.hook.pytest_deselected(items=left_out)


def _part_of(item: pytest.Item) -> int:
    """Tests with the same parameters are in one part: all shapes of a row share its reference."""
    call = getattr(item, "callspec", None)
    return crc32((call.id if call else item.nodeid).encode()) % PARTS


@pytest.fixture(autouse=True, scope="session")
def untimed_captures() -> None:
    from untimed import leave_guards_untimed  # imports torch, which the process that leads does not

    leave_guards_untimed()


@pytest.fixture(autouse=True, scope="session")
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Profiles are kept beside the tests' other files; processes that tests start inherit it."""
    before = os.environ.get("LIGHTNING_HYBRID_CACHE")
    os.environ["LIGHTNING_HYBRID_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    del os.environ["LIGHTNING_HYBRID_CACHE"]
    if before is not None:
        os.environ["LIGHTNING_HYBRID_CACHE"] = before


@pytest.fixture(autouse=True)
def environment_of_before() -> Iterator[None]:
    """What launchers and seeds set, the next test does not see: a `LOCAL_RANK` that is left makes
    it wait for ranks that nobody starts.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    before.pop("PYTEST_CURRENT_TEST", None)
    os.environ.update(before)
