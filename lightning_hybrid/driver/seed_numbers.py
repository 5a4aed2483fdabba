"""Gives each call of a network a number, from which its random layers are seeded.

(``rng="device"`` itself, where layers draw from the generators of the code around the call:
``driver/driven_network.py``.)
"""

from contextlib import AbstractContextManager, nullcontext

import torch

from lightning_hybrid.stage import generators_of_microbatch, microbatch_seed, seed_number_of


class StepCalls:
    """Numbers the calls of networks on one driver.

    Args:
        seed: seed of the random numbers inside networks.
        replica: number of the replica.
        device: the driver's device.
        as_on_one_device: whether networks draw what they would draw on one device, from the
            generators of the code around them (``rng="device"``).

    Attributes:
        as_on_one_device: see above.
        count: how many differentiable calls of networks this step has made so far.
    """

    def __init__(
        self, seed: int, replica: int, device: torch.device, *, as_on_one_device: bool = False
    ) -> None:
        self.as_on_one_device = as_on_one_device
        self._seed = seed
        self._replica = replica
        self._device = device
        self.count = 0
        self._batch = self._first = self._streams = self._evaluations = 0
        self._expected: int | None = None

    def begin(self, batch: int) -> None:
        """Begin a training step: count calls from 0.

        Args:
            batch: how many training batches the run has seen before.
        """
        self._batch = batch
        self._first = seed_number_of(batch, 0)
        self.count = self._streams = 0
        self._expected = None  # (it may be left from a call that has failed)

    def expect(self, grad: bool) -> int:
        """Fix the number of the next call, before it is made.

        Args:
            grad: whether that call is differentiable.

        Returns:
            The number, which the next :meth:`take_seed_number` gives again.
        """
        self._expected = None
        self._expected = self.take_seed_number(grad)
        return self._expected

    def take_seed_number(self, grad: bool) -> int:
        """Take the number of the call that is made now, which seeds its random numbers.

        Call it once for each call: evaluations are counted here, and a number that :meth:`expect`
        has fixed is used up. (Differentiable calls are counted by the caller, in :attr:`count`.)

        Args:
            grad: whether the call is differentiable. Calls that are not get negative numbers.
        """
        if self._expected is not None:
            number, self._expected = self._expected, None
            return number
        if grad:
            # (by batch and call alone, so that a resumed run draws as an uninterrupted one)
            return self._first + self.count + self._streams
        # (negative, and so never that of a training call; for dropout at test time and the like)
        self._evaluations += 1
        return -self._evaluations

    def seed_number_ahead(self, batches: int) -> int:
        """The number of the first differentiable call in a later step, for a call launched early.

        Args:
            batches: how many batches after the current one the step's batch comes.
        """
        return seed_number_of(self._batch + batches, 0)

    def one_stream(self) -> AbstractContextManager[None]:
        """Take a number for a call that this rank computes on a whole batch.

        Returns:
            A context for the call. At its beginning torch's generators are seeded by the number,
            and at its end they have their old states again. With ``as_on_one_device`` it does
            nothing.
        """
        if self.as_on_one_device:
            return nullcontext()
        grad = torch.is_grad_enabled()
        draw = self.take_seed_number(grad)
        self._streams += grad
        return self.generators_of(draw)

    def generators_of(self, draw: int) -> AbstractContextManager[None]:
        """Inside, this rank draws the numbers that the first micro-batch of a call draws in stages.

        Args:
            draw: the number of the call.
        """
        seed = microbatch_seed(self._seed, self._replica, draw, 0)
        return generators_of_microbatch(seed, self._device)
