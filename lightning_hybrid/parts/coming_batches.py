"""Fetch training batches before their turn, for streamed schedules, which begin forwards early.

The train loader is wrapped: a batch is fetched when its early forward is launched, prepared as
Lightning would (precision, transfer), and handed out when the Trainer asks for it. All is done once
per batch, only earlier. An error of the loader is raised when the batch has its turn.

On one device, batch t + 1 is fetched after step t: it sees what this step has changed in the data
set, and draws its random numbers after it. Loader processes have their own copy of the data set and
their own generators, so they make the same batch at any time. Loaders without such processes are
refused.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from itertools import chain
from typing import Any, Literal

from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_hybrid._lightning import MixedPrecision, Trainer, is_overridden
from lightning_hybrid._trees import tensors_in
from lightning_hybrid.capture import plain
from lightning_hybrid.driver import Batches
from lightning_hybrid.errors import NetworkError, PlanError
from lightning_hybrid.run import Part, Run, scalers_of
from lightning_hybrid.schedules import LookAhead
from lightning_hybrid.stage import state_buffers


class ComingBatch:
    """A batch that was fetched from the loader, possibly before the Trainer has asked for it.

    Attributes:
        raw: the batch as the loader gave it; ``None`` once it is prepared.
        error: the error that the loader has raised instead of giving the batch; ``None``: none.
        handed: whether the Trainer has got the batch.
        is_ready: whether the batch is prepared for the training step.
        ready: the prepared batch; ``None`` before.
        tensors: the tensors of the prepared batch; empty before.
    """

    def __init__(self, raw: Any, error: Exception | None) -> None:
        self.raw = raw
        self.error = error
        self.handed = self.is_ready = False
        self.ready: Any = None
        self.tensors: Sequence[Tensor] = ()

    def make_ready(self, move: Callable[[Any], Any], raw: Any) -> Any:
        """Return the batch prepared for the training step; only the first call prepares it.

        Args:
            move: function that returns a batch prepared, such as moved to the device.
            raw: the batch to give to ``move``.
        """
        if not self.is_ready:
            self.ready = move(raw)
            self.tensors = [plain(tensor) for _, tensor in tensors_in(self.ready)]
            # drop the original, which may be large
            self.is_ready = True
            self.raw = None
        return self.ready


class Iteration:
    """An iterator over a data loader that can also fetch batches ahead.

    A batch *begins* when the Trainer has got it and prepares it for its training step.

    Args:
        loader: the data loader.
        asked: called with this iterator whenever the next batch is asked for.
    """

    def __init__(self, loader: Any, asked: Callable[["Iteration"], None]) -> None:
        self._source = iter(loader)
        self._asked = asked
        self._batches: deque[ComingBatch] = deque()  # fetched, and not begun yet

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._asked(self)
        batch = next((each for each in self._batches if not each.handed), None)
        if batch is None:
            if not self._fetch():
                raise StopIteration
            batch = self._batches[-1]
        batch.handed = True
        if batch.error is not None:
            raise batch.error
        return batch.ready if batch.is_ready else batch.raw

    def begin(self) -> ComingBatch | None:
        """Remove and return the oldest batch, if the Trainer has got it; ``None``: it has not."""
        if self._batches and self._batches[0].handed:
            return self._batches.popleft()
        return None

    def look(self, number: int) -> ComingBatch | None:
        """Return a batch that has not begun, and fetch it if need be.

        Args:
            number: its place among those that have not begun, from 0.

        Returns:
            The batch, whose ``error`` may be set; ``None``: the loader ends before it.
        """
        while len(self._batches) <= number:
            if not self._fetch():
                return None
        return self._batches[number]

    def _fetch(self) -> bool:
        if self._batches and self._batches[-1].error is not None:
            return False
        raw, error = None, None
        try:
            raw = next(self._source)
        except StopIteration:
            return False
        except Exception as raised:
            error = raised
        # an error takes the place of its batch, and is raised when that has its turn
        self._batches.append(ComingBatch(raw, error))
        return True


class ComingLoader:
    """Wraps the user's data loader so that batches can be fetched ahead.

    All attributes but these two are those of the user's loader.

    Args:
        loader: the user's loader.

    Attributes:
        users_loader: the user's loader.
        iteration: the iterator over this loader that was asked for a batch last; ``None``: none
            was. (Users may iterate over their loaders too, in callbacks. But when the Trainer
            prepares a batch, it has just asked its own iterator for one.)
    """

    _own = frozenset({"users_loader", "iteration"})
    users_loader: Any
    iteration: Iteration | None

    def __init__(self, loader: Any) -> None:
        self.users_loader = loader
        self.iteration = None

    def __getattr__(self, name: str) -> Any:
        if name in self._own:  # not set yet, in the constructor
            raise AttributeError(name)
        return getattr(self.users_loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self.users_loader, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Have a copy or pickle become a new wrapper of the user's loader, without iterations."""
        return type(self), (self.users_loader,)

    def __len__(self) -> int:
        return len(self.users_loader)

    def __iter__(self) -> Iteration:
        return Iteration(self.users_loader, self._ask)

    def _ask(self, iteration: Iteration) -> None:
        self.iteration = iteration


