"""Settings of torch for a whole process that decide which kernels compute, and how exactly.

User code sets them on the driver, in hooks and around calls. Workers get them before the next
command, so that all stages compute with the same settings.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import backends

Switches = tuple[Any, ...]
"""The values of all settings in `_SETTINGS`, in that order."""


def _attributes(owner: Any, *names: str) -> list[tuple[Callable[[], Any], Callable[[Any], None]]]:
    return [(partial(getattr, owner, name), partial(setattr, owner, name)) for name in names]


def _precision_of_products() -> str | None:
    # torch raises if code has set other precisions for single kinds of products
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _set_precision_of_products(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


def _determinism() -> tuple[bool, bool]:
    enabled = torch.are_deterministic_algorithms_enabled()
    return enabled, torch.is_deterministic_algorithms_warn_only_enabled()


# (their types lack attributes that they have)
_CUDNN: Any = backends.cudnn
_MKLDNN: Any = backends.mkldnn

# (in an order for setting: the precision of all products sets that of each kind, which follow)
_SETTINGS: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
    (_precision_of_products, _set_precision_of_products),
    (_determinism, lambda how: torch.use_deterministic_algorithms(how[0], warn_only=how[1])),
    (backends.cuda.flash_sdp_enabled, backends.cuda.enable_flash_sdp),
    (backends.cuda.mem_efficient_sdp_enabled, backends.cuda.enable_mem_efficient_sdp),
    (backends.cuda.math_sdp_enabled, backends.cuda.enable_math_sdp),
    (backends.cuda.cudnn_sdp_enabled, backends.cuda.enable_cudnn_sdp),
    *_attributes(
        backends.cuda.matmul,
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "fp32_precision",
    ),
    *_attributes(_CUDNN, "enabled", "benchmark", "deterministic"),
    *_attributes(_CUDNN.conv, "fp32_precision"),
    *_attributes(_CUDNN.rnn, "fp32_precision"),
    *_attributes(_MKLDNN.matmul, "fp32_precision"),
    *_attributes(_MKLDNN.conv, "fp32_precision"),
]


def switches() -> Switches:
    """Read torch's settings in this process: the value of each in `_SETTINGS`, in that order."""
    return tuple(read() for read, _ in _SETTINGS)


def set_switches(wanted: Switches) -> None:
    """Set torch's settings in this process to the values that another process has.

    Args:
        wanted: their values, which :func:`switches` has read in another process.
    """
    for (read, write), value in zip(_SETTINGS, wanted, strict=True):
        if read() != value:
            write(value)
