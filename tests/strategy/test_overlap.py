"""The recorded trace of a run shows what overlaps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.allreduce_overlap import last_step
from lightning_hybrid.stage.trace import VARIABLE

pytestmark = pytest.mark.distributed


@pytest.mark.conformance
def test_gradients_leave_while_the_last_micro_batch_goes_backward(
    train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "trace"))
    train(network="resattnet", side=24, samples=16, replicas=2, stages=2, steps=3)
    for rank in (0, 2):  # the drivers, whose stage has several buckets
        events = json.loads((tmp_path / "trace" / f"rank{rank}.json").read_text())["traceEvents"]
        backward, reduces = last_step(events)
        end = backward["ts"] + backward["dur"]
        assert len(reduces) > 1
        assert reduces[0]["ts"] < end
