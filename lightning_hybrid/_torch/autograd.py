"""Autograd: the running backward, hooks and modes that are active around a call, the profiler."""

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
    """Whether a gradient stands for several at once (``is_grads_batched``, `torch.func.vmap`).

    ``None``, where there is no gradient, does not.
    """
    return gradient is not None and (_is_batched_in_an_old_way(gradient) or _is_batched(gradient))


def backward_reaches(ctx: Any, index: int) -> bool:
    """Whether the running backward needs the gradient of an input of an autograd Function.

    For use in its ``backward``. `torch.autograd.grad(loss, x)` passes through a node without
    needing the gradients of parameters. The engine knows this, and there is no public way to ask it
    (`torch.autograd.graph` and AOTAutograd use the same function).

    Args:
        ctx: the context of the Function.
        index: number of the input among its tensor inputs.
    """
    node = ctx.next_functions[index][0]
    return node is not None and _will_run(node)


# the function that `torch.autograd.grad` and `Tensor.backward` both look up and call
_BACKWARD = "_engine_run_backward"
_run = find("torch.autograd:_engine_run_backward")


def run_backwards_by(handler: Callable[..., Any] | None) -> None:
    """Have a handler called for every backward pass of this process, to run it.

    This holds for `torch.autograd.grad` and `torch.Tensor.backward` alike.

    Args:
        handler: called with torch's function that runs a backward, and the arguments for it;
            ``None``: torch runs backward passes by itself again.
    """
    setattr(torch.autograd, _BACKWARD, _run if handler is None else partial(handler, _run))


@contextmanager
def backwards_as_ever() -> Iterator[None]:
    """Inside, torch runs backward passes without the handler that `run_backwards_by` has set.

    This is for the package's own backward passes.
    """
    handled = getattr(torch.autograd, _BACKWARD)
    setattr(torch.autograd, _BACKWARD, _run)
    try:
        yield
    finally:
        setattr(torch.autograd, _BACKWARD, handled)


def is_in_backward() -> bool:
    """Whether the calling code is run by autograd, in the backward of a node or in a hook."""
    return int(_pass_number()) != -1


def graph_is_kept() -> bool:
    """Whether the running backward has ``retain_graph=True``; there is no public way to ask."""
    return bool(_graph_is_kept())


Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""A pair of hooks on tensors saved for backward: one packs a tensor, the other unpacks it."""


def _hooks_around() -> Hooks | None:
    """Return the innermost active hooks on tensors saved for backward; ``None``: there are none.

    There is no public way to ask.
    """
    hooks: Hooks | None = _saved_tensors_hooks(True)
    return hooks


def is_checkpointed() -> bool:
    """Whether the calling code runs under `torch.utils.checkpoint` with ``use_reentrant=False``.

    Such a checkpointed region saves no tensors, which it does by hooks on saved tensors.
    """
    hooks = _hooks_around()
    pack: Any = None if hooks is None else inspect.unwrap(hooks[0])
    return getattr(pack, "__module__", None) == torch.utils.checkpoint.__name__


def own_saved_tensors() -> AbstractContextManager[Any]:
    """Return a context that switches off hooks on saved tensors which are active now.

    For code of stages: the user's hooks are not for the tensors that these save. If no hooks are
    active, the context does nothing, since any hooks, even its own, would switch off autograd's
    check of in-place changes.
    """
    if _hooks_around() is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


def forward_derivatives() -> AbstractContextManager[Any]:
    """Return a context that switches forward-mode derivatives on.

    In the forward of an autograd Function they are off by default.
    """
    context: AbstractContextManager[Any] = _with_forward_derivatives(True)
    return context


def dual_level() -> int:
    """Return the number of the innermost open level of forward-mode derivatives; -1: none."""
    return int(torch.autograd.forward_ad._current_level)


def functorch_level() -> int:
    """Return in how many transforms of `torch.func` (``vmap``, ``grad``) the calling code runs."""
    return int(_functorch_level() or 0)


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a wrapper without own memory, made by a transform of `torch.func`."""
    return bool(_is_wrapped(tensor))


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside all wrappers made by transforms; other tensors as they are."""
    while _is_wrapped(tensor):
        tensor = _get_unwrapped(tensor)
    return tensor


@contextmanager
def outside_of_transforms() -> Iterator[None]:
    """Inside, transforms of `torch.func` and dispatch modes are off: new tensors are ordinary."""
    with _without_transforms(), _without_modes():
        yield


def in_functional_call() -> bool:
    """Whether the calling code runs inside of `torch.func.functional_call`, by the call stack.

    That function only puts other tensors into a module's tables, and leaves no other trace.
    """
    code, frame = _functional_call.__code__, sys._getframe()
    while frame.f_code is not code:
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return True


def users_mode() -> object | None:
    """Return an active mode that the user has entered and that sees operations; ``None``: none.

    That is an object of `torch.utils.flop_counter.FlopCounterMode` or another subclass of
    ``TorchDispatchMode`` or ``TorchFunctionMode``, except this package's modes and torch's internal
    ones. Of several, the innermost function mode, else the innermost dispatch mode. A device as a
    context does not count, since captured networks follow it too.
    """
    seeing = [m for m in _dispatch_modes() if not _is_infrastructure(m)]
    seeing += [m for m in _function_modes() if not isinstance(m, _DeviceContext)]
    return next((m for m in reversed(seeing) if not type(m).__module__.startswith(_OURS)), None)


def _is_infrastructure(mode: object) -> bool:
    return not isinstance(mode, TorchDispatchMode) or mode.is_infra_mode()


def needs_input_gradients(node: Node) -> bool:
    """Whether an operation must not be asked for the gradients of its weights alone.

    They must be computed together with those of its input. Alone, the backward of group
    normalisation in channels-last reads memory that it does not have (torch 2.13), and the process
    ends.

    Args:
        node: the node of the operation in the autograd graph.
    """
    if node.name() != "NativeGroupNormBackward0":
        return False
    saved: Tensor = node._saved_input  # type: ignore[attr-defined]
    return not saved.is_contiguous()


def unrecorded() -> AbstractContextManager[None]:
    """Return a context in which torch's profiler does not record transfers that are begun.

    If a transfer on another process group than torch's default one is unfinished when the profiler
    ends, the process crashes later, in the garbage collection (torch 2.13). There is no public
    switch for recording. The context does nothing while no thread is being profiled. (That is not
    asked by ``torch._C._autograd._profiler_enabled``, which misses a profiler of all threads.)
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
