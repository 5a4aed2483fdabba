"""The private names of torch that this package uses, and what a torch that lacks one goes without.

A version of torch may rename any of them. This package can be imported all the same: without a name
of `OPTIONAL` the feature that needs it is off, and a line says so when a Trainer is made; without
one of `REQUIRED` or `ATTRIBUTES` the version is refused then. For each name `tests/torch_names` has
a test of what is relied on. The names are written as ``module:name``.
"""

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

REQUIRED = frozenset(
    {
        # settings, marks and errors of TorchDynamo
        "torch._dynamo.config:fail_on_recompile_limit_hit",
        "torch._dynamo.decorators:graph_break",
        "torch._dynamo.exc:FailOnRecompileLimitHit",
        "torch._dynamo.exc:TorchDynamoException",
        "torch.fx.experimental._config:use_duck_shape",
        # targets of nodes in captured graphs
        "torch:_C._set_grad_enabled",
        "torch._ops:HigherOrderOperator",
        "torch._ops:OpOverload",
        "torch._ops:OpOverloadPacket",
        "torch.amp.autocast_mode:_enter_autocast",
        "torch.amp.autocast_mode:_exit_autocast",
        "torch.fx.node:_get_qualified_name",
        # the state of autograd and of transforms
        "torch:_C._autograd._get_current_graph_task_keep_graph",
        "torch:_C._autograd._top_saved_tensors_default_hooks",
        "torch:_C._current_graph_task_id",
        "torch:_C._functorch.get_unwrapped",
        "torch:_C._functorch.is_batchedtensor",
        "torch:_C._functorch.is_functorch_wrapped_tensor",
        "torch:_C._functorch.is_legacy_batchedtensor",
        "torch:_C._functorch.maybe_current_level",
        "torch:_C._will_engine_execute_node",
        "torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack",
        "torch.autograd:_engine_run_backward",
        "torch.autograd.forward_ad:_set_fwd_grad_enabled",
        # modes, and classes that intercept operations
        "torch:_C.DisableTorchFunctionSubclass",
        "torch:_C._EnableTorchFunction",
        "torch._subclasses.fake_tensor:FakeTensor",
        "torch._subclasses.fake_tensor:FakeTensorMode",
        "torch.overrides:_get_current_function_mode",
        "torch.overrides:_get_current_function_mode_stack",
        "torch.overrides:_pop_mode_temporarily",
        "torch.utils._device:DeviceContext",
        "torch.utils._python_dispatch:TorchDispatchMode",
        "torch.utils._python_dispatch:_disable_current_modes",
        "torch.utils._python_dispatch:_get_current_dispatch_mode_stack",
        # modules and memory
        "torch:_C._storage_Use_Count",
        "torch:_C._swap_tensor_impl",
        "torch.nn.modules.batchnorm:_BatchNorm",
        "torch.nn.utils.stateless:_functional_call",
    }
)
"""Names without which nothing works, or numbers could be wrong."""

_AS_MANY_CAPTURES = "networks that need more than torch's own limit of captures run on the driver"
_KEPT = "what was captured stays in memory for as long as the process lives"
_NUMPY = "networks that call NumPy are refused, or become chains of graphs"
_PROFILED = "torch's profiler can end the process when it was on while tensors were sent"

OPTIONAL = {
    "torch._dynamo.config:recompile_limit": _AS_MANY_CAPTURES,
    "torch._dynamo.config:skip_nnmodule_hook_guards": (
        "hooks that are put on inner modules in the middle of a run may not be heard"
    ),
    "torch._dynamo.config:capture_dynamic_output_shape_ops": (
        "networks with nonzero and the like become chains of graphs"
    ),
    "torch._dynamo.config:capture_scalar_outputs": (
        "networks with .item() become chains of graphs"
    ),
    "torch._dynamo.config:allow_rnn": "recurrent networks become chains of graphs",
    "torch._dynamo.config:ignore_logging_functions": (
        "models of transformers that warn once become chains of graphs"
    ),
    "torch.nn.modules.transformer:_detect_is_causal_mask": (
        "torch's transformers with masks and without is_causal become chains of graphs"
    ),
    "torch._dynamo.config:allow_unspec_int_on_nn_module": (
        "a network that counts its calls is captured again in each of them"
    ),
    "torch._dynamo.config:_make_closure_patcher": "each step takes 0.1 ms more",
    "torch.fx.experimental._config:_make_closure_patcher": "each step takes 0.1 ms more",
    "torch._dynamo:maybe_mark_dynamic": "the first graph of a network does not split batches",
    "torch._dynamo:OptimizedModule": "it is not said that a compiled part is compiled by stages",
    "torch._dynamo.utils:get_compilation_metrics": "no reason is told for another capture",
    "torch._dynamo.utils:numpy_method_wrapper": _NUMPY,
    "torch._dynamo.utils:numpy_operator_wrapper": _NUMPY,
    "torch._dynamo.utils:numpy_to_tensor_wrapper": _NUMPY,
    "torch._dynamo.eval_frame:cached_backends": _KEPT,
    "torch:_C._dynamo.eval_frame.reset_code": _KEPT,
    "torch:_C._select_conv_backend": (
        "convolutions of 16 samples and more are not split into smaller parts on CPUs"
    ),
    "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu": (
        "attention on a CPU is taken to cost nothing where costs are counted"
    ),
    "torch:_VF": "recurrent layers are captured for each length of their sequences",
    "torch:_C._autograd._enable_record_function": _PROFILED,
    "torch.autograd.profiler:_is_profiler_enabled": _PROFILED,
    "torch:_C._set_throw_on_mutable_data_ptr": (
        "code that takes the address of a weight of another rank is not refused"
    ),
    "torch:_foreach_copy_": "tensors are copied one by one",
}
"""Per name, what a torch without it goes without."""

