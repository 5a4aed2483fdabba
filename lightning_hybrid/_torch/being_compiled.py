"""`torch.compiler.is_compiling()` in the user's code: no, as on one device.

Installed packages are told the truth. They ask in order to compute the same in a way that
TorchDynamo can follow.
"""

import sysconfig
from collections.abc import Callable
from pathlib import Path
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
_INSTALLED = (
    *{sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")},
    *{str(Path(part).parent) for part in (torch.__file__, Path(__file__).parent)},
)
"""Folders of packages, that of this one among them (it may be installed from a checkout)."""


def _answer(own: Any, self: Any, tx: Any, *arguments: Any) -> Any:
    if self.value in _QUESTIONS and not tx.f_code.co_filename.startswith(_INSTALLED):
        return ConstantVariable.create(False)
    return own(self, tx, *arguments)


QUESTIONS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (TorchInGraphFunctionVariable, "call_function", _answer),
)
"""What takes the place of methods of TorchDynamo; see `exchanged_methods`."""
