"""The private names of torch that this package uses, each with its reason, all in this one file."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import CodeType
from typing import Any

import sympy
import torch
import torch._dynamo.config as dynamo_module
import torch.fx.experimental._config as shape_module
from torch import Tensor, fx, nn

# switches off __torch_function__ of subclasses, all of it, getters included; torch documents it for
# writers of subclasses ("Extending PyTorch") under this name
from torch._C import DisableTorchFunctionSubclass as as_they_are

# what TorchDynamo keeps for as long as the process lives
from torch._C._dynamo.eval_frame import reset_code as _reset_code
from torch._dynamo.eval_frame import cached_backends as _cached_backends

# what torch.compile raises where it cannot follow, and why it compiled again
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import (
    get_compilation_metrics,
    numpy_method_wrapper,
    numpy_operator_wrapper,
    numpy_to_tensor_wrapper,
)
from torch._dynamo.variables.optimizer import OptimizerVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

# tensors with shapes and no memory; torch.export uses them, there is no public way to do so
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp import GradScaler

# what TorchDynamo writes down for `with torch.autocast(...)`
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

# what every batch normalisation is, SyncBatchNorm included; there is no public base class
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.optim import Optimizer

# modes that rewrite functions are part of what TorchDynamo captures, so ours must step aside
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

# hears of every operation below autograd; torch documents it and has no public place for it
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "BatchNorm",
    "Exchanged",
    "FailOnRecompileLimitHit",
    "FakeTensorMode",
    "GuardOnDataDependentSymNode",
    "ShapeEnv",
    "TorchDispatchMode",
    "TorchDynamoException",
    "as_they_are",
]

# one call for many tensors, which is what torch's own optimizers use; there is no public name
_copy_each = torch._foreach_copy_


def version(tensor: Tensor) -> int:
    """How often a tensor, or what shares its memory, was written to; autograd compares it too."""
    return tensor._version


def storage_key(storage: torch.UntypedStorage) -> int:
    """Tells living storages apart; those on the meta device all have the data pointer 0."""
    key: int = storage._cdata
    return key


def refuse_pointer(tensor: Tensor) -> None:
    """From here on torch raises where somebody asks for the address of this tensor's memory."""
    torch._C._set_throw_on_mutable_data_ptr(tensor)


def schema(operator: Any) -> Any:
    """What an operator takes, returns and writes to; dispatch modes are given nothing else."""
    return operator._schema


def tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Where a module keeps its parameters and its buffers; ``setattr`` refuses other types."""
    return module._parameters, module._buffers


def check_dimensions(norm: BatchNorm, value: Tensor) -> None:
    """As ``forward`` of a batch normalisation does: each of its classes has dimensions of its own.

    Raises:
        ValueError: they are others.
    """
    norm._check_input_dim(value)


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Set the time-out in the options of a group; NCCL's take it in no other way."""
    options._timeout = timeout


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


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether full backward hooks are on a module; there is no public way to ask."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def drop_hooks(module: nn.Module, of: tuple[str, ...]) -> None:
    """Remove the forward hooks of all inner modules whose functions come from some package.

    Args:
        module: with all its parts.
        of: beginnings of the names of the modules that define these functions.
    """
    for part in module.modules():
        for table in (part._forward_hooks, part._forward_pre_hooks):
            for key, hook in list(table.items()):
                function = getattr(hook, "func", hook)
                owner = getattr(function, "__self__", function)
                name = getattr(owner, "__module__", None) or type(owner).__module__
                if str(name).startswith(of):
                    del table[key]


@contextmanager
def without_mode(kind: type) -> Iterator[None]:
    """Inside, a torch function mode of this kind, if it is the innermost one, is not active."""
    if isinstance(_get_current_function_mode(), kind):
        with _pop_mode_temporarily():
            yield
    else:
        yield


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


# ---------------------------------------------------------------- TorchDynamo

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


_capturing = threading.local()
_optimizers: Any = OptimizerVariable
_looks: Any = _optimizers.var_getattr


def _looks_at_optimizer(*arguments: Any) -> Any:
    """Where code looks at an optimizer (its learning rate): as at any other object.

    TorchDynamo would make constants of its parameters, and set `capturable` in it: it is prepared
    for code that steps, which other threads may be capturing meanwhile.
    """
    if getattr(_capturing, "depth", 0):
        return UserDefinedObjectVariable.var_getattr(*arguments)
    return _looks(*arguments)


_captured_optimizers = Exchanged(
    lambda: setattr(_optimizers, "var_getattr", _looks_at_optimizer),
    lambda: setattr(_optimizers, "var_getattr", _looks),
)

_guards: Any = torch._dynamo.guards
_measure_guards: Any = _guards.profile_guard_manager
# for a line in a log it times the guards of each graph, behind a flush of the caches: 10 to 50 ms
_unmeasured_guards = Exchanged(
    lambda: setattr(_guards, "profile_guard_manager", lambda *_: 0.0),
    lambda: setattr(_guards, "profile_guard_manager", _measure_guards),
)


@contextmanager
def capture_settings() -> Iterator[None]:
    """Inside, TorchDynamo captures as this package needs it, in this thread alone."""
    reverts = [patch() for patch in _PATCHES]
    _capturing.depth = getattr(_capturing, "depth", 0) + 1
    try:
        with _captured_optimizers, _unmeasured_guards:
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