ATTRIBUTES: tuple[tuple[Callable[[], object], tuple[str, ...]], ...] = (
    (
        lambda: torch.ones(1),
        ("_version", "_backward_hooks", "_post_accumulate_grad_hooks", "_use_count"),
    ),
    (lambda: torch.ones(1).untyped_storage(), ("_cdata",)),
    (lambda: torch.storage.TypedStorage, ("_fake_device",)),
    (lambda: torch.ops.aten.add.Tensor, ("_schema",)),
    (lambda: torch.autograd.forward_ad, ("_current_level",)),
    (
        lambda: nn.BatchNorm1d(1),
        (
            *("_parameters", "_buffers", "_compiled_call_impl", "_check_input_dim"),
            *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
        ),
    ),
    (
        lambda: torch.optim.SGD([torch.ones(1)]),
        (
            *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
            "_optimizer_state_dict_post_hooks",
        ),
    ),
    (lambda: torch.amp.GradScaler, ("_unscale_grads_",)),
    (lambda: resolve_name("torch.distributed:ProcessGroupGloo._Options"), ("_timeout",)),
)
"""Attributes that objects of torch must have: a function that makes an example, and their names.

Further ones are used if they exist: ``_dynamo_source`` on placeholders of a captured graph, the
tensors that a node of autograd has saved (``_saved_input``), ``_step_supports_amp_scaling`` on
fused optimizers, ``_torchdynamo_orig_backend`` on what `torch.compile` has wrapped.
"""

_missing: list[str] = []


def find(name: str, instead: Any = None) -> Any:
    """Look up a private name of torch.

    Args:
        name: one of `REQUIRED` or `OPTIONAL`.
        instead: what to return for an optional name that torch lacks.

    Returns:
        What torch has under that name. For a required name that it lacks, a class that cannot be
        used.

    Raises:
        LookupError: the name is in neither table.
    """
    if name not in OPTIONAL and name not in REQUIRED:
        raise LookupError(f"{name} is not in the tables of {__name__}")
    try:
        return resolve_name(name)
    except (ImportError, AttributeError):
        if name not in _missing:
            _missing.append(name)
    return _unusable(name) if name in REQUIRED else instead


class _HasAnyName(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


def _unusable(name: str) -> type[Exception]:
    """A stand-in for a missing name, which raises if it is called.

    It can be a base class, be named in ``except`` and have any attribute, so that imports succeed.
    """

    class Unusable(Exception, metaclass=_HasAnyName):
        def __new__(cls, *_: object, **__: object) -> Any:
            raise RuntimeError(f"torch {torch.__version__} has no {name}, which is needed here")

    return Unusable


def lost() -> list[str]:
    """Lines that say what is off since this torch lacks optional names, and which names."""
    losses: dict[str, list[str]] = {}
    for name in filter(OPTIONAL.__contains__, _missing):
        losses.setdefault(OPTIONAL[name], []).append(name)
    return [f"{loss} (no {', '.join(names)})" for loss, names in losses.items()]


def lacking() -> list[str]:
    """The required names and attributes that this torch lacks."""
    names = [name for name in _missing if name in REQUIRED]
    for example, attributes in ATTRIBUTES:
        try:
            thing = example()
        except AttributeError as error:
            names.append(str(error))
            continue
        kind = thing.__name__ if hasattr(thing, "__name__") else type(thing).__name__
        names += [f"{kind}.{name}" for name in attributes if not hasattr(thing, name)]
    return names
