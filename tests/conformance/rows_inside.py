"""Networks that return their loss, under `schedule="1f1b"`: backwards run inside of calls."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from suite import ONE_OF_THREE, ONE_OF_TWO, Layers, Row
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from lightning_hybrid import Plan
from lightning_hybrid.planning import planner


class GoesBackInsideOfItsCall(Row):
    """The network returns a mean over some targets: one forward, one backward. The logits are not
    read."""

    fast = True
    microbatches = 4
    arguments: ClassVar = {"schedule": "1f1b"}

    class Net(Layers):
        def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
            logits = super().forward(x)
            return cross_entropy(logits, y, ignore_index=0), logits

    def build(self) -> None:
        self.net = self.Net()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss, _ = self.net(x, y)
        self.seen.append(loss.item())
        return loss


class ReadsLogitsOfItsCall(GoesBackInsideOfItsCall):
    """The logits are read in each step, before the backward."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss, logits = self.net(x, y)
        self.seen.append(logits.argmax(1).tolist())
        return loss


class SendsGradientsToLogits(GoesBackInsideOfItsCall):
    """A penalty on the logits, beside the loss: their gradient needs all forwards again."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss, logits = self.net(x, y)
        return 2 * loss.exp() + 0.1 * logits.square().mean()


class AccumulatesTwoBatchesInside(GoesBackInsideOfItsCall):
    """Two batches a step, clipped by norm."""

    options: ClassVar = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}


class SkipsABackwardInside(GoesBackInsideOfItsCall):
    """`training_step` returns `None` every other time, after the call."""

    shapes = (ONE_OF_TWO, ONE_OF_THREE)  # Lightning allows that on one device alone

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(*batch)
        return None if batch_idx % 2 else loss


class ScalesItsLossInside(GoesBackInsideOfItsCall):
    """`precision="16-mixed"` with a scaler whose scale grows, and clipping."""

    tolerance = 5e-3  # in half precision

    def trainer_options(self, folder: Path) -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)], "gradient_clip_val": 0.5}


class GoesBackInBfloat16(GoesBackInsideOfItsCall):
    """`precision="bf16-mixed"`: backwards inside of the call run outside of autocast."""

    tolerance = 3e-2  # in bfloat16
    options: ClassVar = {"precision": "bf16-mixed"}


class StepsByHandInside(GoesBackInsideOfItsCall):
    """Manual optimization: two calls and a backward of their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        x, y = batch
        self.manual_backward(self.loss(x, y) + 0.5 * self.loss(x.flip(1), y))
        optimizer.step()


class RecomputesInside(GoesBackInsideOfItsCall):
    """`recompute=True` beside it."""

    arguments: ClassVar = {"schedule": "1f1b", "recompute": True}


class LoopsInside(GoesBackInsideOfItsCall):
    """A plan whose devices have two stages in turn: interleaved."""

    fast = True
    shapes = (ONE_OF_TWO,)
    arguments: ClassVar = {
        "plan": Plan(
            replicas=1,
            stages=4,
            microbatches=4,
            schedule="1f1b",
            cuts=("second", "last.0", "last.1"),
            devices=(1, 0, 1, 0),
        )
    }

    class Net(GoesBackInsideOfItsCall.Net):
        def __init__(self) -> None:
            super().__init__()
            self.last = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(2)])

        def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
            logits = self.last(Layers.forward(self, x))
            return cross_entropy(logits, y, ignore_index=0), logits


class SplitsInside(GoesBackInsideOfItsCall):
    """A plan whose last stage computes the gradients of its weights later, with clipping."""

    fast = True
    shapes = (ONE_OF_TWO,)
    options: ClassVar = {"gradient_clip_val": 0.1}
    arguments: ClassVar = {
        "plan": Plan(
            replicas=1, stages=2, microbatches=4, schedule="1f1b", cuts=("second",), split=(1,)
        )
    }


class SplitsInBfloat16(SplitsInside):
    """The same with `precision="bf16-mixed"`: both parts run outside of autocast."""

    tolerance = 3e-2  # in bfloat16
    options: ClassVar = {"precision": "bf16-mixed"}


class LearnsItsInputsToo(GoesBackInsideOfItsCall):
    """What the network gets is computed from a parameter beside it: backwards follow the call."""

    def build(self) -> None:
        super().build()
        self.scale = torch.nn.Parameter(torch.ones(6))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss, _ = self.net(x * self.scale, y)
        return loss


class ReturnsTwoLosses(GoesBackInsideOfItsCall):
    """Two losses are returned, and both learn: backwards follow the call."""

    class Net(Layers):
        def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
            logits = super().forward(x)
            return cross_entropy(logits, y), mse_loss(logits, torch.zeros_like(logits))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        one, other = self.net(x, y)
        return one + other.sqrt()


class PlansWithoutALossInside(GoesBackInsideOfItsCall):
    """A plan for backwards inside of the call, and a loss that is computed outside."""

    shapes = (ONE_OF_TWO,)
    arguments: ClassVar = {
        "plan": Plan(replicas=1, stages=2, microbatches=4, schedule="1f1b", cuts=("second",))
    }

    def build(self) -> None:
        self.net = Layers()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.net(x), y)


class LetsAutoGoInside(GoesBackInsideOfItsCall):
    """`schedule="auto"`, where it takes `"1f1b"`, as it does for lack of memory."""

    fast = True
    arguments: ClassVar = {"plan": None}

    def exercise(self, run: Any) -> Any:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(planner, "plan_with_backwards_inside", lambda make: make("1f1b"))
            return super().exercise(run)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss, logits = self.net(x, y)
        self.kind = type(logits).__name__
        return loss

    def on_train_end(self) -> None:
        in_stages = type(self.trainer.strategy).__name__ == "HybridGabraStrategy"
        assert getattr(self, "kind", "Late") == "Late" or not in_stages


class CompilesInside(GoesBackInsideOfItsCall):
    """`compile_stages=True` beside it."""

    sampled = True
    arguments: ClassVar = {"schedule": "1f1b", "compile_stages": True}


class TiesWeightsAndGoesBackInside(GoesBackInsideOfItsCall):
    """Stages share a weight, as an embedding and a head do."""

    shares = True

    class Net(GoesBackInsideOfItsCall.Net):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(8, 8)
            self.first.weight = self.second.weight

        def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
            return super().forward(torch.nn.functional.pad(x, (0, 2)), y)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss, logits = self.net(x, y)
        self.seen.append(loss.item())
        self.kind = type(logits).__name__
        return loss

    def on_train_end(self) -> None:
        # (nobody has read the logits, and so they were not computed)
        in_stages = type(self.trainer.strategy).__name__ == "HybridGabraStrategy"
        assert getattr(self, "kind", "Late") == "Late" or not in_stages
