"""What does not go together with forwards that begin early is refused before training."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_hybrid import Delayed, Plan, Search
from lightning_hybrid.config import Config
from lightning_hybrid.errors import PlanError
from lightning_hybrid.parts.coming_batches import PlainDescent, refuse_streaming


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.net(batch).mean()


class ByHand(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Before(Plain):
    def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return batch


class After(Plain):
    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return batch


class Fetches(Plain):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        return self.net(next(dataloader_iter)).mean()


class Codebook(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(3))


LOOP = Plan(
    replicas=1, stages=3, microbatches=1, schedule="fdg", cuts=("b", "c"), devices=(0, 1, 0)
)


def run(module: LightningModule, replicas: int = 1, stages: int = 2, **options: Any) -> Any:
    changes = {key: options.pop(key) for key in ("precision", "synchronised") if key in options}
    options.setdefault("schedule", Delayed("fdg"))
    usual = {
        "config": Config(**options),
        "module": module,
        "fitting": True,
        "synchronised": False,
        "precision": None,
        "trainer": SimpleNamespace(lightning_module=module, datamodule=None),
        "world": SimpleNamespace(
            coordinates=SimpleNamespace(replicas=replicas, ranks_per_replica=stages),
            mesh=SimpleNamespace(backend="nccl"),
        ),
    }
    return SimpleNamespace(**{**usual, **changes})


@pytest.mark.parametrize(
    ("module", "options", "words"),
    [
        (ByHand, {}, "manual optimization"),
        (Before, {}, "Before.on_before_batch_transfer"),
        (After, {}, "After.on_after_batch_transfer"),
        (Fetches, {}, "dataloader_iter"),
        (Codebook, {"replicas": 2}, "reads buffers in training"),
        (Plain, {"synchronised": True, "replicas": 2}, "sync_batchnorm=True"),
        (Plain, {"search": Search(contiguous=False)}, "each device must have one stage"),
        (Plain, {"plan": LOOP, "schedule": "auto"}, "each device must have one stage"),
        (Plain, {"compile_stages": True}, "compile_stages=True"),
        (
            Plain,
            {
                "schedule": Delayed("fdg", weights="current"),
                "precision": MixedPrecision("bf16-mixed", "cpu"),
            },
            "weights='current' is not what",
        ),
        (
            Plain,
            {"precision": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))},
            "16-mixed",
        ),
    ],
)
def test_is_refused_by_name(
    module: type[LightningModule], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlanError, match=r"schedule=(Delayed\()?'fdg'.*schedule='gpipe'") as caught:
        refuse_streaming(run(module(), **options))
    assert words in str(caught.value)


@pytest.mark.parametrize("options", [{}, {"replicas": 2}, {"schedule": "1f1b_stream"}])
def test_a_plain_module_is_not_refused(options: dict[str, Any]) -> None:
    refuse_streaming(run(Plain(), **options))


def test_on_one_device_there_is_nothing_to_refuse() -> None:
    refuse_streaming(run(ByHand(), stages=1))


def test_gradient_descent_alone_is_plain() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    PlainDescent("schedule=...").begin_training([torch.optim.SGD(parameters, lr=0.1)])
    for optimizer in (
        torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1),
        torch.optim.AdamW(parameters),
    ):
        with pytest.raises(PlanError, match=r"^schedule=\.\.\. is plain.*fdg"):
            PlainDescent("schedule=...").begin_training([optimizer])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "magic"}, "schedule='magic' is none of"),
        ({"plan": replace(LOOP, schedule="magic")}, "the plan's schedule='magic' is none of"),
        ({"schedule": "fdg"}, "some steps old: write schedule=Delayed('fdg')"),
        ({"schedule": Delayed("ddg"), "plan": LOOP}, "'ddg') contradicts the plan, whose schedule"),
    ],
)
def test_settings_that_contradict_each_other(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        Config(**options)
    assert words in str(caught.value)


def test_no_launch_may_wait_for_the_end_of_a_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(PlanError, match=r"CUDA_LAUNCH_BLOCKING=1 .*use schedule='gpipe'"):
        refuse_streaming(run(Plain()))
    refuse_streaming(run(Plain(), schedule="gpipe"))
    over_gloo = run(Plain())
    over_gloo.world.mesh.backend = "gloo"
    refuse_streaming(over_gloo)
