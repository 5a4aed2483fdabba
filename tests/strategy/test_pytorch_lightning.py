"""Users of `pytorch_lightning` get what users of `lightning` get."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Training

SCRIPT = Path(__file__).with_name("pytorch_lightning_script.py")
pytestmark = pytest.mark.distributed
Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Train with a strategy of this name; see `pytorch_lightning_script.py`."""
    return lambda name, **options: Training(
        tmp_path / name, script=SCRIPT, strategy=name, **options
    ).launch()


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["metrics"].keys() == expected["metrics"].keys()
    for part in ("metrics", "weights"):
        for name, value in found[part].items():
            torch.testing.assert_close(value, expected[part][name], rtol=0, atol=1e-10, msg=name)
    assert found["metrics"]["with_lightning"] == 0  # it is not even imported


@pytest.mark.conformance
def test_two_stages_train_as_one_device_does(run: Run) -> None:
    [expected] = run("auto")
    [found] = run("object", stages=2, processes=1)  # the other device has a server
    assert found["plan"].stages == 2
    assert_same(found, expected)
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-10)
    assert found["global_step"] == expected["global_step"]


@pytest.mark.conformance
def test_processes_that_unpickle_before_they_import_choose_the_same_package(run: Run) -> None:
    # a `__main__` that is no file is not run again in spawned processes
    code = (
        "import sys; from pathlib import Path; "
        "from tests.strategy.pytorch_lightning_script import main; main(Path(sys.argv[2]))"
    )
    [expected] = run("auto")
    [found] = run("object by spawn", stages=2, processes=1, launcher=("-c", code))
    del expected["metrics"]["test"]
    assert_same(found, expected)