def is_symbolic(value: Any) -> bool:
    """Whether a value is a size or number that TorchDynamo has left open."""
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def symbols_in(value: Any) -> list[Any]:
    """The symbols of a symbolic number."""
    return sorted(value.node.expr.free_symbols, key=str)


def value_with(value: Any, sizes: Mapping[Any, int], *, hint: bool = False) -> Any:
    """What a symbolic number is for these values of its symbols.

    Args:
        value: symbolic, or a plain number, which is returned.
        sizes: values by symbol.
        hint: take what the number was when it was captured; ``None`` if it depends on values.
    """
    if not is_symbolic(value):
        return value
    node = value.node
    if hint:
        return node.hint if node.has_hint() else None
    result = node.expr.xreplace({symbol: sympy.Integer(v) for symbol, v in sizes.items()})
    if not result.is_number and result not in (sympy.true, sympy.false):
        return None
    return node.pytype(result)


def guards_of(values: Iterable[Any]) -> Any:
    """The conditions on sizes under which a captured graph is right, from its example values."""
    for value in values:
        numbers = [value] if is_symbolic(value) else []
        if isinstance(value, Tensor):
            numbers = [size for size in value.shape if is_symbolic(size)]
        for number in numbers:
            return number.node.shape_env
    return None


def guards_hold(shape_env: Any, sizes: Mapping[Any, int]) -> bool:
    """Whether the conditions hold for these values of the symbols.

    TorchDynamo takes every free size to be at least 2, whatever the code asks; a size of 1 is let
    pass here, since operations on free sizes treat it like any other (`squeeze` does not).
    """
    if shape_env is None:
        return True
    known = {symbol: sympy.Integer(value) for symbol, value in sizes.items()}
    for guard in shape_env.guards:
        if shape_env.replace(guard.expr).xreplace(known) == sympy.false:
            return False
    ranges = shape_env.var_to_range
    return all(
        s not in ranges or ranges[s].lower <= max(v, 2) <= ranges[s].upper for s, v in known.items()
    )


@contextmanager
def forward_derivatives() -> Iterator[None]:
    """Inside, derivatives in forward mode are there as ever: an autograd function has none."""
    with torch.autograd.forward_ad._set_fwd_grad_enabled(True):
        yield


def recurrent_functions() -> Any:
    """What `torch.nn.LSTM` and the like look their operations up in."""
    return torch._VF


def is_fake(value: Any) -> bool:
    """Whether a tensor has a shape and no memory, and no other mode looks at it."""
    return type(value) is FakeTensor


set_gradients: Any = torch._C._set_grad_enabled
"""What TorchDynamo writes down for `with torch.no_grad()` and the like."""

exit_autocast: Any = _exit_autocast
"""Leaves a region; takes what has entered it."""


def is_enter_autocast(node: fx.Node) -> bool:
    """Whether a node begins a region with (or without) autocast."""
    return node.target is _enter_autocast


def entered_autocast(node: fx.Node) -> Any:
    """What has entered the region that a node ends; ``None``: it ends none."""
    return node.args[0] if node.target is _exit_autocast else None


def dual_level() -> int:
    """How many levels of forward-mode derivatives are open at this moment; there are none: -1."""
    return int(torch.autograd.forward_ad._current_level)


def functorch_level() -> int:
    """How many transforms of functions (``vmap``, ``grad``) are being applied at this moment."""
    return int(torch._C._functorch.maybe_current_level() or 0)


# what a call of NumPy becomes in a captured graph: an object that computes it with torch
_NUMPY = {
    "function": (numpy_to_tensor_wrapper, "f"),
    "method": (numpy_method_wrapper, "method"),
    "operator": (numpy_operator_wrapper, "op"),
}


def parts_of_numpy(function: Any) -> tuple[str, Any] | None:
    """The kind of NumPy's part in a captured graph, and what it calls; ``None``: it is none."""
    for kind, (wrapper, attribute) in _NUMPY.items():
        if type(function) is wrapper:
            return kind, getattr(function, attribute)
    return None


def numpy_from_parts(kind: str, called: Any) -> Any:
    """The reverse of `parts_of_numpy`."""
    return _NUMPY[kind][0](called)


def higher_order_name(function: Any) -> str | None:
    """The name of an operation on graphs (a checkpointed region, a hook); ``None``: it is none."""
    return function.name() if isinstance(function, torch._ops.HigherOrderOperator) else None


def is_custom_operator(function: Any) -> bool:
    """Whether an operator is not one of torch's own."""
    packet = isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket)
    return packet and not str(function).startswith(("aten.", "prims.", "prim."))


def names_of_operator(function: Any) -> Iterator[str]:
    """Where an operator can be found, as ``module:name``."""
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        yield f"torch:ops.{function!s}"
    name = higher_order_name(function)
    if name is not None:
        yield f"torch:ops.higher_order.{name}"
        yield f"torch._higher_order_ops:{name}"
        yield f"torch._higher_order_ops.wrap:{name}"


def qualified_name_by_fx(function: Any) -> str:
    """The dotted name that fx writes into generated code for a function."""
    return fx.node._get_qualified_name(function)


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each of the sources into the target at its place, with one call for all."""
    with torch.no_grad():
        _copy_each(targets, sources)


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
