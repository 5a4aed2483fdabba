"""The errors of TorchDynamo, each made to one line for the user: why it has failed, and where."""

from __future__ import annotations

import re

from lightning_hybrid.graph import is_users_file, place_now

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
    theirs = [frame for frame in frames if is_users_file(frame[0])]
    if not theirs:  # all frames are of torch's own code: name the place that calls it
        place = place_now()
        return what if place is None else f"{what} (called in {place})"
    if _CHECKPOINT in text:
        what += ", in an activation checkpoint"
    file, line, code = theirs[-1]
    return f"{what} ({file}:{line}: `{code.strip()}`)"
