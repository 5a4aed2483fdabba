"""TorchDynamo: its settings and patched functions during captures, and freeing what it keeps."""

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pkgutil import resolve_name
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_hybrid._torch.private_names import find

# what TorchDynamo keeps for as long as the process lives
_reset_code = find("torch:_C._dynamo.eval_frame.reset_code")
_cached_backends = find("torch._dynamo.eval_frame:cached_backends")

# the function by which code that is being captured stops the capture, with a reason
stop_capture = find("torch._dynamo.decorators:graph_break")

# errors of torch.compile where it cannot follow, and its records of compilations
FailOnRecompileLimitHit = find("torch._dynamo.exc:FailOnRecompileLimitHit")
TorchDynamoException = find("torch._dynamo.exc:TorchDynamoException")
_compilations = find("torch._dynamo.utils:get_compilation_metrics", list)

# TorchDynamo captures what function modes do, so this package's must be off meanwhile
_function_mode = find("torch.overrides:_get_current_function_mode")
_without_innermost = find("torch.overrides:_pop_mode_temporarily")

_mark_dynamic = find("torch._dynamo:maybe_mark_dynamic", lambda tensor, dimension: None)

FAILED_AT_ONCE = "Guard failed on the same frame it was created"
"""The beginning of the text of an `AssertionError` of TorchDynamo: a guard fails when it is made.

It is raised in inference mode for an array of NumPy that becomes a tensor, before anything runs.
"""

Mode = TypeVar("Mode")


@contextmanager
def without_mode(kind: type[Mode]) -> Iterator[Mode | None]:
    """Inside, the innermost torch function mode is off, if it is of a class; yields this mode.

    Otherwise nothing is switched off, and ``None`` is yielded.

    Args:
        kind: the class.
    """
    mode = _function_mode()
    if isinstance(mode, kind):
        with _without_innermost():
            yield mode
    else:
        yield None


_IGNORED: set[Any] = set()
"""Methods of loggers whose calls captures leave out; see `_ignore_repeated_warnings`."""

_CAPTURE: dict[str, Any] = {
    "ignore_logging_functions": _IGNORED,
    # beyond the limit an error is raised: a network must never run uncaptured in silence
    "fail_on_recompile_limit_hit": True,
    "recompile_limit": 64,
    # hooks that are put on inner modules in the middle of a run are seen
    "skip_nnmodule_hook_guards": False,
    # numbers that are read from tensors, and sizes that depend on values
    "capture_dynamic_output_shape_ops": True,
    "capture_scalar_outputs": True,
    "allow_rnn": True,
    # counters on modules become inputs when they change
    "allow_unspec_int_on_nn_module": True,
}


# each size gets a symbol of its own: sizes are equal only if the code compares them
_SHAPES = {"use_duck_shape": False}


_ABSENT = object()


def _patch(place: str, settings: dict[str, Any]) -> AbstractContextManager[None]:
    """Return a context in which a module of torch has other settings; unknown ones are left out.

    Args:
        place: dotted name of the module.
        settings: values by name of the setting.
    """
    known = {k: v for k, v in settings.items() if find(f"{place}:{k}", _ABSENT) is not _ABSENT}
    patch: AbstractContextManager[None] = resolve_name(place).patch(**known)
    return patch


# (made once: each has a `ContextVar`, of which a thread keeps all that it has ever set)
_PATCHES = (
    _patch("torch._dynamo.config", _CAPTURE),
    _patch("torch.fx.experimental._config", _SHAPES),
)


class Replaced:
    """A context in which attributes of torch's objects are replaced, for all threads.

    Several threads may be inside at once; the last that leaves puts the originals back. A
    replacement must do the same as the original for threads that capture nothing.

    Args:
        what: for each replacement an object of torch, the name of its attribute, and the new value;
            attributes that this torch does not have are left out.
    """

    def __init__(self, *what: tuple[Any, str, Any]) -> None:
        self._what = [each for each in what if hasattr(*each[:2])]
        # (a module may find its functions elsewhere, and not hold them itself)
        self._before = [vars(owner).get(name, _ABSENT) for owner, name, _ in self._what]
        self._lock = threading.Lock()
        self._inside = 0

    def put(self) -> None:
        for owner, name, instead in self._what:
            setattr(owner, name, instead)

    def back(self) -> None:
        for (owner, name, _), before in zip(self._what, self._before):
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self.put()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self.back()


_capturing = threading.local()


_select_backend = find("torch:_C._select_conv_backend")


def _select_without_guard(input: Any, *arguments: Any, **keywords: Any) -> Any:
    """Choose, in torch's place, how a convolution is computed, with no condition on the batch size.

    On CPUs the choice depends on whether there are 16 samples. TorchDynamo would make that a
    condition of the captured graph, so that a batch of 16 could not be split into smaller ones. The
    graph is the same for both choices, and each micro-batch is computed in the way for its size.
    Outside of a capture this is torch's own function.
    """
    mode = getattr(input, "fake_mode", None)
    if not getattr(_capturing, "depth", 0) or mode is None or mode.shape_env is None:
        return _select_backend(input, *arguments, **keywords)
    with mode.shape_env.suppress_guards():
        return _select_backend(input, *arguments, **keywords)


FREE_CONVOLUTIONS = torch._C, "_select_conv_backend", _select_without_guard
"""An argument of `Replaced`: with it, captures set no condition on a convolution's batch size."""


def _ignore_repeated_warnings() -> None:
    """Have captures leave out calls of ``Logger.warning_once``, at which TorchDynamo would stop.

    `transformers` adds this method to loggers, and calls it in its models. Calls of other methods
    of loggers are not left out.
    """
    method = getattr(logging.Logger, "warning_once", None)
    if method is not None:
        _IGNORED.add(method)


@contextmanager
def capture_settings() -> Iterator[None]:
    """Inside, TorchDynamo has the settings that this package needs for captures, in this thread."""
    _ignore_repeated_warnings()
    # (settings are of this thread alone; the depth tells replaced functions, which all threads
    # call, that this one captures)
    with ExitStack() as stack:
        for patch in _PATCHES:
            stack.enter_context(patch)
        _capturing.depth = getattr(_capturing, "depth", 0) + 1
        try:
            yield
        finally:
            _capturing.depth -= 1


def free_sizes(tensors: Iterable[Tensor], dimensions: int) -> None:
    """Ask TorchDynamo to leave sizes of tensors open in the next capture, where the code allows it.

    Args:
        tensors: the tensors, which are marked.
        dimensions: number of first dimensions whose sizes are left open.
    """
    for tensor in tensors:
        for dimension in range(min(tensor.dim(), dimensions)):
            _mark_dynamic(tensor, dimension)


def recapture_reason() -> str | None:
    """Return why TorchDynamo has captured again: the guard that failed; ``None``: not known."""
    metrics = _compilations()
    return metrics[-1].recompile_reason if metrics else None


def forget_compiled(owner: object, code: CodeType) -> None:
    """Have TorchDynamo free what it has captured of a function.

    Args:
        owner: the object of which the backend (the argument of ``torch.compile``) is a method.
        code: the code object of the function.
    """
    if _cached_backends is None or _reset_code is None:
        return
    for key, backend in [*_cached_backends.items()]:
        if getattr(_innermost(backend), "__self__", None) is owner:
            del _cached_backends[key]
    _reset_code(code)


def _innermost(backend: Any) -> Any:
    """Return the backend that ``torch.compile`` was given, out of torch's wrappers around it."""
    for name in ("_torchdynamo_orig_backend", "compiler_fn"):
        if hasattr(backend, name):
            return _innermost(getattr(backend, name))
    return backend
