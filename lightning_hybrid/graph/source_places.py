"""Where the user's code calls an operation of a captured graph, and how it writes its inputs."""

from __future__ import annotations

import os
import re
import traceback
from pathlib import Path

import torch
from torch import fx

from lightning_hybrid._torch.graphs import placeholder_source

_FRAME = re.compile(r'File "(.+?)", line (\d+)')
_NOT_THE_USERS = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")
_LIGHTNING = tuple(
    f"{Path(torch.__file__).parents[1] / package}{os.sep}"
    for package in ("lightning", "pytorch_lightning", "lightning_fabric")
)


def is_users_file(file: str) -> bool:
    """Whether a file of code is neither torch's nor this package's.

    Files of Lightning and of other libraries count as the user's.

    Args:
        file: its absolute path.
    """
    return not file.startswith(_NOT_THE_USERS)


def place_now() -> str | None:
    """``file:line`` of the innermost running code outside of torch, Lightning and this package.

    ``None``: all running code belongs to these.
    """
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((*_NOT_THE_USERS, *_LIGHTNING)):
            return f"{frame.filename}:{frame.lineno}"
    return None


def place_of(node: fx.Node) -> str | None:
    """``file:line`` of the innermost code, outside of torch and this package, that calls a node.

    ``None``: the node has no stack trace with such code.
    """
    frames = _FRAME.findall(node.stack_trace or "")
    theirs = [f"{file}:{line}" for file, line in frames if is_users_file(file)]
    return theirs[-1] if theirs else None


_AS_WRITTEN = (  # from the names in the frame that is captured, which calls the network's `forward`
    (re.compile(r"^L\['args'\]"), "args"),
    (re.compile(r"^L\['kwargs'\]\['(\w+)'\]"), r"\1"),
    (re.compile(r"^L\['forward'\]\.__self__\b"), "self"),
    (re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]"), r".\1"),
    (re.compile(r"^G\['(?:__import_)?(\w+)'\]"), r"\1"),
)


def input_name(placeholder: fx.Node) -> str:
    """The expression for a graph's input in the network's ``forward``, such as ``self.mask``.

    Args:
        placeholder: the node of the input, in a graph from TorchDynamo (or a copy with its source).
    """
    name = placeholder_source(placeholder)
    for theirs, written in _AS_WRITTEN:
        name = theirs.sub(written, name)
    return name
