"""The training batches that come next, for schedules that launch their forwards early.

The train loader is wrapped: batches are fetched when a forward is launched, made ready as Lightning
would (precision, transfer), and handed out in their order when the Trainer asks. Everything is done
once per batch, only earlier. An error of the loader is raised where it would have been.

On one device, batch t + 1 is fetched when step t is over: it sees what that step has changed in the
data set, and draws its random numbers after it. Worker processes have a copy of the data set and
generators of their own, so they make the same batch at any time. Loaders without them are refused.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

from torch import Tensor

from lightning_hybrid._lightning import Trainer
from lightning_hybrid._trees import tensors_in
from lightning_hybrid.capture import plain
from lightning_hybrid.driver import Batches
from lightning_hybrid.errors import NetworkError


class ComingBatch:
    """A batch that the loader has given.

    Attributes:
        raw: as the loader gave it.
        error: what the loader has raised instead.
        state: of a resumable loader after it.
        handed: whether the Trainer has it.
        tensors: once it is ready, what is in it, as the network gets it.
    """

    def __init__(self, raw: Any, error: Exception | None, state: Any) -> None:
        self.raw, self.error, self.state = raw, error, state
        self.handed = self.is_ready = False
        self.ready: Any = None
        self.tensors: Sequence[Tensor] = ()

    def make_ready(self, move: Callable[[Any], Any], raw: Any) -> Any:
        """What the training step gets; made once.

        Args:
            move: makes it, from ``raw``.
            raw: the batch.
        """
        if not self.is_ready:
            self.ready = move(raw)
            self.tensors = [plain(tensor) for _, tensor in tensors_in(self.ready)]
            # both may be large, and only one is needed from here on
            self.is_ready, self.raw = True, None
        return self.ready


class Iteration:
    """One pass over a loader, whose next batches can be looked at.

    Args:
        loader: what is passed over.
        state: gives the state of a resumable one.
        asked: called whenever the next batch is asked for.
    """

    def __init__(
        self, loader: Any, state: Callable[[], Any], asked: Callable[["Iteration"], None]
    ) -> None:
        self._source, self._state, self._asked = iter(loader), state, asked
        self._batches: deque[ComingBatch] = deque()  # that were not begun
        self.handed_state: Any = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._asked(self)
        batch = next((each for each in self._batches if not each.handed), None)
        if batch is None:
            if not self._fetch():
                raise StopIteration
            batch = self._batches[-1]
        batch.handed, self.handed_state = True, batch.state
        if batch.error is not None:
            raise batch.error
        return batch.ready if batch.is_ready else batch.raw

    def begin(self) -> ComingBatch | None:
        """The oldest batch that was handed out and not begun, which is taken away."""
        if self._batches and self._batches[0].handed:
            return self._batches.popleft()
        return None

    def look(self, number: int) -> ComingBatch | None:
        """The batch of this number, from 0, of those that were not begun; ``None``: the last."""
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
        # an error waits in line: it belongs to the step that would have met it
        self._batches.append(ComingBatch(raw, error, self._state()))
        return True


class ComingLoader:
    """A loader whose next batches can be looked at; in all else it is the user's.

    Args:
        loader: the user's.

    Attributes:
        users_loader: that one.
        iteration: that was asked for a batch last. (Users look at their loaders in callbacks, too:
            the Trainer has a batch moved right after it has asked for one.)
    """

    _own = frozenset({"users_loader", "iteration"})
    users_loader: Any
    iteration: Iteration | None

    def __init__(self, loader: Any) -> None:
        self.users_loader, self.iteration = loader, None

    def __getattr__(self, name: str) -> Any:
        if name in self._own:  # of one that is being made
            raise AttributeError(name)
        return getattr(self.users_loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self.users_loader, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has the user's loader, and nothing under way."""
        return type(self), (self.users_loader,)

    def __len__(self) -> int:
        return len(self.users_loader)

    def __iter__(self) -> Iteration:
        return Iteration(self.users_loader, self._state, self._ask)

    def _ask(self, iteration: Iteration) -> None:
        self.iteration = iteration

    def _state(self) -> Any:
        return None


class ResumableLoader(ComingLoader):
    """A loader with a state, which counts the batches that the Trainer has had."""

    def state_dict(self) -> Any:
        """The state after the last batch that was handed out."""
        handed = self.iteration and self.iteration.handed_state
        return self.users_loader.state_dict() if handed is None else handed

    def load_state_dict(self, state: Any) -> None:
        """Go on from a state."""
        self.iteration = None
        self.users_loader.load_state_dict(state)

    def _state(self) -> Any:
        return self.users_loader.state_dict()


class InOrder(Batches):
    """The batches of a run whose schedule looks at none before its turn."""

    def wrap(self, loader: Any) -> Any:
        """The loader that the Trainer uses: the user's."""
        return loader

    def arrive(self, batch: Any, move: Callable[[Any], Any]) -> Any:
        """What the training step gets; see :meth:`ComingBatches.arrive`."""
        return move(batch)

    def step(self) -> AbstractContextManager[None]:
        """Inside, the batch that has arrived last is trained on."""
        return nullcontext()


class ComingBatches(Batches):
    """The batches of one run; see :class:`lightning_hybrid.driver.streamed_calls.Batches`.

    Args:
        trainer: Lightning's.
        barrier: what no forward may be launched across: the optimizer's step, or the epoch.
    """

    def __init__(self, trainer: Trainer, barrier: Literal["step", "epoch"]) -> None:
        self._trainer, self._barrier = trainer, barrier
        self._move: Callable[[Any], Any] = lambda batch: batch
        self._begun: ComingBatch | None = None
        self._iteration: Iteration | None = None
        self._in_step = False

    def wrap(self, loader: Any) -> Any:
        """The loader that takes the place of the user's, if it may be that of the training.

        (The Tuner has loaders of the validation made while it trains.)
        """
        if not self._trainer.training:
            return loader
        # Lightning looks for these methods by name, so a loader without a state must not have them
        resumable = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        return (ResumableLoader if resumable else ComingLoader)(loader)

    def arrive(self, batch: Any, move: Callable[[Any], Any]) -> Any:
        """What the training step gets for a batch.

        Args:
            batch: as the precision plugin has made it.
            move: brings it to the device.
        """
        if not self._trainer.training:
            return move(batch)
        self._iteration, self._move = self._the_loader().iteration, move
        self._begun = self._iteration.begin() if self._iteration else None
        return move(batch) if self._begun is None else self._begun.make_ready(move, batch)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, the batch that has arrived last is trained on."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def ahead(self, count: int) -> ComingBatch | None:
        """See :class:`lightning_hybrid.driver.streamed_calls.Batches`."""
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
        """How many batches there are between this one and the barrier."""
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
        """The train loader.

        Raises:
            NetworkError: there are several, or it has no worker processes.
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
        return loader
