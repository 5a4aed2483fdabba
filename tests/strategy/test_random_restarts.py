"""See `random_restarts.py`, which kills as many as it is told."""

from pathlib import Path

import pytest
from random_restarts import LIMIT_S, differences, end, kill, on_one_host, result, start, until_saved

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.conformance,
    pytest.mark.timeout(3600),
]


def test_a_run_that_torchrun_starts_again_has_the_losses_of_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    found = []
    for name in ("undisturbed", "killed"):
        folder = tmp_path / name
        process = start(folder, 1, *on_one_host(2))
        try:
            if name == "killed":
                until_saved(process, folder)
                assert kill(folder, 1)
            assert process.wait(LIMIT_S) == 0, (folder / "output.txt").read_text()
        finally:
            end([process], folder, 2)
        found.append(result(folder))
    starts = (tmp_path / "killed" / "starts.txt").read_text().splitlines()
    assert sorted(starts) == ["0 of 2", "0 of 2", "1 of 2", "1 of 2"]
    assert not differences(found[1], found[0], tolerance=0.0)
