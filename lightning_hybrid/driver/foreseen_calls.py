"""What networks a step calls, and with what: seen on a copy of the module, before there are stages.

A copy that is watched runs its Python as ever; the first call of each network is captured, as in a
run (:mod:`lightning_hybrid.driver.discovery`), but all of it is computed here. Nothing of it is
kept for the run, which finds its networks itself.
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
from lightning_hybrid.planning import CalledNetwork


class LookAhead:
    """Watches a copy of a module.

    Args:
        module: the copy, with all of its weights on one device.
        names: of the modules that are networks; None: they are found.

    Attributes:
        seen: the networks that were called, in the order of their first calls.
        problems: what kept others from being captured.

    Raises:
        NetworkNotFoundError: there is no module with parameters, or of a name that the user gave.
    """

    def __init__(self, module: nn.Module, names: Iterable[str] | None) -> None:
        self.seen: list[CalledNetwork] = []
        self.problems: list[str] = []
        self._captures: list[Capture] = []
        self._watched: dict[str, nn.Module] = {}
        self._watch(candidates(module, names))

    def close(self) -> None:
        """Let go of the copy."""
        for capture in self._captures:
            capture.close()

    def _watch(self, modules: Mapping[str, nn.Module]) -> None:
        for name, module in modules.items():
            watch(module, name, self._called)
        self._watched |= modules

    def _called(
        self, name: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """The first call of a watched module, from outside of any other."""
        # a part that several networks share is known under one of its names
        within = set(map(id, module.modules()))
        inner = {n: m for n, m in self._watched.items() if inside(n, name) or id(m) in within}
        for part in (module, *inner.values()):
            unwatch(part)
        forward = own_forward(module)
        drop_hooks(module, of=("lightning.pytorch.profilers", "pytorch_lightning.profilers"))

        def run(graph: NetworkGraph, values: Sequence[Any]) -> Sequence[Any]:
            problem = why_not_cut(graph)
            if problem is None:
                # (planning comes later: until then no graph of this step is to be kept)
                leaves = [leaf.detach() for leaf in graph.bind(values)]
                partitions = network_partitions(graph)
                self.seen.append(
                    CalledNetwork(name=name, graph=graph, partitions=partitions, leaves=leaves)
                )
            else:
                self.problems.append(f"{name or 'self'!r} {problem}")
            return compute_whole(graph, values)

        self._captures.append(Capture(module, forward, run))
        try:
            with own_saved_tensors():
                return self._captures[-1](arguments, keywords)
        except NotCaptured as error:
            self.problems.append(
                f"{name or 'self'!r} cannot be captured as one graph:\n{indented(error.reason)}"
            )
        self._watch({n: m for n, m in inner.items() if m is not module})
        return forward(*arguments, **keywords)
