"""Looks up the private names of torch that this package uses, written as ``module:name``.

A version of torch may rename any of them. If a name of `OPTIONAL` is missing, the feature that
needs it is off, and a line says so when a Trainer is made. If another one is missing, nothing would
work or numbers could be wrong, so this package cannot be imported. For each name, and each private
attribute of torch's objects, `tests/torch_names` has a test of what is relied on.
"""

from pkgutil import resolve_name
from typing import Any

import torch

TRIED = "2.13.0, 2.14.1 and 2.15.0"

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
    "torch._dispatch.python:enable_python_dispatcher": (
        "networks with complex numbers, or attention that returns its weights, take batches whole"
    ),
    "torch:_VF": "recurrent layers are captured for each length of their sequences",
    "torch:_C._autograd._enable_record_function": _PROFILED,
    "torch.autograd.profiler:_is_profiler_enabled": _PROFILED,
    "torch:_C._set_throw_on_mutable_data_ptr": (
        "code that takes the address of a weight of another rank is not refused"
    ),
}
"""The names that torch may lack; for each the consequence, as text for the user."""

_missing: list[str] = []


def find(name: str, instead: Any = None) -> Any:
    """Look up a private name of torch, and return what it stands for.

    A name of `OPTIONAL` that torch lacks is noted for :func:`lost`.

    Args:
        name: the name, as ``module:name``.
        instead: what to return if torch lacks the name, and it is in `OPTIONAL`.

    Raises:
        ImportError: torch lacks a name that is not optional.
    """
    try:
        return resolve_name(name)
    except (ImportError, AttributeError) as error:
        if name not in OPTIONAL:
            raise ImportError(
                f"lightning_hybrid cannot work with torch {torch.__version__}, which has no "
                f"{name}. It was tried with torch {TRIED}: install one of these, or a newer "
                "lightning-hybrid."
            ) from error
        if name not in _missing:
            _missing.append(name)
    return instead


def lost() -> list[str]:
    """Return lines for the user on what is off since torch lacks names of `OPTIONAL`, and which."""
    for name in OPTIONAL:  # (some are looked up when they are needed first)
        find(name)
    losses: dict[str, list[str]] = {}
    for name in filter(OPTIONAL.__contains__, _missing):
        losses.setdefault(OPTIONAL[name], []).append(name)
    return [f"{loss} (no {', '.join(names)})" for loss, names in losses.items()]