class ComingBatches(Part, Batches):
    """The part of a run with a streamed schedule: gives the driver later batches early.

    See :class:`lightning_hybrid.driver.streamed_calls.Batches`.

    Args:
        trainer: the Trainer.
        barrier: which batches may be fetched early: ``"step"``: those before the optimizer's next
            step; ``"epoch"``: those before the end of the epoch.
    """

    def __init__(self, trainer: Trainer, barrier: Literal["step", "epoch"]) -> None:
        self._trainer = trainer
        self._barrier = barrier
        self._move: Callable[[Any], Any] = lambda batch: batch
        self._begun: ComingBatch | None = None
        self._iteration: Iteration | None = None
        self._in_step = False

    def train_loader(self, loader: Any) -> Any:
        """Return a wrapper of a data loader, which can fetch batches ahead."""
        return ComingLoader(loader)

    def move_batch(self, batch: Any, move: Callable[[Any], Any]) -> Any:
        """Begin the batch that the Trainer has just got; return it prepared for the training step.

        Args:
            batch: the batch, converted by the precision plugin.
            move: function that returns a batch on the device.

        Raises:
            NetworkError: batches of the Trainer's loaders cannot be fetched early.
        """
        self._iteration = self._the_loader().iteration
        self._move = move
        self._begun = self._iteration.begin() if self._iteration else None
        return move(batch) if self._begun is None else self._begun.make_ready(move, batch)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Return a context for a training step; only inside does :meth:`ahead` give batches."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def ahead(self, count: int) -> ComingBatch | None:
        """Fetch and prepare a batch before its turn, and return it.

        Args:
            count: how many batches after the one that is trained on; 0: that one itself.

        Returns:
            The batch; ``None``: no batch is trained on now, or the barrier or the end of the loader
            comes before the batch, or the loader raises an error for it.
        """
        if not self._in_step or count == 0 or self._begun is None:
            return self._begun if self._in_step else None
        if count > self._room() or self._iteration is None:
            return None
        batch = self._iteration.look(count - 1)
        if batch is None or batch.error is not None:
            return None
        batch.make_ready(self._convert_and_move, batch.raw)
        return batch

    def _convert_and_move(self, raw: Any) -> Any:
        return self._move(self._trainer.precision_plugin.convert_input(raw))

    def _room(self) -> float:
        """Number of batches after the current one that may be fetched: up to barrier and end."""
        trainer = self._trainer
        number, window = trainer.fit_loop.epoch_loop.batch_idx, trainer.accumulate_grad_batches
        room = trainer.num_training_batches - 1 - number
        if self._barrier == "step":
            room = min(room, window - 1 - number % window)
        if trainer.max_steps != -1:
            steps = trainer.max_steps - trainer.global_step
            room = min(room, steps * window - 1 - number % window)
        return room

    def _the_loader(self) -> ComingLoader:
        """Return the Trainer's train loader, which this part has wrapped.

        Raises:
            NetworkError: there are several loaders; or it makes batches in this process; or it has
                a state of its own for checkpoints.
        """
        loader = self._trainer.train_dataloader
        if not isinstance(loader, ComingLoader):
            raise NetworkError(
                "This schedule begins with later batches early, and knows those of one train "
                "loader, not of several or of a collection of loaders. Let train_dataloader return "
                "one loader, or use schedule='gpipe'."
            )
        if not getattr(loader.users_loader, "num_workers", 0):
            raise NetworkError(
                "This schedule begins with later batches early, and the train loader makes them "
                "in this process, where training_step may change what they read, or draw from the "
                "same random numbers. Use DataLoader(num_workers=1) or more (as a copy of the data "
                "set makes them then), or schedule='gpipe'."
            )
        if hasattr(loader, "state_dict"):
            raise NetworkError(
                "This schedule begins with later batches early, and a checkpoint would have the "
                f"state of the train loader ({type(loader.users_loader).__name__}.state_dict) "
                "after these. Use a loader without a state (torch.utils.data.DataLoader), or "
                "schedule='gpipe'."
            )
        return loader


