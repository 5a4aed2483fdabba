"""Random numbers that batches and steps draw from one generator, and the order in which they do.

On one device batch t + 1 is fetched when step t is over. Under a schedule that fetches it earlier,
both get the numbers of one device as long as only one of them draws from a generator. (A loader
with worker processes draws in those; the network has generators of its own.)
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lightning_hybrid.errors import NetworkError

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
States = dict[str, Any]


class Draws:
    """Who draws from the generators that a whole process shares, and from the user's own."""

    def __init__(self) -> None:
        self._own: Mapping[str, Generator] = {}
        self._by_batches: set[str] = set()  # in fetches that came early
        self._by_others: set[str] = set()  # between these fetches
        self._last: States = {}

    def know(self, own: Mapping[str, Generator]) -> None:
        """Look at these generators, too.

        Args:
            own: by the names that messages give them.
        """
        self._own = own

    def begin(self) -> None:
        """A batch was fetched in its turn; what follows is not its doing."""
        self._last = self._states()

    @contextmanager
    def early(self) -> Iterator[None]:
        """Inside, a later batch is fetched and made ready.

        Raises:
            NetworkError: see `look`.
        """
        before = self._note()
        yield
        self._last = self._states()
        self._by_batches |= _changed(before, self._last)
        self._check()

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Inside, a batch is fetched when it would be on one device."""
        self._note()
        yield
        self._last = self._states()

    def look(self) -> None:
        """Look at what was drawn since the last fetch.

        Raises:
            NetworkError: from a generator that later batches, which came early, draw from.
        """
        self._note()
        self._check()

    def _note(self) -> States:
        now = self._states()
        self._by_others |= _changed(self._last, now)
        self._last = now
        return now

    def _check(self) -> None:
        both = self._by_batches & self._by_others
        if both:
            raise NetworkError(
                "This schedule begins with later batches early, and the train loader (or "
                f"on_after_batch_transfer) draws from {min(both)}, as something between two "
                "batches does (training_step, a hook, a validation): they would get each other's "
                "random numbers. Let the loader draw in worker processes (num_workers=1), give "
                "the dataset a generator of its own, or use schedule='gpipe'."
            )

    def _states(self) -> States:
        states: States = {
            "torch's global generator": torch.get_rng_state().numpy().tobytes(),
            "NumPy's global generator": _numpy_state(np.random.get_state(legacy=True)),
            "Python's module random": random.getstate(),
        }
        if torch.cuda.is_initialized():
            states["the CUDA generator"] = torch.cuda.get_rng_state().numpy().tobytes()
        return states | {name: _state(own) for name, own in self._own.items()}


def _state(generator: Generator) -> Any:
    """What the next number is drawn from; it can be compared."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().cpu().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return _numpy_state(generator.get_state(legacy=True))
    return repr(generator.bit_generator.state)


def _numpy_state(state: Any) -> tuple[Any, ...]:
    kind, keys, *rest = state
    return kind, np.asarray(keys).tobytes(), *rest


def _changed(before: States, after: States) -> set[str]:
    return {name for name in before.keys() & after.keys() if before[name] != after[name]}
