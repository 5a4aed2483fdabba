"""`lightning-hybrid consolidate`: convert a sharded checkpoint to a file, or to safetensors."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning import parse
from lightning_hybrid.state import load_checkpoint, save_checkpoint, write_safetensors


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `lightning-hybrid consolidate` to a parser."""
    parser.add_argument(
        "checkpoint",
        help="what HybridGabraStrategy(checkpoint=Sharded()) has saved; with --to safetensors "
        "also a file",
    )
    parser.add_argument(
        "out",
        metavar="OUT",
        help="what to write: a file that loads as one that Trainer(strategy='auto') has saved, in "
        "the memory of the largest tensor; or with --to safetensors a folder",
    )
    parser.add_argument(
        "--to",
        choices=("ckpt", "safetensors"),
        default="ckpt",
        help="ckpt: the checkpoint as a file; safetensors: the weights of the network, as "
        "from_pretrained of transformers takes them, in the memory of one of their files",
    )
    parser.add_argument(
        "--network",
        metavar="NAME",
        help="the network's name in the LightningModule (default: the only one with weights)",
    )
    parser.add_argument(
        "--max-shard-size",
        default="2 GB",
        metavar="SIZE",
        help="the largest size of a file of safetensors (default: 2 GB)",
    )
    parser.add_argument(
        "--like",
        metavar="FOLDER",
        help="a folder that the network was loaded from, whose config and tokenizer are copied",
    )
    parser.add_argument(
        "--trusted",
        action="store_true",
        help="the checkpoint is from a source that you trust: also load objects that are no "
        "tensors and plain values (torch.load with weights_only=False), such as hyper-parameters "
        "of a class of yours",
    )


def run(options: argparse.Namespace) -> None:
    """Run `lightning-hybrid consolidate`: read a checkpoint, write it in another format.

    Args:
        options: what the parser has made of the command line, with the options of `add_options`.

    Raises:
        PlanError: the checkpoint or the folder ``--like`` does not exist, what is to be written
            exists already or cannot be written, or it is not clear which network is meant.
        HybridError: the folder is no sharded checkpoint.
    """
    checkpoint, out = Path(options.checkpoint), Path(options.out)
    as_file = options.to == "ckpt"
    if not (checkpoint.is_dir() or (checkpoint.is_file() and not as_file)):
        raise PlanError(f"{options.checkpoint!r} is no folder: a sharded checkpoint is one")
    if out.exists():
        raise PlanError(f"{options.out!r} is there already: remove it, or give another name")
    like = None if options.like is None else Path(options.like)
    if like is not None and not like.is_dir():
        raise PlanError(f"--like {options.like!r} is no folder")
    size = parse("memory", options.max_shard_size, "--max-shard-size")
    try:
        loaded = load_checkpoint(checkpoint, weights_only=not options.trusted)
        if as_file:
            save_checkpoint(loaded, out)
        else:
            write_safetensors(_of_network(loaded["state_dict"], options.network), out, size, like)
    except OSError as error:
        raise PlanError(f"{options.out!r} cannot be written: {error.strerror}") from error
    print(f"{'checkpoint' if as_file else 'weights'} written to {out}")


def _of_network(state: Mapping[str, Any], network: str | None) -> dict[str, Any]:
    """Take the state dict of one network out of that of a LightningModule.

    Args:
        state: the state dict of the LightningModule.
        network: dotted name of the network in the LightningModule; empty: the whole
            LightningModule; ``None``: its only submodule with weights.

    Returns:
        The values (weights, possibly not read yet) by their names in the network.

    Raises:
        PlanError: no weights have this name, or several submodules have weights.
    """
    outermost = sorted({name.split(".")[0] for name in state})
    if network is None and len(outermost) == 1:
        [network] = outermost
    prefix = f"{network}." if network else ""
    found = {n.removeprefix(prefix): value for n, value in state.items() if n.startswith(prefix)}
    if network is None or not found:
        raise PlanError(
            f"--network {network or ''} names no weights: say which of {', '.join(outermost)} is "
            "to be written (a dotted name, such as net.model, or '' for the whole LightningModule)"
        )
    return found
