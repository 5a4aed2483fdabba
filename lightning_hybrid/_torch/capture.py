"""TorchDynamo: how it is set for the capture of a network, and what it keeps."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, TypeVar

import torch
import torch._dynamo.config as dynamo_module
import torch.fx.experimental._config as shape_module
from torch import Tensor

# what TorchDynamo keeps for as long as the process lives
from torch._C._dynamo.eval_frame import reset_code as _reset_code

# by which Python that is being captured says why it cannot be
from torch._dynamo.decorators import graph_break as stop_capture
from torch._dynamo.eval_frame import cached_backends as _cached_backends

# what torch.compile raises where it cannot follow, and why it compiled again
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import get_compilation_metrics, specialize_symnode
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.optimizer import OptimizerVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

# modes that rewrite functions are part of what TorchDynamo captures, so ours must step aside
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

from lightning_hybrid._torch.absent_names import ABSENT_NAMES
from lightning_hybrid._torch.being_compiled import QUESTIONS
from lightning_hybrid._torch.cached_functions import CACHED_FUNCTIONS
from lightning_hybrid._torch.containers import CONTAINERS, TABLES
from lightning_hybrid._torch.exchanged import Exchanged, exchanged_methods

FAILED_AT_ONCE = "Guard failed on the same frame it was created"
"""How an `AssertionError` of TorchDynamo's begins where it describes an object wrongly.

(In inference mode: an array of NumPy that becomes a tensor. Nothing has run then.)
"""

Mode = TypeVar("Mode")

__all__ = ["FailOnRecompileLimitHit", "TorchDynamoException", "stop_capture"]


@contextmanager
def without_mode(kind: type[Mode]) -> Iterator[Mode | None]:
    """Inside, a torch function mode of this kind, if it is the innermost one, is not active."""
    mode = _get_current_function_mode()
    if isinstance(mode, kind):
        with _pop_mode_temporarily():
            yield mode
    else:
        yield None


# torch gives these modules a method that their source does not show
dynamo_config: Any = dynamo_module
shape_config: Any = shape_module

_CAPTURE: dict[str, Any] = {
    # a network must never run uncaptured without a word
    "fail_on_recompile_limit_hit": True,
    "recompile_limit": 64,
    # hooks that are put on inner modules in the middle of a run are seen
    "skip_nnmodule_hook_guards": False,
    # values in control flow that does not branch on them
    "capture_dynamic_output_shape_ops": True,
    "capture_scalar_outputs": True,
    "allow_rnn": True,
    # counters on modules become inputs when they change
    "allow_unspec_int_on_nn_module": True,
}


# `patch` makes a class and looks at each setting, in every step; torch has this for such places
_PATCHES = (
    dynamo_config._make_closure_patcher(**_CAPTURE),
    # sizes are equal if the code says so, not because they happen to be
    shape_config._make_closure_patcher(use_duck_shape=False),
)


_capturing = threading.local()


def _is_capturing() -> bool:
    return getattr(_capturing, "depth", 0) > 0


_optimizers: Any = OptimizerVariable
_looks: Any = _optimizers.var_getattr


def _looks_at_optimizer(*arguments: Any) -> Any:
    """Where code looks at an optimizer (its learning rate): as at any other object.

    TorchDynamo would make constants of its parameters, and set `capturable` in it: it is prepared
    for code that steps, which other threads may be capturing meanwhile.
    """
    if _is_capturing():
        return UserDefinedObjectVariable.var_getattr(*arguments)
    return _looks(*arguments)


_captured_optimizers = Exchanged(
    lambda: setattr(_optimizers, "var_getattr", _looks_at_optimizer),
    lambda: setattr(_optimizers, "var_getattr", _looks),
)

_dictionaries: Any = ConstDictVariable
_guard_key: Any = _dictionaries.install_dict_contains_guard


def _guard_number_as_key(self: Any, tx: Any, args: Any) -> None:
    """Where a number that follows from sizes or values is looked up in a dictionary.

    TorchDynamo makes a constant of it to look it up, and where it was not found does not guard that
    it still is not there: a cache that has been filled since would never be read.
    """
    if _is_capturing():
        args = [specialize_symnode(args[0]), *args[1:]]
    _guard_key(self, tx, args)


_guarded_keys = Exchanged(
    lambda: setattr(_dictionaries, "install_dict_contains_guard", _guard_number_as_key),
    lambda: setattr(_dictionaries, "install_dict_contains_guard", _guard_key),
)

_corrected = exchanged_methods(
    (*ABSENT_NAMES, *CACHED_FUNCTIONS, *CONTAINERS, *QUESTIONS), _is_capturing, TABLES
)

_guards: Any = torch._dynamo.guards
_measure_guards: Any = _guards.profile_guard_manager
# for a line in a log it times the guards of each graph, behind a flush of the caches: 10 to 50 ms
_unmeasured_guards = Exchanged(
    lambda: setattr(_guards, "profile_guard_manager", lambda *_: 0.0),
    lambda: setattr(_guards, "profile_guard_manager", _measure_guards),
)

_opened: Any = torch._C
_select_backend: Any = _opened._select_conv_backend


def _select_without_guard(input: Any, *arguments: Any, **keywords: Any) -> Any:
    """How a convolution will be computed, which depends on the size of the batch (16 on CPUs).

    TorchDynamo would take that for a condition of the graph, so that no batch of 16 could be split
    into smaller ones. The graph is the same, and each part is computed as its own size wants it.
    """
    mode = getattr(input, "fake_mode", None)
    if not _is_capturing() or mode is None or mode.shape_env is None:
        return _select_backend(input, *arguments, **keywords)
    with mode.shape_env.suppress_guards():
        return _select_backend(input, *arguments, **keywords)


_free_convolutions = Exchanged(
    lambda: setattr(_opened, "_select_conv_backend", _select_without_guard),
    lambda: setattr(_opened, "_select_conv_backend", _select_backend),
)


@contextmanager
def capture_settings() -> Iterator[None]:
    """Inside, TorchDynamo captures as this package needs it, in this thread alone."""
    reverts = [patch() for patch in _PATCHES]
    _capturing.depth = getattr(_capturing, "depth", 0) + 1
    try:
        with (
            _captured_optimizers,
            _guarded_keys,
            _corrected,
            _unmeasured_guards,
            _free_convolutions,
        ):
            yield
    finally:
        _capturing.depth -= 1
        for revert in reverts:
            revert()


def free_first_size(tensors: Iterable[Tensor]) -> None:
    """Ask TorchDynamo to keep dimension 0 of these tensors free, if their code allows it."""
    for tensor in tensors:
        if tensor.dim():
            torch._dynamo.maybe_mark_dynamic(tensor, 0)


def recapture_reason() -> str | None:
    """Why the last capture was needed: the guard that failed, as TorchDynamo words it."""
    metrics = get_compilation_metrics()
    return metrics[-1].recompile_reason if metrics else None


def forget_compiled(owner: object, code: CodeType) -> None:
    """Have TorchDynamo let go of what it has compiled.

    Args:
        owner: whose method is the backend.
        code: what was compiled for it.
    """
    for key, backend in [*_cached_backends.items()]:
        if getattr(_innermost(backend), "__self__", None) is owner:
            del _cached_backends[key]
    _reset_code(code)


def _innermost(backend: Any) -> Any:
    """What was given to ``torch.compile``, out of its wrappers."""
    for name in ("_torchdynamo_orig_backend", "compiler_fn"):
        if hasattr(backend, name):
            return _innermost(getattr(backend, name))
    return backend
