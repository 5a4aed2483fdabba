"""With ``replan="epoch"`` a device that is slower than planned gets less to do, and numbers stay."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Training

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]
slow = pytest.mark.conformance
SCRIPT = Path(__file__).with_name("new_cuts_script.py")
USUAL = {"replicas": 1, "stages": 2, "true": [1.0, 0.2], "trainer": {}}


def training(folder: Path, **config: Any) -> Training:
    return Training(folder, script=SCRIPT, **{**USUAL, **config})


def one_device(folder: Path, **config: Any) -> dict[str, Any]:
    """What a run on one device has seen."""
    run = Training(
        folder / "alone",
        script=SCRIPT,
        processes=1,
        **{**USUAL, **config, "alone": True, "replicas": 1, "stages": 1},
    )
    [seen] = run.run()
    return seen


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "config",
    [
        {"validates": True},
        pytest.param({"tied": True}, marks=slow),
        pytest.param({"manual": True}, marks=slow),
        pytest.param({"hooks": True}, marks=slow),
        pytest.param({"averages": True, "validates": True}, marks=slow),
        pytest.param({"trainer": {"gradient_clip_val": 0.05}}, marks=slow),
        pytest.param({"trainer": {"accumulate_grad_batches": 5}}, marks=slow),
        pytest.param({"stages": 3, "true": [1.0, 0.2, 1.0]}, marks=slow),
        pytest.param({"drops": True, "arguments": {"rng": "device"}}, marks=slow),
        pytest.param({"arguments": {"checkpoint": "sharded_async"}}, marks=slow),
        pytest.param({"arguments": {"log_performance": True}}, marks=slow),
    ],
    ids=str,
)
def test_numbers_are_those_of_one_device_before_and_after_new_cuts(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    run = training(tmp_path, **config)
    ranks = run.run()
    assert [rank["error"] for rank in ranks] == [""] * len(ranks)
    [driver] = [rank for rank in ranks if rank["is_driver"]]
    first, second, third = driver["cuts"]
    assert first != second == third
    assert run.output.count("replan='epoch': network 'net' is cut before") == 1
    assert "rank 1 is 5.0 times slower, compared with the others, than planned" in run.output
    expected = one_device(
        tmp_path, **config, **({"arguments": {}} if "arguments" in config else {})
    )
    for name in ("losses", "norms", "weights", "validated", "optimizer"):
        assert_same(driver[name], expected[name])
    for rank in ranks:
        assert_same(rank["weights"], expected["weights"])
