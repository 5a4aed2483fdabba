"""The command line `lightning-hybrid`, or `python -m lightning_hybrid`, and its commands.

The module of a command is imported when the command is given: most need torch, and some do not.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from lightning_hybrid.errors import HybridError

COMMANDS = {
    "plan": "the fastest plan for a network on a cluster, as a table and a page",
    "simulate": "how fast a network is on 1, 2, 3 ... devices: how many do I need?",
    "doctor": "measure devices and links, look for what disagrees, describe the cluster",
    "consolidate": "make a file, or safetensors, of a sharded checkpoint",
    "fit-model": "learn from timings what a step takes, and which factor matters",
}
"""By name of a command what it is for. Its module in `asking/` has the functions `add_options` and
`run`: `fit_model_command.py` is that of `fit-model`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name.

    Args:
        arguments: the words behind `lightning-hybrid`; ``None``: those of this process.

    Returns:
        The exit status: 0, or 2 if the command was refused; the reason is printed.
    """
    words = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="lightning-hybrid",
        description="Plans of pipeline and data parallelism, before anything runs.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    given = next((word for word in words if word in COMMANDS), None)
    for name, about in COMMANDS.items():
        options_of = commands.add_parser(name, help=about, description=about)
        if name == given:
            module = import_module(f"lightning_hybrid.asking.{name.replace('-', '_')}_command")
            module.add_options(options_of)
    options = parser.parse_args(words)
    try:
        module.run(options)
    except HybridError as error:
        print(f"lightning-hybrid {options.command}: {error}", file=sys.stderr)
        return 2
    return 0
