"""What the ``step`` of an optimizer changes by itself before it calls its closure.

A subclass may count its steps and set its learning rate first (Noam, warm-ups)::

    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = rate_of(self.steps)
        return super().step(closure)

A worker's ``step`` does so too, when its driver's is over. So the worker has to be given the
optimizer as it was before the driver's began. What the closure changes belongs to that: it is the
user's code, and runs on the driver alone.
"""

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.errors import HybridError

_Values = dict[str, Any]
_MISSING = object()
# parameters, states and groups go to the workers with each command to step or to take them
_ELSEWHERE = {"params", "state", "param_groups", "defaults"}


class OwnChanges:
    """Of one optimizer, in one step at a time: in attributes and hyper-parameters.

    Args:
        optimizer: that steps.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._start: list[tuple[dict[str, Any], _Values]] = []
        self._own: list[tuple[dict[str, Any], str, Any, Any]] = []

    def begin(self) -> None:
        """A step begins."""
        self._own = []
        self._start = [(holder, _copied(holder)) for holder in self._holders()]

    def closure_called(self) -> None:
        """The step has called its closure: what is different by now it has changed itself."""
        for holder, before in self._start:
            now = _copied(holder)
            for key in before.keys() | now.keys():
                old, new = before.get(key, _MISSING), now.get(key, _MISSING)
                if not same(old, new):
                    self._own.append((holder, key, old, new))
        self._start = []

    def check(self) -> None:
        """After the closure: it may not change the same things again.

        Raises:
            HybridError: it has. A worker's step could not do both.
        """
        for holder, key, _, new in self._own:
            if not same(_copy_of(holder.get(key, _MISSING)), new):
                raise HybridError(
                    f"{type(self._optimizer).__name__}.step sets {key!r} before it calls its "
                    "closure, and training_step sets it again: on the ranks of other stages the "
                    "step would undo that. Set it in on_train_batch_start or after the step, or "
                    "use pipeline_parallel_size=1."
                )

    def end(self) -> None:
        """The step is over."""
        self._start, self._own = [], []

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Inside, the optimizer is as before its step, but for what its closure has changed."""
        undone: list[tuple[dict[str, Any], str, Any]] = []
        for holder, key, old, new in self._own:
            value = holder.get(key, _MISSING)
            if same(_copy_of(value), new):
                undone.append((holder, key, value))
                _put(holder, key, old)
        try:
            yield
        finally:
            for holder, key, value in undone:
                _put(holder, key, value)

    def _holders(self) -> list[dict[str, Any]]:
        return [vars(self._optimizer), *self._optimizer.param_groups]


def _put(holder: dict[str, Any], key: str, value: Any) -> None:
    if value is _MISSING:
        holder.pop(key, None)
    else:
        holder[key] = value


def _copied(holder: dict[str, Any]) -> _Values:
    return {
        key: _copy_of(value)
        for key, value in holder.items()
        # (code that is put on an optimizer, as by schedulers, is no value that a worker lacks)
        if key not in _ELSEWHERE and "hook" not in key and not callable(value)
    }


def _copy_of(value: Any) -> Any:
    """A copy of what is small and changes in place: counters and short histories."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.numel() == 1 else value
    return copy.copy(value) if isinstance(value, list | dict | set | deque) else value


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal bit for bit, in containers and objects too.

    What is not a number is equal to itself.
    """
    if left is right:
        return True
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        left, right = (t.detach().to_dense() if t.is_sparse else t.detach() for t in (left, right))
        alike = (left.shape, left.dtype, left.device) == (right.shape, right.dtype, right.device)
        return alike and torch.allclose(left, right, rtol=0.0, atol=0.0, equal_nan=True)
    if type(left) is not type(right):
        return False
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, np.ndarray):
        return bool(np.array_equal(left, right, equal_nan=left.dtype.kind in "fc"))
    try:
        if left == right or (left != left and right != right):
            return True
        return hasattr(left, "__dict__") and bool(vars(left)) and same(vars(left), vars(right))
    except Exception:  # a value may refuse to be compared in any way it likes, or contain itself
        return False
