"""Replicas that do not wait for each other refuse what steps otherwise than once a batch."""

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from lightning_hybrid import Asynchronous
from lightning_hybrid.config import Config
from lightning_hybrid.errors import PlanError
from lightning_hybrid.parts.asynchronous import AsynchronousReplica

# Lightning's advice on unused devices and loggers
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"accumulate_grad_batches": 2}, "not accumulate_grad_batches=2"),
        ({"callbacks": [GradientAccumulationScheduler({4: 2})]}, "Leave GradientAccumulationSch"),
    ],
)
def test_asynchronous_replicas_step_once_a_batch(arguments: dict[str, Any], text: str) -> None:
    """`accumulate_grad_batches` or a `GradientAccumulationScheduler` with `Asynchronous`."""
    accumulating: Any = Trainer(accelerator="cpu", logger=False, **arguments)
    accumulating.strategy.connect(BoringModel())
    run: Any = SimpleNamespace(
        trainer=accumulating,
        module=nn.Linear(1, 1),
        precision=accumulating.precision_plugin,
        synchronised=False,
        config=Config(replicas=Asynchronous()),
    )
    with pytest.raises(PlanError, match=rf"Asynchronous\(\) steps once a batch.*{text}"):
        AsynchronousReplica(run, print).begin_training([])
