"""What a run says of the weights that it needs."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn

from lightning_hybrid.run import building


def test_what_an_average_of_weights_needs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(building, "rank_zero_info", said.append)
    callbacks: Any = SimpleNamespace(callbacks=[EMAWeightAveraging(), Callback()])
    building.announce_averages(callbacks, cast(Any, nn.Linear(1000, 1000, bias=False)))
    [line] = said
    assert line.startswith("EMAWeightAveraging averages all weights")
    assert "0.004 GB beside" in line
