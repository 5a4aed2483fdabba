import re
from difflib import get_close_matches
from typing import NoReturn

from lightning.pytorch.cli import LightningArgumentParser


class Parser(LightningArgumentParser):
    """Refuses options that it does not know, and proposes those that may be meant."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Write a message and end, with status 2."""
        if "unrecognized arguments" in message:
            # that of a list has a form with + too, which adds to it
            options = sorted(option for option in _options(self) if not option.endswith("+"))
            for given in re.findall(r"--[\w.]+", message):
                message += _proposed(given, options)
        super().error(message, ex)


def _options(parser: LightningArgumentParser) -> set[str]:
    """All options of a parser and of its commands."""
    found = {option for action in parser._actions for option in action.option_strings}
    for action in parser._actions:
        if isinstance(action.choices, dict):  # commands, by name
            for command in action.choices.values():
                found |= _options(command)
    return found


def _proposed(given: str, options: list[str]) -> str:
    near = [option for option in options if option.startswith(given)]
    near = near or get_close_matches(given, options, n=1, cutoff=0.7)
    return f". For {given}, is it {' or '.join(near[:4])}?" if near else ""
