"""Autograd: the running backward, what the code around a call has set, and the profiler."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import Node

from lightning_hybrid._torch.private_names import find
from lightning_hybrid._torch.tensors import TorchDispatchMode

_is_batched = find("torch:_C._functorch.is_batchedtensor")
_is_batched_in_an_old_way = find("torch:_C._functorch.is_legacy_batchedtensor")
_is_wrapped = find("torch:_C._functorch.is_functorch_wrapped_tensor")
_get_unwrapped = find("torch:_C._functorch.get_unwrapped")
_functorch_level = find("torch:_C._functorch.maybe_current_level")
_without_transforms = find("torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack")
_without_modes = find("torch.utils._python_dispatch:_disable_current_modes")
_will_run = find("torch:_C._will_engine_execute_node")
_pass_number = find("torch:_C._current_graph_task_id")
_graph_is_kept = find("torch:_C._autograd._get_current_graph_task_keep_graph")
_saved_tensors_hooks = find("torch:_C._autograd._top_saved_tensors_default_hooks")
_with_forward_derivatives = find("torch.autograd.forward_ad:_set_fwd_grad_enabled")
_functional_call = find("torch.nn.utils.stateless:_functional_call")
_function_modes = find("torch.overrides:_get_current_function_mode_stack")
_dispatch_modes = find("torch.utils._python_dispatch:_get_current_dispatch_mode_stack")
_DeviceContext = find("torch.utils._device:DeviceContext")
_knows_profilers = find("torch.autograd.profiler:_is_profiler_enabled") is not None
_record = find("torch:_C._autograd._enable_record_function")
_OURS = __name__.partition(".")[0] + "."


def is_batched(gradient: Tensor | None) -> bool:
    """Whether a gradient stands for several at once (``is_grads_batched``, `torch.func.vmap`)."""
    return gradient is not None and (_is_batched_in_an_old_way(gradient) or _is_batched(gradient))


def backward_reaches(ctx: Any, index: int) -> bool:
    """Whether the running backward will go on to the ``index``-th tensor input of a Function.

    `torch.autograd.grad(loss, x)` passes through a node without asking for the gradients of
    parameters; the engine knows, and there is no public way to ask it
    (`torch.autograd.graph` and AOTAutograd use the same function).
    """
    node = ctx.next_functions[index][0]
    return node is not None and _will_run(node)


# the function that `torch.autograd.grad` and `Tensor.backward` both look up and call
_BACKWARD = "_engine_run_backward"
_run = find("torch.autograd:_engine_run_backward")


def run_backwards_by(handler: Callable[..., Any] | None) -> None:
    """Have a handler run every backward pass, of `torch.autograd.grad` and ``backward`` alike.

    Args:
        handler: called with the function that runs autograd, and its arguments; ``None``: autograd
            runs them without a handler again.
    """
    setattr(torch.autograd, _BACKWARD, _run if handler is None else partial(handler, _run))


@contextmanager
def backwards_as_ever() -> Iterator[None]:
    """Inside, the handler of `run_backwards_by` is off, for the package's own backward passes."""
    handled = getattr(torch.autograd, _BACKWARD)
    setattr(torch.autograd, _BACKWARD, _run)
    try:
        yield
    finally:
        setattr(torch.autograd, _BACKWARD, handled)


def is_in_backward() -> bool:
    """Whether autograd runs this code, in the backward of a node or in a hook."""
    return int(_pass_number()) != -1


