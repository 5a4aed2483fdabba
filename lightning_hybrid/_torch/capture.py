"""TorchDynamo: how it is set for the capture of a network, and what it keeps."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pkgutil import resolve_name
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_hybrid._torch.private_names import find

# what TorchDynamo keeps for as long as the process lives
_reset_code = find("torch:_C._dynamo.eval_frame.reset_code")
_cached_backends = find("torch._dynamo.eval_frame:cached_backends")

# by which Python that is being captured says why it cannot be
stop_capture = find("torch._dynamo.decorators:graph_break")

# what torch.compile raises where it cannot follow, and why it compiled again
FailOnRecompileLimitHit = find("torch._dynamo.exc:FailOnRecompileLimitHit")
TorchDynamoException = find("torch._dynamo.exc:TorchDynamoException")
_compilations = find("torch._dynamo.utils:get_compilation_metrics", list)

# modes that rewrite functions are part of what TorchDynamo captures, so ours must step aside
_function_mode = find("torch.overrides:_get_current_function_mode")
_without_innermost = find("torch.overrides:_pop_mode_temporarily")

_mark_dynamic = find("torch._dynamo:maybe_mark_dynamic", lambda tensor, dimension: None)

FAILED_AT_ONCE = "Guard failed on the same frame it was created"
"""How an `AssertionError` of TorchDynamo's begins where it describes an object wrongly.

(In inference mode: an array of NumPy that becomes a tensor. Nothing has run then.)
"""

Mode = TypeVar("Mode")


@contextmanager
def without_mode(kind: type[Mode]) -> Iterator[Mode | None]:
    """Inside, a torch function mode of this kind, if it is the innermost one, is not active."""
    mode = _function_mode()
    if isinstance(mode, kind):
        with _without_innermost():
            yield mode
    else:
        yield None


_IGNORED: set[Any] = set()
"""Functions that log, and that captured code leaves out; see `_ignore_repeated_warnings`."""

_CAPTURE: dict[str, Any] = {
    "ignore_logging_functions": _IGNORED,
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


# sizes are equal if the code says so, not because they happen to be
_SHAPES = {"use_duck_shape": False}


def _patch(place: str, settings: dict[str, Any]) -> Callable[[], Callable[[], object]]:
    """A function that changes settings of a module of torch, and returns one that puts them back.

    A setting that this torch does not have is left out.
    """
    there = {k: v for k, v in settings.items() if find(f"{place}:{k}", _ABSENT) is not _ABSENT}
    # `patch` makes a class and looks at each setting, in every step; torch has this for such places
    fast = find(f"{place}:_make_closure_patcher")
    if fast is not None:
        patcher: Callable[[], Callable[[], object]] = fast(**there)
        return patcher

    def slowly() -> Callable[[], object]:
        stack = ExitStack()
        stack.enter_context(resolve_name(place).patch(**there))
        return stack.close

    return slowly


_ABSENT = object()
_PATCHES = (
    _patch("torch._dynamo.config", _CAPTURE),
    _patch("torch.fx.experimental._config", _SHAPES),
)


class Exchanged:
    """A context in which something of torch's is exchanged, for all threads of the process.

    The last thread that leaves it puts back what was there. What takes the place of torch's own
    must do the same as that for threads that capture nothing.

    Args:
        put: exchanges.
        back: puts back.
    """

    def __init__(self, put: Callable[[], object], back: Callable[[], object]) -> None:
        self._put, self._back = put, back
        self._lock, self._inside = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._put()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._back()


def replaced(owner: Any, name: str, instead: Any) -> Exchanged:
    """A context in which an attribute of torch's is another one."""
    original = getattr(owner, name, None)
    return Exchanged(
        lambda: setattr(owner, name, instead),
        lambda: setattr(owner, name, original),
    )


_capturing = threading.local()


def _is_capturing() -> bool:
    return getattr(_capturing, "depth", 0) > 0


_CONVOLUTION = "_select_conv_backend"
_select_backend = find(f"torch:_C.{_CONVOLUTION}")


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


_free_convolutions = replaced(torch._C, _CONVOLUTION, _select_without_guard)


def _ignore_repeated_warnings() -> None:
    """Leave out a method that `transformers` adds to loggers, and calls in the middle of a network.

    TorchDynamo would end the graph there. What the user's own code logs is as ever.
    """
    method = getattr(logging.Logger, "warning_once", None)
    if method is not None:
        _IGNORED.add(method)


@contextmanager
def capture_settings() -> Iterator[None]:
    """Inside, TorchDynamo captures as this package needs it, in this thread alone."""
    _ignore_repeated_warnings()
    # (settings are of the thread that captures, and the depth tells it from others, for which the
    # exchanged functions do as ever)
    reverts = [patch() for patch in _PATCHES]
    _capturing.depth = getattr(_capturing, "depth", 0) + 1
    try:
        with nullcontext() if _select_backend is None else _free_convolutions:
            yield
    finally:
        _capturing.depth -= 1
        for revert in reverts:
            revert()


def free_sizes(tensors: Iterable[Tensor], dimensions: int) -> None:
    """Ask TorchDynamo to keep the first dimensions of these free, if their code allows it."""
    for tensor in tensors:
        for dimension in range(min(tensor.dim(), dimensions)):
            _mark_dynamic(tensor, dimension)


def recapture_reason() -> str | None:
    """Why the last capture was needed: the guard that failed, as TorchDynamo words it."""
    metrics = _compilations()
    return metrics[-1].recompile_reason if metrics else None


def forget_compiled(owner: object, code: CodeType) -> None:
    """Have TorchDynamo let go of what it has compiled.

    Args:
        owner: whose method is the backend.
        code: what was compiled for it.
    """
    if _cached_backends is None or _reset_code is None:
        return
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
