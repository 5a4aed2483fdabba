"""Fetch training batches before their turn, for streamed schedules, which run forwards early.

The train loader is wrapped: batches are fetched when an early forward is launched, prepared as
Lightning would (precision, transfer), and handed out in their order when the Trainer asks. All is
done once per batch, only earlier. An error of the loader is raised when the batch has its turn.

On one device, batch t + 1 is fetched after step t: it sees what this step has changed in the data
set, and draws its random numbers after it. Loader processes have their own copy of the data set and
their own generators, so they make the same batch at any time. Loaders without such processes are
refused.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor

from lightning_hybrid._lightning import Trainer
from lightning_hybrid._trees import tensors_in
from lightning_hybrid.capture import plain
from lightning_hybrid.driver import Batches
from lightning_hybrid.errors import NetworkError


class ComingBatch:
    """A batch that was fetched from the loader.

    Attributes:
        raw: the batch as the loader gave it.
        error: the error that the loader has raised in its place; ``None``: it has not.
        handed: whether the Trainer has got the batch.
        is_ready: whether the batch is prepared for the training step.
        ready: the prepared batch.
        tensors: the tensors of the prepared batch.
    """

    def __init__(self, raw: Any, error: Exception | None) -> None:
        self.raw = raw
        self.error = error
        self.handed = self.is_ready = False
        self.ready: Any = None
        self.tensors: Sequence[Tensor] = ()

    def make_ready(self, move: Callable[[Any], Any], raw: Any) -> Any:
        """Prepare the batch for the training step, at the first call; return it.

        Args:
            move: prepares a batch.
            raw: the batch to prepare.
        """
        if not self.is_ready:
            self.ready = move(raw)
            self.tensors = [plain(tensor) for _, tensor in tensors_in(self.ready)]
            # drop the original, which may be large
            self.is_ready = True
            self.raw = None
        return self.ready


class Iteration:
    """An iterator over a loader that can fetch batches ahead.

    A batch *begins* when the Trainer has got it and prepares it for its training step.

    Args:
        loader: the loader.
        asked: called whenever the next batch is asked for.
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
        """Begin the oldest batch that was handed out: remove and return it; ``None``: no such."""
        if self._batches and self._batches[0].handed:
            return self._batches.popleft()
        return None

    def look(self, number: int) -> ComingBatch | None:
        """The batch of this number, from 0, among those not begun; ``None``: there are fewer."""
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
    """Wraps the user's loader so that batches can be fetched ahead; all else is delegated to it.

    Args:
        loader: the user's loader.

    Attributes:
        users_loader: the user's loader.
        iteration: the iterator that was asked for a batch last. It is the Trainer's when the
            Trainer prepares a batch, which it does right after asking for one; users may iterate
            over their loaders too, in callbacks.
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
        """Copy or pickle it as a new wrapper of the user's loader."""
        return type(self), (self.users_loader,)

    def __len__(self) -> int:
        return len(self.users_loader)

    def __iter__(self) -> Iteration:
        return Iteration(self.users_loader, self._ask)

    def _ask(self, iteration: Iteration) -> None:
        self.iteration = iteration


class ComingBatches(Batches):
    """The batches of a run with a streamed schedule.

    See :class:`lightning_hybrid.driver.streamed_calls.Batches`.

    Args:
        trainer: the Trainer.
        barrier: which batches may be fetched early: those before the optimizer's next ``step``, or
            those before the end of the ``epoch``.
    """

    def __init__(self, trainer: Trainer, barrier: Literal["step", "epoch"]) -> None:
        self._trainer = trainer
        self._barrier = barrier
        self._move: Callable[[Any], Any] = lambda batch: batch
        self._begun: ComingBatch | None = None
        self._iteration: Iteration | None = None
        self._in_step = False

    def wrap(self, loader: Any) -> Any:
        """Wrap a loader that is made while the Trainer trains; return any other as it is.

        (It may be a validation loader, which the Tuner has made then.)
        """
        return ComingLoader(loader) if self._trainer.training else loader

    def arrive(self, batch: Any, move: Callable[[Any], Any]) -> Any:
        """Begin the batch that the Trainer has got, and prepare it for the training step.

        Args:
            batch: the batch, as the precision plugin has made it.
            move: moves a batch to the device.
        """
        if not self._trainer.training:
            return move(batch)
        self._iteration = self._the_loader().iteration
        self._move = move
        self._begun = self._iteration.begin() if self._iteration else None
        return move(batch) if self._begun is None else self._begun.make_ready(move, batch)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Entered for the training step of each batch: only inside are later batches available."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def ahead(self, count: int) -> ComingBatch | None:
        """The batch ``count`` after the one that is trained on, which it fetches and prepares.

        Returns:
            ``None``: no batch is trained on now, or the barrier or the end of the loader comes
            before that batch, or the loader raises an error for it.
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
        """Number of batches after the current one that come before the barrier."""
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
        """The wrapped train loader.

        Raises:
            NetworkError: there are several loaders, or it has no loader processes, or a state.
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
