"""The command line `lightning-hybrid`, or `python -m lightning_hybrid`, and its commands."""

import argparse
import sys
from collections.abc import Sequence

from lightning_hybrid.asking import consolidate_command as consolidate
from lightning_hybrid.asking import doctor_command as doctor
from lightning_hybrid.asking import fit_model_command as fit_model
from lightning_hybrid.asking import plan_command as plan
from lightning_hybrid.asking import simulate_command as simulate
from lightning_hybrid.errors import HybridError

COMMANDS = {
    "plan": (plan, "the fastest plan for a network on a cluster, as a table and a page"),
    "simulate": (simulate, "how fast a network is on 1, 2, 3 ... devices: how many do I need?"),
    "doctor": (doctor, "measure devices and links, look for what disagrees, describe the cluster"),
    "consolidate": (consolidate, "make a file, or safetensors, of a sharded checkpoint"),
    "fit-model": (fit_model, "learn from timings what a step takes, and which factor matters"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name.

    Args:
        arguments: the words behind `lightning-hybrid`; ``None``: those of this process.

    Returns:
        The exit status: 0, or 2 if the command was refused; the reason is printed.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-hybrid",
        description="Plans of pipeline and data parallelism, before anything runs.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, about) in COMMANDS.items():
        module.add_options(commands.add_parser(name, help=about, description=about))
    options = parser.parse_args(arguments)
    try:
        COMMANDS[options.command][0].run(options)
    except HybridError as error:
        print(f"lightning-hybrid {options.command}: {error}", file=sys.stderr)
        return 2
    return 0
