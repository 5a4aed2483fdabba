"""The calls of networks within a training step: their number decides their random numbers."""

from contextlib import AbstractContextManager

import torch

from lightning_hybrid.pipeline import draw_number, generators_of_microbatch, microbatch_seed


class StepCalls:
    """Numbers the calls of one driver.

    Args:
        seed: of the random numbers inside networks.
        replica: number of the replica.
        device: the driver's.

    Attributes:
        count: differentiable calls in this step so far.
    """

    def __init__(self, seed: int, replica: int, device: torch.device) -> None:
        self._seed, self._replica, self._device = seed, replica, device
        self.count = 0
        self._batch = self._streams = self._evaluations = 0

    def begin(self, batch: int) -> None:
        """A training step begins.

        Args:
            batch: how many training batches the run has seen before.
        """
        self._batch, self.count, self._streams = batch, 0, 0

    def draw_number(self, grad: bool) -> int:
        """The number of the next call, for its random numbers."""
        if grad:
            return draw_number(self._batch, self.count + self._streams)
        self._evaluations += 1  # networks that draw without gradients (dropout at test time)
        return -self._evaluations

    def draw_number_ahead(self, batches: int) -> int:
        """The number of the first differentiable call in the step so many batches ahead."""
        return draw_number(self._batch + batches, 0)

    def note(self) -> None:
        """A differentiable call of a network was made."""
        self.count += 1

    def one_stream(self) -> AbstractContextManager[None]:
        """Inside is one call, whole: this rank draws from the generators that the call has."""
        grad = torch.is_grad_enabled()
        seed = microbatch_seed(self._seed, self._replica, self.draw_number(grad), 0)
        self._streams += grad
        return generators_of_microbatch(seed, self._device)
