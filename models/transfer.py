"""Start from the weights of another run, and never test on whom that run was trained."""

import hashlib
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.errors import UseError

KEY = "trained_on"
"""Entry of a checkpoint: hashes of the subjects that its weights have seen in training."""

SCALE = "target_scale"
"""Entry of a checkpoint that tells a number: its mean and deviation over the training scans."""


def scale_of(checkpoint: Mapping[str, Any]) -> tuple[float, float] | None:
    """The scale of the number that a checkpoint tells; None for one of classes."""
    if SCALE not in checkpoint:
        return None
    mean, spread = checkpoint[SCALE]
    return mean, spread


def hashed(subjects: Iterable[str]) -> list[str]:
    """Subjects as hashes: a checkpoint may be shared, identifiers may not.

    Of the letters and digits of a name alone, so that another spelling is the same person.
    """
    return sorted({_hash(_plain(subject)) for subject in subjects})


def is_among(subject: str, hashes: Collection[str]) -> bool:
    """Whether a person is among hashes; those of older checkpoints are of the name as it was."""
    return not set(hashes).isdisjoint({*hashed([subject]), _hash(subject)})


def _plain(name: str) -> str:
    apart = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", name).casefold())
    plain = unicodedata.normalize("NFKC", re.sub("[\u0300-\u036f]", "", apart))  # without accents
    runs = re.findall(r"\d+|[^\W\d_]+", plain)
    return " ".join(re.sub(r"^0+(?=\d)", "", run) for run in runs)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a Lightning checkpoint onto the CPU.

    Raises:
        UseError: If it is missing or no checkpoint.
    """
    if not Path(path).is_file():
        near = sorted(str(found) for found in Path(path).parent.glob("*.ckpt"))
        there = f"in that folder: {', '.join(near)}" if near else "that folder holds none"
        raise UseError(f"There is no checkpoint {path}; {there}.")
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        checkpoint["state_dict"]
    except Exception as error:  # whatever a file that is no checkpoint makes of the unpickler
        raise UseError(
            f"{path} is no Lightning checkpoint that can be read safely: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    return checkpoint


def state_of(datamodule: object, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint remembers of the data module; empty if nothing."""
    state: dict[str, Any] = checkpoint.get(type(datamodule).__qualname__, {})
    return state


def transfer(
    network: nn.Module, path: str | Path, held_out: Iterable[str], datamodule: object = None
) -> list[str]:
    """Copy the weights of another run's network into this one, in place.

    Args:
        network: Takes every weight of the same name; a last layer with another number of classes
            keeps its own start.
        path: Checkpoint of the other run.
        held_out: Subjects that this run validates or tests on.
        datamodule: Of this run; if it has a ``refuse_other_images``, that is given what the
            checkpoint remembers of its own, and raises where images were prepared otherwise.

    Returns:
        The hashes of the subjects that the weights have seen.

    Raises:
        UseError: If a held-out subject was trained on, or the networks differ in more than the last
            layer.
    """
    # Lightning takes seconds to import, and all else here is done without it
    from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

    checkpoint = read_checkpoint(path)
    compare = getattr(datamodule, "refuse_other_images", None)
    if compare is not None:
        compare(state_of(datamodule, checkpoint))
    seen = list(checkpoint.get(KEY, ()))
    if not seen:
        rank_zero_warn(
            f"{path} does not say whom its weights were trained on, so it cannot be checked that "
            "nobody is held out now who was trained on there."
        )
    leaked = [subject for subject in held_out if is_among(subject, seen)]
    if leaked:
        raise UseError(
            f"{len(leaked)} subject(s) that this run holds out for validation or testing were "
            f"trained on in {path}: results on them would prove nothing. Give both runs one split "
            "that serves both tasks (`python -m datamodules split ROOT --task ad_nc --task "
            "pmci_smci --out FILE`, then --data.split_file FILE), or weights that were trained on "
            "others."
        )
    prefix, own = "network.", network.state_dict()
    given = {k.removeprefix(prefix): v for k, v in checkpoint["state_dict"].items() if prefix in k}
    fitting = {k: v for k, v in given.items() if k in own and own[k].shape == v.shape}
    odd = sorted(k for k in own.keys() | given.keys() if k not in fitting)
    if any(not name.startswith("classifier.") for name in odd):
        raise UseError(
            f"The network in {path} is another one: {', '.join(odd[:3])} and {len(odd)} names in "
            "all differ. Give the same --model options (depth, widths, attention_after, stem)."
        )
    network.load_state_dict(fitting, strict=False)
    fresh = f"; new: {', '.join(odd)}" if odd else ""
    rank_zero_info(f"{len(fitting)} weights from {path}{fresh}")
    return seen
