"""A module that the user's code calls, and what has become of its calls.

Beside it, a network in micro-batches without stages: what a pipeline is compared with.
"""

import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid._trees import rebuild, tensors_in
from lightning_hybrid.capture import Capture
from lightning_hybrid.driver.driven_network import DrivenNetwork
from lightning_hybrid.driver.network_call import NetworkCall
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph import NetworkGraph
from lightning_hybrid.planning import Plan
from lightning_hybrid.remote import Hollow, is_deferred


@dataclass(eq=False)
class FoundNetwork:
    """A module that the user's code calls.

    Attributes:
        name: its dotted name in the LightningModule.
        module: the module.
        forward: its own, as the user has it.
        hollow: shows its weights to TorchDynamo.
        whole: whether it is one graph; else a chain of them.
        reason: why it is a chain; empty for one that is whole.
        capture: of its calls.
        between: while a chain is called, what holds between two of its graphs.
        read_between: names of the weights that the Python there has computed with, in this call.
        driven: its graphs that are cut, with their plans; one of a whole network.
        calls: of each graph that is known on all ranks, how it is called.
        why_whole: per graph and number of micro-batches, why it is not split.
    """

    name: str
    module: nn.Module
    forward: Callable[..., Any]
    hollow: Hollow
    whole: bool
    reason: str
    capture: Capture
    between: ExitStack = field(default_factory=ExitStack)
    read_between: set[str] = field(default_factory=set)
    driven: list[tuple[DrivenNetwork, Plan]] = field(default_factory=list)
    calls: dict[NetworkGraph, NetworkCall] = field(default_factory=dict)
    why_whole: dict[tuple[NetworkGraph, int], str | None] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """How messages name it."""
        return f"Network {self.name or 'self'!r} ({type(self.module).__name__})"

    @property
    def is_materialized(self) -> bool:
        """Whether numbers of all weights are here (those of other ranks may be old ones)."""
        return not any(map(is_deferred, (*self.module.parameters(), *self.module.buffers())))

    def network_of(self, graph: NetworkGraph) -> tuple[DrivenNetwork, Plan] | None:
        """The network that this graph is another form of, if there is one.

        Raises:
            NetworkError: there are two.
        """
        those = [one for one in self.driven if not one[0].owned_names.isdisjoint(graph.used)]
        if len(those) > 1:
            raise NetworkError(
                f"{self.shown} cannot be captured as one graph, and two of its graphs share "
                f"{sorted(those[1][0].owned_names & graph.used)[0]!r}:\n{self.reason}"
            )
        return those[0] if those else None


class State(Enum):
    """What has become of a module that may be a network, or contain one."""

    UNSEEN = auto()
    """It was not called yet."""
    ASIDE = auto()
    """It was called, but in no way that stages could compute."""
    EARLY = auto()
    """It was captured, and no call that trains has followed."""
    OPENED = auto()
    """Its own Python runs, and the modules that it calls are looked at."""
    KEPT = auto()
    """It stays whole, on the driver."""
    CUT = auto()
    """It has stages, or is one whose batches are split."""


@dataclass(eq=False)
class Watched:
    """A module whose first call decides what becomes of it.

    Attributes:
        name: its dotted name in the LightningModule.
        module: the module.
        state: what has become of it.
        reason: why it is in this state, as messages say it.
        several: why it cannot be captured as one graph; empty: it can, or is not captured yet.
        found: what was captured of it before training.
    """

    name: str
    module: nn.Module
    state: State = State.UNSEEN
    reason: str = ""
    several: str = ""
    found: FoundNetwork | None = None

    def put(self, state: State, reason: str = "") -> None:
        """Note what has become of it now."""
        self.state, self.reason = state, reason


def layers(module: nn.Module) -> list[nn.Module]:
    """The modules that own parameters themselves."""
    return [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None]


def inside(name: str, outer: str) -> bool:
    """Whether a module of this dotted name is, or is in, that of another."""
    return not outer or name == outer or name.startswith(f"{outer}.")


def indented(text: str) -> str:
    """A reason of several lines, below a line of ours."""
    return textwrap.indent(text, "    ")


def count(number: int, what: str) -> str:
    """A number of things, in words: one of them is no plural."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def call_in_chunks(
    forward: Callable[..., Any],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    chunks: int,
) -> Any:
    """``torch.cat([net(x_i) for x_i in x.chunk(chunks)])`` for any arguments and outputs.

    Args:
        forward: of the network.
        arguments: positional arguments; tensors whose first size is the batch's are split.
        keywords: keyword arguments, likewise.
        chunks: number of micro-batches.

    Raises:
        NetworkError: an output has another first size than the micro-batch.
    """
    tensors = [tensor for _, tensor in tensors_in((arguments, keywords)) if tensor.dim()]
    if not tensors:
        return forward(*arguments, **keywords)
    batch = tensors[0].shape[0]
    # torch's own rule of sizes, on a tensor without memory: the reference is `x.chunk(chunks)`
    sizes = [len(part) for part in torch.empty(batch, device="meta").chunk(chunks)]
    results = []
    for start, size in zip(accumulate(sizes, initial=0), sizes):

        def part(leaf: Any, start: int = start, size: int = size) -> Any:
            split = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == batch
            return leaf.narrow(0, start, size) if split else leaf

        some_arguments, some_keywords = rebuild((arguments, keywords), part)
        results.append(forward(*some_arguments, **some_keywords))
    # one part is not rebuilt: an object of the user's own class stays the one that it was
    if len(results) == 1:
        return results[0]
    columns = iter(zip(*([tensor for _, tensor in tensors_in(r)] for r in results)))
    return rebuild(
        results[0],
        lambda leaf: _join(next(columns), sizes) if isinstance(leaf, Tensor) else leaf,
    )


def _join(slices: tuple[Tensor, ...], sizes: list[int]) -> Tensor:
    if any(not s.dim() or len(s) != size for s, size in zip(slices, sizes)):
        raise NetworkError(
            f"an output of shape {tuple(slices[0].shape)} does not follow the batch, so the "
            "batch cannot be split into micro-batches; use num_microbatches=1"
        )
    return torch.cat(slices)
