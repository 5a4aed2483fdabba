"""A module that the user's code calls, and its state: whether it is cut, kept whole, opened, ..."""

import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from torch import nn

from lightning_hybrid.capture import Capture
from lightning_hybrid.driver.driven_network import DrivenNetwork
from lightning_hybrid.driver.network_call import NetworkCall
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph import NetworkGraph
from lightning_hybrid.planning import Plan
from lightning_hybrid.remote import Hollow, is_deferred


@dataclass(eq=False)
class FoundNetwork:
    """A module that the user's code has called, and what was captured of it.

    Attributes:
        name: its dotted name in the LightningModule.
        module: the module.
        forward: the user's own ``forward`` of the module.
        hollow: shows weights that are not on this device to TorchDynamo, as tensors without memory.
        whole: whether it is captured as one graph; else as a chain of graphs.
        reason: why it is a chain; empty if it is one graph.
        capture: captures its calls.
        between: while a chain is called, the context of the Python between two of its graphs.
        read_between: names of the weights that this Python has computed with in this call.
        driven: for each of its graphs that has a plan, the network as it is cut, and the plan. (A
            module that is one graph has one; graphs that follow its cuts add none.)
        calls: by graph, what calls its stages, for graphs whose stages all ranks have.
        why_whole: by graph and number of micro-batches, why batches are not split; ``None``: they
            are.
    """

    name: str
    module: nn.Module
    forward: Callable[..., Any]
    hollow: Hollow
    whole: bool
    reason: str
    capture: Capture = field(init=False)
    between: ExitStack = field(default_factory=ExitStack)
    read_between: set[str] = field(default_factory=set)
    driven: list[tuple[DrivenNetwork, Plan]] = field(default_factory=list)
    calls: dict[NetworkGraph, NetworkCall] = field(default_factory=dict)
    why_whole: dict[tuple[NetworkGraph, int], str | None] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The name of the network in messages."""
        return f"Network {self.name or 'self'!r} ({type(self.module).__name__})"

    def network_of(self, graph: NetworkGraph) -> tuple[DrivenNetwork, Plan] | None:
        """Find which of the networks in `driven` has weights that a graph uses.

        Returns:
            The network and its plan; ``None``: the graph uses weights of none of them.

        Raises:
            NetworkError: the graph uses weights of two of them.
        """
        those = [one for one in self.driven if not one[0].owned_names.isdisjoint(graph.used)]
        if len(those) > 1:
            raise NetworkError(
                f"{self.shown} cannot be captured as one graph, and two of its graphs share "
                f"{sorted(those[1][0].owned_names & graph.used)[0]!r}:\n{self.reason}"
            )
        return those[0] if those else None


class ModuleState(Enum):
    """The state of a module that may be a network, or contain one."""

    UNSEEN = auto()
    """The module was not called yet."""
    ASIDE = auto()
    """It was called, but only in ways that stages cannot compute."""
    EARLY = auto()
    """It was called without gradients only; it is cut in its first call that trains."""
    OPENED = auto()
    """Its own Python runs on the driver, and the modules that it calls are watched instead."""
    KEPT = auto()
    """It stays whole, on the driver."""
    CUT = auto()
    """It is cut into stages, or, on a single rank, compiled."""


@dataclass(eq=False)
class WatchedModule:
    """A module whose calls are intercepted, to decide in the first ones whether it is cut.

    Attributes:
        name: its dotted name in the LightningModule.
        module: the module.
        state: its state.
        reason: why it is in this state, as a predicate of the module; empty: it needs no reason.
        several: why it cannot be captured as one graph; empty: it can, or is not captured yet.
    """

    name: str
    module: nn.Module
    state: ModuleState = ModuleState.UNSEEN
    reason: str = ""
    several: str = ""

    def put(self, state: ModuleState, reason: str = "") -> None:
        """Set the state, and the reason for it (a predicate of the module)."""
        self.state = state
        self.reason = reason


def is_materialized(module: nn.Module) -> bool:
    """Whether none of the weights and buffers of a module is a deferred tensor."""
    return not any(map(is_deferred, (*module.parameters(), *module.buffers())))


def modules_with_parameters(module: nn.Module) -> list[nn.Module]:
    """The modules in a module, itself included, that have parameters of their own."""
    return [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None]


def inside(name: str, outer: str) -> bool:
    """Whether the module of a dotted name is, or is inside of, the module of another."""
    return not outer or name == outer or name.startswith(f"{outer}.")


def indented(text: str) -> str:
    """A text of several lines, indented below the line of a message."""
    return textwrap.indent(text, "    ")


def count(number: int, what: str) -> str:
    """A number and a noun, in the plural unless the number is 1."""
    return f"{number} {what}{'' if number == 1 else 's'}"
