"""The private names of torch that this package uses, each with its reason, all in this one file."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# switches off __torch_function__ of subclasses, all of it, getters included; torch documents it for
# writers of subclasses ("Extending PyTorch") under this name
from torch._C import DisableTorchFunctionSubclass as as_they_are

# tensors with shapes and no memory; torch.export uses them, there is no public way to do so; and
# how to leave them for a moment, to run the one sub-module that cannot run on them
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.amp import GradScaler

# what every batch normalisation is, SyncBatchNorm included; there is no public base class
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.optim import Optimizer

# hears of every operation below autograd; torch documents it and has no public place for it
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "BatchNorm",
    "FakeTensorMode",
    "TorchDispatchMode",
    "as_they_are",
    "backward_reaches",
    "graph_is_kept",
    "hooks_silenced",
    "order_step_hooks",
    "own_saved_tensors",
    "replace_unscaling",
    "runs_step_hooks",
    "swap_memory",
    "unrecorded",
    "unscales_by_itself",
    "unset_fake_temporarily",
]


def backward_reaches(ctx: Any, index: int) -> bool:
    """Whether the running backward will go on to the ``index``-th tensor input of a Function.

    `torch.autograd.grad(loss, x)` passes through a node without wanting the gradients of
    parameters; the engine knows, and there is no public way to ask it
    (`torch.autograd.graph` and AOTAutograd ask it in the same words).
    """
    node = ctx.next_functions[index][0]
    return node is not None and torch._C._will_engine_execute_node(node)


def replace_unscaling(
    scaler: GradScaler, unscale: Callable[[Optimizer, Tensor], bool] | None
) -> None:
    """Let a scaler unscale gradients by ``unscale``, which tells whether one was not finite.

    There is no public way to give a scaler the gradients that other ranks hold. ``None``: its own
    way again.
    """
    vars(scaler).pop("_unscale_grads_", None)
    if unscale is not None:

        def unscale_everywhere(
            optimizer: Optimizer, factor: Tensor, found: Tensor, _: bool
        ) -> dict[torch.device, Tensor]:
            return {found.device: found.fill_(unscale(optimizer, factor))}

        vars(scaler)["_unscale_grads_"] = unscale_everywhere


def unscales_by_itself(optimizer: Optimizer) -> bool:
    """Whether an optimizer takes scaled gradients (fused ones do), as `GradScaler` asks it."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def runs_step_hooks(optimizer: Optimizer) -> bool:
    """Whether ``optimizer.step`` runs step hooks: ``Optimizer.__init__`` has prepared it for them.

    Wrappers around another optimizer often do not call it. There is no public way to ask.
    """
    return bool(getattr(type(optimizer).step, "hooked", False)) and hasattr(
        optimizer, "_optimizer_state_dict_post_hooks"
    )


def order_step_hooks(optimizer: Optimizer, *, last: Any, first: Any) -> None:
    """Let the pre-hook ``last`` run after the others, the post-hook ``first`` before the others.

    Args:
        optimizer: that has the hooks.
        last: what ``register_step_pre_hook`` has returned.
        first: what ``register_step_post_hook`` has returned. They can only be put at the end.
    """
    before: Any = optimizer._optimizer_step_pre_hooks  # an OrderedDict, annotated as less
    after: Any = optimizer._optimizer_step_post_hooks
    before.move_to_end(last.id)
    after.move_to_end(first.id, last=False)


def graph_is_kept() -> bool:
    """Whether the running backward was called with ``retain_graph=True``; no public way either."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


@contextmanager
def own_saved_tensors() -> Iterator[None]:
    """Inside, hooks that code around us has put on tensors saved for backward do not apply.

    Activation checkpointing around the call of a network works by such hooks: on the tensors of a
    stage they would call the network again in the middle of its own backward. There is no public
    way to ask whether there are any; where there are none, nothing is done, since hooks cost
    autograd its check of in-place changes.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        yield
    else:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            yield


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def hooks_silenced(network: nn.Module) -> Iterator[None]:
    """Inside, no hook of a module runs, nor one for all modules.

    Those that torch itself has registered (``weight_norm`` computes a weight in one) stay. There is
    no public way to list hooks or to call a module without them.
    """
    tables = [getattr(module, name, None) for module in network.modules() for name in _HOOKS]
    tables += [getattr(nn.modules.module, f"_global{name}") for name in _HOOKS]
    kept = [(table, dict(table)) for table in tables if table]
    for table, hooks in kept:
        for key, hook in hooks.items():
            if not type(hook).__module__.startswith("torch."):
                del table[key]
    try:
        yield
    finally:
        for table, hooks in kept:
            table.clear()
            table.update(hooks)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Inside, torch's profiler does not note what begins.

    A transfer on a group of its own that is still on its way when a profiler ends makes the process
    crash later, in the collection of garbage (torch 2.13). There is no public switch.
    """
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


def swap_memory(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange all that two tensor objects hold; hooks stay with the objects.

    `torch.utils.swap_tensors` does this, but refuses tensors that somebody has weak references to
    (recurrent layers have some to their own weights), and loses hooks.
    """
    hooks, late = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    torch._C._swap_tensor_impl(tensor, other)
    if hooks is not None:
        tensor._backward_hooks = hooks
    if late is not None:
        tensor._post_accumulate_grad_hooks = late
