"""`torch.compiler.is_compiling()`: no, as on one device, but for packages that are known.

These ask in order to compute the same in a way that TorchDynamo can follow. Of others nobody knows
what they do with the answer.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.external_utils import is_compiling as is_compiling_by_dynamo
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._utils import is_compiling as is_compiling_by_utils

_QUESTIONS = (
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    is_compiling_by_dynamo,
    is_compiling_by_utils,
)
_KNOWN = {"lightning_hybrid", "monai", "peft", "torch", "transformers"}
"""Packages that are told the truth; tests train networks of each and compare with one device."""


def _answer(own: Any, self: Any, tx: Any, *arguments: Any) -> Any:
    if self.value in _QUESTIONS:
        package, _, _ = str(tx.f_globals.get("__name__", "")).partition(".")
        if package not in _KNOWN:
            return ConstantVariable.create(False)
    return own(self, tx, *arguments)


QUESTIONS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (TorchInGraphFunctionVariable, "call_function", _answer),
)
"""What takes the place of methods of TorchDynamo; see `exchanged_methods`."""
