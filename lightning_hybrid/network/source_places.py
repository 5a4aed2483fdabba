"""Where in the user's code an operation of a captured graph is."""

from __future__ import annotations

import os
import re
import traceback
from pathlib import Path

import torch
from torch import fx

_FRAME = re.compile(r'File "(.+?)", line (\d+)')
_NOT_THE_USERS = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")
_LIGHTNING = tuple(
    f"{Path(torch.__file__).parents[1] / package}{os.sep}"
    for package in ("lightning", "pytorch_lightning", "lightning_fabric")
)


def place_now() -> str | None:
    """File and line of the innermost code that runs now and is not torch's, Lightning's or ours."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((*_NOT_THE_USERS, *_LIGHTNING)):
            return f"{frame.filename}:{frame.lineno}"
    return None


def place_of(node: fx.Node) -> str | None:
    """File and line of the innermost code that calls an operation and is not torch's or ours."""
    frames = _FRAME.findall(node.stack_trace or "")
    theirs = [f"{file}:{line}" for file, line in frames if not file.startswith(_NOT_THE_USERS)]
    return theirs[-1] if theirs else None
