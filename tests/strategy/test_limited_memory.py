"""Where one device has no room for a network, stages train it, save it and end: its numbers."""

from pathlib import Path
from typing import Any

import pytest
from conftest import Training

pytestmark = [pytest.mark.distributed, pytest.mark.conformance]
SCRIPT = Path(__file__).with_name("limited_memory_script.py")
LIMIT_MIB = 1500
"""One device needs 1650 in a step."""
FRUGAL = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "1000000"}
"""Else C's allocator keeps address space for each thread, and of what was freed."""


def run(folder: Path, **config: Any) -> list[dict[str, Any]]:
    usual = {"where": "__init__", "resumes": None, "saves": False, "limit_mib": LIMIT_MIB}
    training = Training(folder, script=SCRIPT, **{**usual, **config})
    return training.wait([training.start(environment=FRUGAL)])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One device without a limit."""
    [seen] = run(tmp_path_factory.mktemp("alone"), stages=1, limit_mib=0)
    return seen


def test_one_device_has_no_room(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="can't allocate memory"):
        run(tmp_path, stages=1)


@pytest.mark.parametrize("where", ["__init__", "configure_model"])
@pytest.mark.parametrize("stages", [2, 4])
def test_stages_have_room_for_a_whole_run(
    tmp_path: Path, alone: dict[str, Any], stages: int, where: str
) -> None:
    first = run(tmp_path / "first", stages=stages, where=where, saves=True)
    saved = str(tmp_path / "first" / "saved.ckpt")
    # (to resume, the driver has the states of all ranks in memory for a moment)
    second = run(tmp_path / "second", stages=stages, where=where, resumes=saved, limit_mib=0)
    losses = alone["losses"]
    assert first[0]["losses"] == pytest.approx(losses, rel=1e-6)
    assert second[0]["losses"] == pytest.approx(losses[2:], rel=1e-6)
    for rank, seen in enumerate((*first, *second)):
        if where == "__init__":
            assert seen["after"].keys() <= alone["after"].keys()
            expected = {name: alone["after"][name] for name in seen["after"]}
            assert seen["after"] == pytest.approx(expected, rel=1e-5), rank
    if where == "__init__":
        assert first[0]["after"].keys() == second[0]["after"].keys() == alone["after"].keys()
