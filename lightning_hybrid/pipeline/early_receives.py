"""Receives that are under way before they are needed."""

from collections.abc import Callable, Sequence

from lightning_hybrid.comm import Arriving
from lightning_hybrid.pipeline.calls import Values
from lightning_hybrid.schedules import Instruction, Kind


class Ahead:
    """Receives that are posted one before they are needed, so that they overlap computation."""

    def __init__(
        self, steps: Sequence[Instruction], kind: Kind, post: Callable[[int], Arriving]
    ) -> None:
        self._todo = [step.microbatch for step in reversed(steps) if step.kind is kind]
        self._post = post
        self._posted: Arriving | None = None

    def take(self, microbatch: int) -> Values:
        """Wait for this micro-batch's tensors, after posting the receive of the next one's.

        Raises:
            ValueError: it is not this one's turn in the instruction list.
        """
        due = self._todo.pop()
        if microbatch != due:
            raise ValueError(f"micro-batch {microbatch} is taken where the list has {due}")
        arrival = self._posted or self._post(microbatch)
        self._posted = self._post(self._todo[-1]) if self._todo else None
        return arrival.wait()
