"""What Lightning asks a strategy in a run: batches, steps, optimizers and hooks.

All of it goes to the :mod:`session <lightning_hybrid.run.session>` of this driver.
"""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid._lightning import STEP_OUTPUT, LightningModule
from lightning_hybrid.config import Config
from lightning_hybrid.errors import HybridError
from lightning_hybrid.run import BetweenRuns, DeferredModule, DriverSession, WholeModule
from lightning_hybrid.strategy.ranks import ReplicaStrategy, given


class SteppingStrategy(ReplicaStrategy):
    """Steps of a driver run on all ranks of its replica.

    Args:
        config: what the user has asked for.
        lightning: arguments of ``DDPStrategy``.
    """

    def __init__(self, config: Config, **lightning: Any) -> None:
        super().__init__(config, **lightning)
        self._building: WholeModule | DeferredModule = WholeModule()
        self._rest()

    @property
    def _module(self) -> LightningModule:
        return given(self.lightning_module, "lightning_module")

    @property
    def _driving(self) -> DriverSession:
        """The run of this driver.

        Raises:
            HybridError: there is none.
        """
        if isinstance(self._session, DriverSession):
            return self._session
        raise HybridError(
            f"{self.coordinates} is in no run: steps and hooks of training are for the drivers, "
            "between the start of trainer.fit, validate, test or predict and its end."
        )

    def _rest(self) -> None:
        self._session: BetweenRuns | DriverSession = BetweenRuns(
            self._world, self._building, divided=self._config.shard_optimizer_states
        )

    def process_dataloader(self, dataloader: object) -> object:
        """The train loader may be asked for batches before their turn."""
        dataloader = super().process_dataloader(dataloader)
        if isinstance(self._session, DriverSession):
            return self._session.train_loader(dataloader)
        return dataloader

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Batches that were needed before their turn are there already."""
        move = partial(super().batch_to_device, device=device, dataloader_idx=dataloader_idx)
        if isinstance(self._session, DriverSession):
            return self._session.move_batch(batch, move)
        return move(batch)

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        step: STEP_OUTPUT = self._driving.step(partial(super().training_step, *args, **kwargs))
        return step

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """As in every strategy, and gradients are averaged before any hook sees them."""
        module, precision = self._module, self.precision_plugin
        loss = precision.pre_backward(closure_loss, module)
        weighted = self._driving.weighted(loss)
        self._driving.backward(
            partial(precision.backward, weighted, module, optimizer, *args, **kwargs)
        )
        return precision.post_backward(loss, module)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self._driving.accumulating():
            yield

    @property
    def optimizers(self) -> list[Optimizer]:
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        ReplicaStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        if isinstance(self._session, DriverSession):
            self._session.connect_optimizers(optimizers)
            for wrapper, optimizer in zip(self._lightning_optimizers, optimizers):
                # the wrapper inherits zero_grad from its class and would not see the instance's
                vars(wrapper)["zero_grad"] = optimizer.zero_grad

    def on_train_start(self) -> None:
        super().on_train_start()
        self._joined.defer_signals()

    def on_test_start(self) -> None:
        super().on_test_start()
        self._joined.defer_signals()
        self._driving.evaluation_starts(between=False)

    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._joined.defer_signals()
        self._driving.evaluation_starts(between=False)

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._joined.defer_signals()
        self._driving.evaluation_starts(between=True)

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._driving.evaluates()
        return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._driving.evaluates()
        return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._driving.evaluates()
        return super().predict_step(*args, **kwargs)

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._driving.evaluates()
        self._driving.validation_ends()

    def on_test_end(self) -> None:
        super().on_test_end()
        self._driving.evaluates()

    def on_predict_end(self) -> None:
        super().on_predict_end()
        self._driving.evaluates()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._driving.batch_starts(batch)

    def on_train_end(self) -> None:
        super().on_train_end()
        self._driving.training_ends()
