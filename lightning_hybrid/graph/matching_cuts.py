"""Cut a further graph of a network so that each stage uses tensors that its rank already has.

A network has several captured graphs: another mode, size or value of Python gives another one.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hybrid.graph.cuts import Cuts
from lightning_hybrid.graph.graph import NetworkGraph
from lightning_hybrid.graph.partition import best_place


class CannotFollow(Exception):
    """Raised if a graph uses parameters in another order than stages own them, or has no cut."""


def follow(graph: NetworkGraph, owned: Sequence[frozenset[str]]) -> list[int]:
    """Positions of cuts at which each stage uses only tensors that it already has.

    Args:
        graph: of the same network, captured for another value or mode.
        owned: per stage, the names of the parameters and buffers that it has.

    Returns:
        The number of the first layer of stages 1, 2 ...; a stage may be left without layers.

    Raises:
        CannotFollow: there are none, or no cut is allowed there.
    """
    # Stage by stage from the front: owners of the layers' tensors bound from below and above where
    # a stage may begin, and it begins at the best place between these bounds.
    cuts = Cuts(graph)
    count = len(graph.layers)
    homes = [_homes(layer.parameters | layer.buffers, owned) for layer in graph.layers]
    positions: list[int] = []
    for stage in range(1, len(owned)):
        # behind the layers that only earlier stages can have, before those of this one and later
        low = positions[-1] if positions else 0
        high = count
        for index, home in enumerate(homes):
            if home and max(home) < stage:
                low = max(low, index + 1)
            if home and min(home) >= stage:
                high = min(high, index)
        if low > high:
            layer = graph.layers[high]
            raise CannotFollow(
                f"it is called in another way than at first, in which {layer.module or layer.name} "
                f"comes before layers of an earlier stage"
            )
        place, reason = best_place(graph, cuts, low, high)
        if reason is not None:
            raise CannotFollow(f"it is called in another way than at first, and {reason}")
        positions.append(place)
    # (a layer may use tensors of two stages at once, which the bounds above do not see)
    for stage, (start, stop) in enumerate(zip([0, *positions], [*positions, count])):
        for layer in graph.layers[start:stop]:
            missing = (layer.parameters | layer.buffers) - owned[stage]
            if missing:
                raise CannotFollow(
                    "it is called in another way than at first (other sizes, values or modes), "
                    f"and then stage {stage} uses {sorted(missing)[0]!r} of another stage. "
                    "Cut points that suit both would do: the strategy's allocation=[...]"
                )
    return positions


def _homes(names: frozenset[str], owned: Sequence[frozenset[str]]) -> set[int]:
    """The stages that own all tensors of a layer; if there are none, those that own some."""
    if not names:
        return set()
    return {stage for stage, own in enumerate(owned) if names <= own} or {
        stage for stage, own in enumerate(owned) if names & own
    }