class PlainDescent(Part):
    """The part of a run that refuses other optimizers than SGD without momentum and weight decay.

    It is for schedules whose formulas are those of plain gradient descent.

    Args:
        schedule: the argument ``schedule`` as text, for the error.
    """

    def __init__(self, schedule: str) -> None:
        self._schedule = schedule

    def begin_training(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            groups = optimizer.param_groups if isinstance(optimizer, SGD) else [{}]
            if any(one.get("momentum") != 0 or one.get("weight_decay") != 0 for one in groups):
                raise PlanError(
                    f"{self._schedule} is plain gradient descent, w - rate * gradient (Eq. 2), and "
                    f"{type(optimizer).__name__} does something else. Use torch.optim.SGD without "
                    "momentum and weight decay; or Delayed('fdg'), which has the same delays."
                )


def refuse_streaming(run: Run) -> None:
    """Refuse what contradicts a streamed schedule, which begins forwards of later batches early.

    With another schedule, one stage, or no training nothing is refused. What only the network's
    first call shows is refused in that call: see :mod:`lightning_hybrid.driver.streamed_calls`.

    Args:
        run: the run, which is about to begin.

    Raises:
        PlanError: something contradicts the schedule.
    """
    schedule = run.config.streamed
    if schedule is None or not run.fitting or run.world.coordinates.ranks_per_replica == 1:
        return
    for reason in chain(
        _unknown_batches(run), _unknown_weights(run, schedule), _waits_for_each_send(run)
    ):
        raise PlanError(
            f"{run.config.shown_schedule} begins with later batches early, and {reason}; or use "
            "schedule='gpipe'."
        )


def _unknown_batches(run: Run) -> Iterator[str]:
    """Yield reasons why later batches, or their steps, are not known beforehand.

    Each is the part of the error of :func:`refuse_streaming` behind "early, and"; none: they are
    known.
    """
    module = run.trainer.lightning_module
    if not module.automatic_optimization:
        yield (
            "with manual optimization it is not known when a batch steps. Use automatic "
            "optimization (automatic_optimization = True)"
        )
    if scalers_of(run.precision):
        yield (
            "the scale of the loss (precision='16-mixed') decides on each step only when all "
            "stages are done with it. Use precision='bf16-mixed'"
        )
    for owner in (module, getattr(run.trainer, "datamodule", None)):
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
            if owner is not None and is_overridden(hook, owner):
                yield (
                    f"{type(owner).__name__}.{hook} would be called before the steps of earlier "
                    "batches. Move its work to the dataset, or into the network"
                )
    if "dataloader_iter" in signature(module.training_step).parameters:
        yield ("training_step(dataloader_iter) fetches its batches itself. Let it take a batch")


def _waits_for_each_send(run: Run) -> Iterator[str]:
    """Yield the reason, if there is one, why a rank cannot send before the next one receives.

    It is a part of an error, as those of `_unknown_batches`.
    """
    blocks = os.environ.get("CUDA_LAUNCH_BLOCKING") == "1"
    if blocks and run.world.mesh.backend == "nccl":
        yield (
            "CUDA_LAUNCH_BLOCKING=1 has a rank that sends of a later batch wait for one that "
            "still trains on this batch, for ever. Unset it"
        )


def _unknown_weights(run: Run, schedule: LookAhead) -> Iterator[str]:
    """Yield reasons why stages that run ahead lack the right weights or buffers.

    They are parts of an error, as those of `_unknown_batches`.

    Args:
        run: the run.
        schedule: its streamed schedule.
    """
    config = run.config
    if config.several_stages_per_device:
        yield "each device must have one stage. Use Search(contiguous=True), or such a plan"
    if config.compile_stages and schedule.delayed:
        yield (
            "compiled stages (compile_stages=True) do not say which weights their backward needs. "
            "Leave it out"
        )
    weights = config.settings.delayed_weights
    if weights == "current" and isinstance(run.precision, MixedPrecision):
        yield (
            "weights='current' is not what autocast does, which keeps its own copies of the "
            "weights. Use weights='stash'"
        )
    if run.synchronised:
        yield (
            "batch statistics over the replicas (sync_batchnorm=True) need them in step. Leave "
            "it out"
        )
    if run.world.coordinates.replicas > 1 and state_buffers(run.module):
        yield (
            "the network reads buffers in training that each step gives to all replicas "
            "(codebooks, queues, spectral norms). Use data_parallel_size=1"
        )
