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
    theirs = [f"{file}:{line}" for file, line in frames if not file.startswith(_NOT_THE_USERS)]
    return theirs[-1] if theirs else None


FAILS = "it fails on these inputs: "
"""How a reason from `reason_in` begins if the network's own code has raised an error."""

_GOT = re.compile(r"got \w+\((['\"])(.*?)\1\)", re.DOTALL)
_SKIPPED = re.compile(r"function marked as skipped.*?qualname: ([\w.<>]+)", re.DOTALL)
_CHECKPOINT = "Operator: torch.utils.checkpoint."
"""What errors of TorchDynamo contain for code that activation checkpointing calls."""

_CALL = re.compile(r'File "(.+?)", line (\d+), in [^\n]*\n\s*([^\n]+)')


def reason_in(text: str) -> str:
    """Why TorchDynamo has failed, in one line: its reason, and the user's line that has caused it.

    It has no full stop. If the network's own code has raised an error, it begins with `FAILS`.

    (The error's text has the stack twice, with hints and links for TorchDynamo's developers.)

    Args:
        text: the text of TorchDynamo's error.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    what = lines[0].partition(" (unhinted")[0].rstrip(".") if lines else "no reason is given"
    skipped = _SKIPPED.search(text)
    if skipped is not None:
        what = f"TorchDynamo does not follow {skipped[1]!r}"
    got = _GOT.search(text)
    if got is not None:
        what = f"{FAILS}{' '.join(got[2].split()).rstrip('.')}"
    frames = _CALL.findall(text.partition("from user code:")[2] or text)
    theirs = [frame for frame in frames if not frame[0].startswith(_NOT_THE_USERS)]
    if not theirs:  # all frames are of torch's own code: name the place that calls it
        place = place_now()
        return what if place is None else f"{what} (called in {place})"
    if _CHECKPOINT in text:
        what += ", in an activation checkpoint"
    file, line, code = theirs[-1]
    return f"{what} ({file}:{line}: `{code.strip()}`)"


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
