"""Weights to start from: of a MONAI bundle, of MedicalNet, or of any file of weights by name.

Names are compared without what wrappers put in front (``module.``, ``network.``), and residual
networks under the names of torchvision, MONAI and MedicalNet (``conv1``, ``downsample``, ...).
"""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.errors import UseError

_SAME = (
    (r"^((module|network|model|net|backbone|encoder)\.)+", ""),
    (r"^stem\.conv\.", "conv1."),
    (r"^stem\.bn\.", "bn1."),
    (r"\.shortcut\.", ".downsample."),
)
_WRAPPED = ("state_dict", "model", "network")


def start_from(network: nn.Module, path: Path) -> str:
    """Copy the weights that match in name and shape into a network, in place; say which did.

    Args:
        network: of this project or MONAI's.
        path: folder of a MONAI bundle, or a file of weights.

    Raises:
        UseError: the file cannot be read safely, or nothing in it matches.
    """
    own = {_common(name): (name, value) for name, value in network.state_dict().items()}
    given = {_common(name): value for name, value in _read(path).items()}
    for name in [name for name in given if name.endswith("downsample.0.bias") and name not in own]:
        # before a batch normalisation it is the same as another mean there
        mean = name.replace("0.bias", "1.running_mean")
        given[mean] = given[mean] - given.pop(name)
    alike = [name for name in given if name in own]
    fits = [name for name in alike if own[name][1].shape == given[name].shape]
    if not any(own[name][1].dim() > 1 for name in fits):
        raise UseError(
            f"{path} has no weights for this network: it has {_named(given)}, and wanted are "
            f"{_named(own)}, of the same shapes. Give the weights of a 3D residual network of the "
            "same depth and widths (--model.depth, --model.widths)."
        )
    network.load_state_dict({own[name][0]: given[name] for name in fits}, strict=False)
    parts = Counter(own[name][0].partition(".")[0] for name in own)
    matched = Counter(own[name][0].partition(".")[0] for name in fits)
    counts = ", ".join(f"{part} {matched[part]} of {n}" for part, n in parts.items())
    text = f"{len(fits)} of {len(own)} entries from {path}: {counts}"
    for name in sorted({*alike} - {*fits}):
        shapes = [tuple(value.shape) for value in (given[name], own[name][1])]
        text += f"; {own[name][0]} is {shapes[0]} there and {shapes[1]} here, not taken"
    unused = [name for name in given if name not in own]
    return text + (f"; not used: {_named(unused)}" if unused else "")


def freeze(network: nn.Module, names: Sequence[str]) -> None:
    """Keep the weights of some parts as they are, and their batch statistics out of training.

    Raises:
        UseError: there is no such part.
    """
    parts = dict(network.named_children())
    for name in names:
        if name not in parts:
            raise UseError(f"The network has no part {name!r} to freeze; it has {', '.join(parts)}")
        parts[name].requires_grad_(False).eval()


def _common(name: str) -> str:
    for pattern, instead in _SAME:
        name = re.sub(pattern, instead, name)
    return name


def _named(names: Any) -> str:
    return ", ".join(list(names)[:5]) + ", ..." * (len(names) > 5)


def _read(path: Path) -> dict[str, torch.Tensor]:
    file = path / "models" / "model.pt" if path.is_dir() else path
    try:
        found: Any = torch.load(file, map_location="cpu", weights_only=True)
        while inner := [found[key] for key in _WRAPPED if isinstance(found.get(key), dict)]:
            found = inner[0]
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    except Exception as error:  # whatever a file that holds no weights makes of the unpickler
        raise UseError(
            f"{file} cannot be read as weights: {type(error).__name__}: {str(error)[:200]}. Give "
            "the folder of a MONAI bundle, or a file of tensors by name (.pt, .pth)."
        ) from error
