"""Finds out which networks a training step calls, by a step on a copy of the module.

It serves to choose sizes before the run. The copy runs its Python, and the first call of each
network is captured, as in a run (:mod:`lightning_hybrid.driver.discovery`), but everything is
computed on this rank. The run finds its networks anew.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from lightning_hybrid._torch.autograd import own_saved_tensors
from lightning_hybrid._torch.modules import drop_hooks
from lightning_hybrid.capture import Capture, NotCaptured, candidates, own_forward, unwatch, watch
from lightning_hybrid.driver.adoption import why_not_cut
from lightning_hybrid.driver.found_network import indented, inside
from lightning_hybrid.graph import NetworkGraph, compute_whole, network_partitions
from lightning_hybrid.profiling import CalledNetwork


class ForeseenCalls:
    """Captures the networks that a copy of a module calls; all is computed on this rank.

    From its making on it intercepts the first calls of the copy's modules.

    Args:
        module: the copy, with all of its weights on one device.
        names: names of the modules that are networks; None: they are found by their calls.
        shares: whether to look for a loss of which each micro-batch has a share.

    Attributes:
        seen: the networks that were called, in the order of their first calls.
        problems: why other modules could not be captured or cut, one text each.

    Raises:
        NetworkNotFoundError: there is no module with parameters, or of a name that the user gave.
    """

    def __init__(
        self, module: nn.Module, names: Iterable[str] | None, *, shares: bool = False
    ) -> None:
        self._shares = shares
        self.seen: list[CalledNetwork] = []
        self.problems: list[str] = []
        self._captures: list[Capture] = []
        self._watched: dict[str, nn.Module] = {}
        self._watch(candidates(module, names))

    def close(self) -> None:
        """Drop the captured graphs."""
        for capture in self._captures:
            capture.close()

    def _watch(self, modules: Mapping[str, nn.Module]) -> None:
        for name, module in modules.items():
            watch(module, name, self._called)
        self._watched |= modules

    def _called(
        self, name: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Capture the first call of a watched module, outside of calls of other watched modules.

        Its graph is added to :attr:`seen`, or to :attr:`problems` why it cannot be cut. If the call
        cannot be captured, its Python runs, and the modules inside of the module are watched.

        Returns:
            What the call returns.
        """
        # (a module that several networks share is watched under one of its names only)
        within = set(map(id, module.modules()))
        inner = {n: m for n, m in self._watched.items() if inside(n, name) or id(m) in within}
        for part in (module, *inner.values()):
            unwatch(part)
        forward = own_forward(module)
        drop_hooks(module, of=("lightning.pytorch.profilers", "pytorch_lightning.profilers"))

        def run(graph: NetworkGraph, values: Sequence[Any], *_: object) -> Sequence[Any]:
            problem = why_not_cut(graph)
            if problem is None:
                # (detached, since these inputs are kept until planning, longer than this step)
                leaves = [leaf.detach() for leaf in graph.bind(values)]
                partitions = network_partitions(graph)
                self.seen.append(
                    CalledNetwork(name=name, graph=graph, partitions=partitions, leaves=leaves)
                )
            else:
                self.problems.append(f"{name or 'self'!r} {problem}")
            return compute_whole(graph, values)

        self._captures.append(Capture(module, forward, run, shares=self._shares))
        try:
            with own_saved_tensors():
                return self._captures[-1](arguments, keywords)
        except NotCaptured as error:
            self.problems.append(
                f"{name or 'self'!r} cannot be captured as one graph:\n{indented(error.reason)}"
            )
        self._watch({n: m for n, m in inner.items() if m is not module})
        return forward(*arguments, **keywords)
