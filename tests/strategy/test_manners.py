"""Errors that a script catches, threads, copies: as users know it from one device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import manners_script
import pytest
import torch
from conftest import DEFAULTS, Training

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]
SCRIPT = Path(__file__).with_name("manners_script.py")
slow = pytest.mark.conformance


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    def start(**config: Any) -> list[dict[str, Any]]:
        return Training(tmp_path / "run", script=SCRIPT, **{"stages": 2, **config}).run()

    return start


def on_one_device(folder: Path, **config: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    return manners_script.run({**DEFAULTS, "strategy": "auto", "stages": 1, **config}, folder)


SHAPES = [(1, 2), (1, 3), pytest.param((2, 2), marks=slow)]


@pytest.mark.parametrize("shape", [(1, 2), (1, 3), (2, 2)])
@pytest.mark.parametrize(
    ("where", "rank"),
    [
        ("training_step", 0),
        ("stage", 1),
        ("setup", 1),
        ("setup", None),
        ("configure_optimizers", 0),
    ],
)
def test_all_ranks_catch_what_one_has_raised_and_train_on(
    run: Callable[..., list[dict[str, Any]]], where: str, rank: int | None, shape: tuple[int, int]
) -> None:
    replicas, stages = shape
    fault = {"where": where, "rank": rank}
    ranks = run(replicas=replicas, stages=stages, fault=fault, again=True)
    for seen in ranks:
        print({k: v for k, v in seen.items() if k not in ("left", "weights")})
    for seen in ranks:
        assert f"on purpose in {where}" in seen["caught"]
        assert len(seen["weights"]) == 4
        assert seen["threads"] == []
    if rank is None:
        assert {seen["cause"] for seen in ranks} == {"None"}
