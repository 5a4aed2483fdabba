"""`lightning-hybrid consolidate`: make an ordinary Lightning checkpoint of a sharded one."""

import argparse
from pathlib import Path

from lightning_hybrid.errors import PlanError
from lightning_hybrid.state import AtomicCheckpointIO


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to a parser."""
    parser.add_argument(
        "folder",
        help="a sharded checkpoint, as HybridGabraStrategy(checkpoint='sharded') saves it",
    )
    parser.add_argument(
        "out",
        metavar="OUT.ckpt",
        help="the file to write, which loads as one that Trainer(strategy='auto') has saved; it "
        "is written tensor by tensor, in the memory of the largest one",
    )
    parser.add_argument(
        "--trusted",
        action="store_true",
        help="the folder is from a source that you trust: also load objects that are no tensors "
        "and plain values (torch.load with weights_only=False), such as hyper-parameters of a "
        "class of yours",
    )


def run(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        PlanError: the folder does not exist, or the file exists already or cannot be written.
        HybridError: the folder is no sharded checkpoint.
    """
    folder, out = Path(options.folder), Path(options.out)
    if not folder.is_dir():
        raise PlanError(f"{options.folder!r} is no folder: a sharded checkpoint is one")
    if out.exists():
        raise PlanError(f"{options.out!r} is there already: remove it, or give another name")
    io = AtomicCheckpointIO()
    try:
        io.save_checkpoint(io.load_checkpoint(folder, weights_only=not options.trusted), out)
    except OSError as error:
        raise PlanError(f"{options.out!r} cannot be written: {error.strerror}") from error
    print(f"checkpoint written to {out}")
