"""Records what an optimizer's ``step`` itself changes before it calls its closure.

A subclass may count its steps and set its learning rate first (Noam, warm-ups)::

    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = rate_of(self.steps)
        return super().step(closure)

A worker's ``step`` does so too, after the driver's is over. So the worker must get the optimizer as
it was before the driver's step, or it would count twice. It must also get what the closure has
changed, since the closure is the user's code and runs on the driver alone.
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
# attributes that are sent to the workers in other ways
_ELSEWHERE = {"params", "state", "param_groups", "defaults"}


class OwnChanges:
    """Changes that the step of one optimizer has made to attributes and hyper-parameters.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._start: list[tuple[dict[str, Any], _Values]] = []
        self._own: list[tuple[dict[str, Any], str, Any, Any]] = []

    def begin(self) -> None:
        """Record attributes and hyper-parameters at the start of a step."""
        self._own = []
        self._start = [(holder, _copied(holder)) for holder in self._holders()]

    def closure_called(self) -> None:
        """Record what has changed since :meth:`begin`, when the step calls its closure."""
        for holder, before in self._start:
            now = _copied(holder)
            for key in before.keys() | now.keys():
                old, new = before.get(key, _MISSING), now.get(key, _MISSING)
                if not same(old, new):
                    self._own.append((holder, key, old, new))
        self._start = []

    def check(self) -> None:
        """Check after the closure that it has not changed again what the step had changed.

        Raises:
            HybridError: it has; a worker's step would overwrite what the closure has set.
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
        """Forget the changes at the end of a step."""
        self._start, self._own = [], []

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Inside, the changes by the step itself are undone; those by its closure stay."""
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
        """The dictionaries that hold the optimizer's attributes and hyper-parameters."""
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
        # (not hooks and functions, which schedulers put on the optimizer here alone)
        if key not in _ELSEWHERE and "hook" not in key and not callable(value)
    }


def _copy_of(value: Any) -> Any:
    """A copy of a value that may change in place: a one-element tensor or a container."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.numel() == 1 else value
    return copy.copy(value) if isinstance(value, list | dict | set | deque) else value


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal bit for bit, in containers and objects too; NaN equals NaN."""
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
    except Exception:  # (a value may raise any error when it is compared, or contain itself)
        return False