def graph_is_kept() -> bool:
    """Whether the running backward has ``retain_graph=True``; there is no public way to ask."""
    return bool(_graph_is_kept())


Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""A pair of hooks on saved tensors: the first packs a tensor, the second gives it back."""


def _hooks_around() -> Hooks | None:
    """The hooks that the code around this call has put on tensors saved for backward, if any.

    There is no public way to ask.
    """
    hooks: Hooks | None = _saved_tensors_hooks(True)
    return hooks


def is_checkpointed() -> bool:
    """Whether this code runs in a region of `torch.utils.checkpoint` that saves no tensors.

    Such a region (``use_reentrant=False``) works by hooks on saved tensors.
    """
    hooks = _hooks_around()
    pack: Any = None if hooks is None else inspect.unwrap(hooks[0])
    return getattr(pack, "__module__", None) == torch.utils.checkpoint.__name__


def own_saved_tensors() -> AbstractContextManager[Any]:
    """A context in which hooks on saved tensors that the code around has set do not apply.

    They are not for what stages save. Without such hooks nothing is done, since any hooks switch
    off autograd's check of in-place changes.
    """
    if _hooks_around() is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


def forward_derivatives() -> AbstractContextManager[Any]:
    """A context with forward-mode derivatives, also in an autograd.Function's forward."""
    context: AbstractContextManager[Any] = _with_forward_derivatives(True)
    return context


def dual_level() -> int:
    """The number of the innermost open level of forward-mode derivatives; -1: none is open."""
    return int(torch.autograd.forward_ad._current_level)


def functorch_level() -> int:
    """How many transforms of functions (``vmap``, ``grad``) are being applied at this moment."""
    return int(_functorch_level() or 0)


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a wrapper of a transform (``vmap``, ``grad``), without memory itself."""
    return bool(_is_wrapped(tensor))


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside the wrappers of `torch.vmap` and the like; other tensors as they are."""
    while _is_wrapped(tensor):
        tensor = _get_unwrapped(tensor)
    return tensor


@contextmanager
def outside_of_transforms() -> Iterator[None]:
    """Inside, transforms of functions and dispatch modes are off: tensors have memory."""
    with _without_transforms(), _without_modes():
        yield


def in_functional_call() -> bool:
    """Whether this code runs inside of `torch.func.functional_call`, by the call stack.

    It puts other tensors into a module's tables and leaves no other trace.
    """
    code, frame = _functional_call.__code__, sys._getframe()
    while frame.f_code is not code:
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return True


def users_mode() -> object | None:
    """The innermost active mode that the user has entered; ``None``: there is none.

    That is `torch.utils.flop_counter.FlopCounterMode`, or any other subclass of
    ``TorchDispatchMode`` or ``TorchFunctionMode`` but for this package's and torch's internal ones.
    A device as a context does not count: captured networks follow it too.
    """
    seeing = [m for m in _dispatch_modes() if not _is_infrastructure(m)]
    seeing += [m for m in _function_modes() if not isinstance(m, _DeviceContext)]
    return next((m for m in reversed(seeing) if not type(m).__module__.startswith(_OURS)), None)


def _is_infrastructure(mode: object) -> bool:
    return not isinstance(mode, TorchDispatchMode) or mode.is_infra_mode()


def fails_apart(node: Node) -> bool:
    """Whether an operation must compute the gradients of its input together with its weights'.

    The backward of group normalisation in channels-last reads memory that it does not have if it is
    asked for the gradients of the weights alone (torch 2.13), and the process ends.
    """
    if node.name() != "NativeGroupNormBackward0":
        return False
    saved: Tensor = node._saved_input  # type: ignore[attr-defined]
    return not saved.is_contiguous()


def unrecorded() -> AbstractContextManager[None]:
    """A context in which torch's profiler does not record the transfers that begin.

    If a transfer on a group beside torch's default one is unfinished when the profiler ends, the
    process crashes later, in the garbage collection (torch 2.13). There is no public switch for
    recording. It is left alone unless a profiler is on in some thread, which
    ``torch._C._autograd._profiler_enabled`` does not tell of one that profiles all threads.
    """
    if _knows_profilers and _record is not None and torch.autograd.profiler._is_profiler_enabled:
        return _recording_off()
    return nullcontext()


@contextmanager
def _recording_off() -> Iterator[None]:
    _record(False)
    try:
        yield
    finally:
        _record(True)
