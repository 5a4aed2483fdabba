"""Where in the user's code an operation of a captured graph is."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import fx

_FRAME = re.compile(r'File "(.+?)", line (\d+)')
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def place_of(node: fx.Node) -> str | None:
    """File and line of the innermost code that calls an operation and is not torch's or ours."""
    frames = _FRAME.findall(node.stack_trace or "")
    theirs = [f"{file}:{line}" for file, line in frames if not file.startswith(_NOT_THE_USERS)]
    return theirs[-1] if theirs else None
