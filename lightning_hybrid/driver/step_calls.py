"""Numbers the calls of networks within a training step; the numbers seed their random layers."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from weakref import WeakKeyDictionary

import torch

from lightning_hybrid._torch.autograd import pass_number
from lightning_hybrid.stage import draw_number, generators_of_microbatch, microbatch_seed


class StepCalls:
    """Numbers the calls of networks on one driver.

    Args:
        seed: seed of the random numbers inside networks.
        replica: number of the replica.
        device: the driver's device.
        follows: whether networks draw what they would draw on one device, from the generators of
            the code around them (``rng="device"``).

    Attributes:
        follows: see above.
        count: how many differentiable calls of networks this step has made so far.
    """

    def __init__(
        self, seed: int, replica: int, device: torch.device, *, follows: bool = False
    ) -> None:
        self.follows = follows
        self._seed, self._replica, self._device = seed, replica, device
        self.count = 0
        self._batch = self._streams = self._evaluations = 0
        # (weak keys: torch keeps a region's frame as long as it may run the region again)
        self._regions: WeakKeyDictionary[object, _Region] = WeakKeyDictionary()
        self._region: _Region | None = None
        self._expected: int | None = None

    def begin(self, batch: int) -> None:
        """Count calls anew, as a training step begins.

        Args:
            batch: how many training batches the run has seen before.
        """
        self._batch, self.count, self._streams = batch, 0, 0
        self._expected = None  # (it may be left from a call that has failed)

    @contextmanager
    def in_region(self, region: tuple[object, bool] | None) -> Iterator[None]:
        """Inside, a network is called in a region of activation checkpointing.

        If checkpointing runs the region again, its calls get the same numbers again.

        Args:
            region: torch's frame of the region, and whether it runs again; ``None``: there is none.
        """
        # (regions may be nested)
        before = self._region
        self._region = None
        if region is not None:
            frame, again = region
            self._region = self._regions.setdefault(frame, _Region())
            self._region.enter(pass_number() if again else None)
        try:
            yield
        finally:
            self._region = before

    def expect(self, grad: bool) -> int:
        """Fix the number that the next call will have, and return it."""
        self._expected = None
        self._expected = self.draw_number(grad)
        return self._expected

    def draw_number(self, grad: bool) -> int:
        """The number of the call that is made now, which seeds its random numbers."""
        if self._expected is not None:
            number, self._expected = self._expected, None
            return number
        if self._region is None:
            return self._next(grad)
        return self._region.number(partial(self._next, grad))

    def _next(self, grad: bool) -> int:
        if grad:
            # (by batch and call alone, so that a resumed run draws as an uninterrupted one)
            return draw_number(self._batch, self.count + self._streams)
        # (negative, and so never that of a training call; for dropout at test time and the like)
        self._evaluations += 1
        return -self._evaluations

    def draw_number_ahead(self, batches: int) -> int:
        """The number of the first differentiable call in the step so many batches ahead."""
        return draw_number(self._batch + batches, 0)

    def note(self) -> None:
        """Count a differentiable call of a network."""
        self.count += 1

    def one_stream(self) -> AbstractContextManager[None]:
        """Inside, a call on a whole batch draws random numbers on this rank, seeded by its number.

        With ``follows`` it draws from the generators of the code around it.
        """
        if self.follows:
            return nullcontext()
        grad = torch.is_grad_enabled()
        draw = self.draw_number(grad)
        self._streams += grad
        return self.generators_of(draw)

    def generators_of(self, draw: int) -> AbstractContextManager[None]:
        """Inside, this rank draws the random numbers of a call's first micro-batch.

        Args:
            draw: the number of the call.
        """
        seed = microbatch_seed(self._seed, self._replica, draw, 0)
        return generators_of_microbatch(seed, self._device)


class _Region:
    """The numbers of the calls in a region of activation checkpointing, in order."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._pass: int | None = None
        self._place = 0

    def enter(self, number: int | None) -> None:
        """Start from the first number again if another backward pass runs the region again.

        Args:
            number: number of the backward pass that runs the region again; ``None``: the region
                runs for the first time.
        """
        if number != self._pass:
            self._pass, self._place = number, 0

    def number(self, new: Callable[[], int]) -> int:
        """The number of the next call in the region: a known one, or one that ``new`` makes."""
        if self._pass is None or self._place == len(self._numbers):
            self._numbers.append(new())
            return self._numbers[-1]
        self._place += 1
        return self._numbers[self._place - 1]
