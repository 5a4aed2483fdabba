"""Group the layers of a network into network partitions, the smallest units that move as a whole.

One heavy layer (convolution, linear layer) with the light ones around it makes one partition:
Akintoye et al. 2022, III-A.1. Between two heavy layers the cut lies where it divides the fewest of
the network's own modules, and of such places at the last one (so convolution, norm and ReLU stay
together).

A network has several captured graphs: another mode, size or value of Python gives another one. The
first graph is cut by a plan; each further one is cut so that each stage uses tensors that its rank
already has (`cuts_for_owned`).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile

from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph.cuts_and_crossings import Cuts
from lightning_hybrid.graph.graph import Layer, NetworkGraph


@dataclass(frozen=True)
class NetworkPartition:
    """Consecutive layers that are always on the same device.

    Attributes:
        name: dotted name of its first module; with "#2", "#3" ... behind it where that module
            begins several partitions.
        start: number of its first layer in the graph.
        stop: number of its last layer plus one.
        layers: names of its layers' nodes.
        modules: per layer: dotted name of the module whose code calls it.
        parameters: dotted names of its parameters.
        flops: floating-point operations of one forward at the captured batch size: its load.
        output_bytes: bytes of all that crosses a cut after it, at the captured batch size.
        refused: for each place inside it where a cut would be best but is not allowed: (name of the
            module behind it, reason as from `Cuts.refusal`).
    """

    name: str
    start: int
    stop: int
    layers: tuple[str, ...]
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    flops: int
    output_bytes: int
    refused: tuple[tuple[str, str], ...]


def network_partitions(
    graph: NetworkGraph, *, whole_blocks: bool = False
) -> tuple[NetworkPartition, ...]:
    """The partitions of a captured network, in order; a cut before each but the first is allowed.

    The load of a partition counts 2 FLOPs per multiplication and addition in convolutions and
    matrix products (C_o C_i T H W K_T K_H K_W for a convolution: IV-C.1 of the paper), and one per
    element that a light layer returns.

    Args:
        graph: the captured network.
        whole_blocks: whether to leave each item of a list of modules ("layers.3", and all inside of
            it) undivided, as code mostly checkpoints or repeats such items as a whole. It is for a
            network that an evaluation cuts, so that training can use the same cuts.
    """
    cuts = Cuts(graph)
    heavy = _heavy_layers(graph, cuts)
    # between two heavy layers there is one cut at most, so no partition is without a load
    starts, refused = [0], {}
    for before, after in pairwise(heavy):
        place, reason = best_place(graph, cuts, before + 1, after)
        if reason is not None:
            refused[place] = reason
        elif not (whole_blocks and any(map(str.isdecimal, _opened(graph, place)))):
            starts.append(place)
    stops = [*starts[1:], len(graph.layers)]
    partitions: dict[str, NetworkPartition] = {}
    for start, stop in zip(starts, stops):
        inside = {place: reason for place, reason in refused.items() if start < place < stop}
        partition = _partition(graph, cuts, start, stop, inside)
        # a module that is called several times begins several partitions
        name, count = partition.name, 2
        while name in partitions:
            name, count = f"{partition.name}#{count}", count + 1
        partitions[name] = replace(partition, name=name)
    return tuple(partitions.values())


def layer_flops(graph: NetworkGraph, layer: Layer) -> int:
    """The load of one layer, in floating-point operations of a forward at the captured batch size.

    It is the counted operations of convolutions, matrix products and recurrent layers, and one per
    element that any other layer returns.
    """
    values = [graph.info[n] for n in (layer.node, *layer.parts) if n in graph.info]
    elements = [math.prod(value.shape) for value in values]
    if layer.effects.flops or not _is_recurrent(layer):
        return layer.effects.flops or sum(elements)
    # a recurrent layer is one operation without a count: each parameter works in each step
    # (the outputs have a row of the last dimension for each step of each sample)
    steps = elements[0] // max(values[0].shape[-1], 1)  # of all samples together
    return 2 * steps * sum(graph.network.get_parameter(name).numel() for name in layer.parameters)


_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


def _is_recurrent(layer: Layer) -> bool:
    name = getattr(layer.node.target, "__name__", str(layer.node.target))
    return name.removesuffix("_cell") in _RECURRENT


def _is_table(layer: Layer) -> bool:
    return str(getattr(layer.node.target, "__name__", "")) in ("embedding", "embedding_bag")


def _same_module(one: Layer, other: Layer) -> bool:
    """Whether the modules around two layers are the same, or one contains the other.

    The module around a layer has submodules: around a convolution it is the block that holds it.
    """
    pairs = zip(_scope(one), _scope(other))
    return all(a == b for a, b in pairs)


def _heavy_layers(graph: NetworkGraph, cuts: Cuts) -> list[int]:
    """Numbers of the heavy layers: those that compute with weights, and embedding tables.

    A pointwise layer (linear, or a convolution of kernel size 1) does not count if a heavy layer
    beside it, which stands before it or is not pointwise, reads all that it reads: the shortcut of
    a residual block, or the projections to keys and values of attention. (Beside it: `_same_module`
    is true of the two.)

    Args:
        graph: the captured network.
        cuts: of the same graph; tells what each layer reads.
    """
    # (a product of two activations, as in attention, is no place to begin a partition: it goes with
    # the projections beside it)
    weights = graph.made_of_weights
    heavy = [
        number
        for number, layer in enumerate(graph.layers)
        if (layer.effects.flops and not weights.isdisjoint(layer.node.all_input_nodes))
        or (layer.parameters and (_is_recurrent(layer) or _is_table(layer)))
    ]
    shapes = {name: tuple(p.shape) for name, p in graph.network.named_parameters()}
    pointwise = {
        number
        for number in heavy
        if all(size == 1 for n in graph.layers[number].parameters for size in shapes[n][2:])
        and not _is_recurrent(graph.layers[number])
    }

    def beside_another(number: int) -> bool:
        return any(
            cuts.reads[number] <= cuts.reads[other]
            and _same_module(graph.layers[number], graph.layers[other])
            for other in heavy
            if other < number or (other > number and other not in pointwise)
        )

    return [n for n in heavy if n not in pointwise or not beside_another(n)]


def best_place(graph: NetworkGraph, cuts: Cuts, first: int, last: int) -> tuple[int, str | None]:
    """Find the best position for a cut from position ``first`` to ``last``, both included.

    Best is where no tensor that is made of weights alone crosses; of these, where the fewest
    modules are divided; of these, the last one.

    Args:
        graph: the captured network.
        cuts: of the same graph.
        first: the first position to look at.
        last: the last position to look at.

    Returns:
        ``(position, None)``: the best position at which a cut is allowed. If no cut is allowed,
        ``(position, reason)``: the position that would be best, and why a cut there is not allowed,
        as from `Cuts.refusal`.
    """

    def merit(position: int) -> tuple[bool, int, int]:
        return cuts.crosses_made_of_weights(position), len(_opened(graph, position)), -position

    places = sorted(range(first, last + 1), key=merit)
    reasons = []
    for place in places:
        reason = cuts.refusal(place)
        if reason is None:
            return place, None
        reasons.append(reason)
    return places[0], reasons[0]


def _opened(graph: NetworkGraph, position: int) -> list[str]:
    """Names of the modules that a cut at a position divides, from the outermost inwards.

    A module is divided if it has layers on both sides of the cut. Each name is that of the module
    in the one before it ("layers", then "3"); the network itself is left out. Empty for the first
    and the last position.
    """
    if not 0 < position < len(graph.layers):  # in a further graph a stage may have no layers
        return []
    one, other = (graph.layers[i] for i in (position - 1, position))
    if one.is_module and one.module == other.module:
        return one.module.split(".")
    pairs = zip(_scope(one), _scope(other))
    return [name for name, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _scope(layer: Layer) -> list[str]:
    parts = layer.module.split(".") if layer.module else []
    return parts[:-1] if layer.is_module else parts


def _partition(
    graph: NetworkGraph, cuts: Cuts, start: int, stop: int, refused: dict[int, str]
) -> NetworkPartition:
    layers = graph.layers[start:stop]
    used = set().union(*(layer.parameters for layer in layers))
    return NetworkPartition(
        _label(graph, start, stop),
        start,
        stop,
        tuple(layer.name for layer in layers),
        tuple(layer.module for layer in layers),
        tuple(name for name in graph.parameter_names if name in used),
        sum(layer_flops(graph, layer) for layer in layers),
        cuts.bytes(stop),
        tuple((_label(graph, place, stop), reason) for place, reason in refused.items()),
    )


def _label(graph: NetworkGraph, start: int, stop: int) -> str:
    layers = graph.layers[start:stop]
    first = next((layer.module for layer in layers if layer.is_module), None)
    if first is not None or not layers:
        return first or ""
    named = next((layer for layer in layers if layer.node in graph.info), layers[0])
    return f"{named.module}.{named.name}".removeprefix(".")


def find_boundary(partitions: Sequence[NetworkPartition], name: str, prefix: str = "") -> int:
    """The number of the partition that begins with the module ``name``, for a cut before it.

    Args:
        partitions: from `network_partitions`.
        name: dotted name of a module in the network: that of one layer, or one that holds layers
            ("layer3"); or the name of a partition.
        prefix: what error messages put before the names ("net.").

    Returns:
        The index in ``partitions``, at least 1.

    Raises:
        NetworkError: no partition begins there, or a cut there is not allowed; the message says
            why, and names modules that would do.
    """
    begins = _beginnings(partitions)
    shown = repr(prefix + name)
    if name in begins:
        number = begins[name]
        if number > 0:
            return number
        raise NetworkError(f"cannot cut before {shown}: the network begins there")
    for partition in partitions:
        for place, reason in partition.refused:
            if place == name or place.startswith(f"{name}."):
                raise NetworkError(f"cannot cut before {shown}: {reason}")
    # (the network begins with partition 0, where nothing can be cut)
    known = [n for n, number in begins.items() if number > 0]
    close = difflib.get_close_matches(name, known, n=4, cutoff=0.4) or known[:4]
    inside = [prefix + p.name for p in partitions if name in _prefixes(p.modules)]
    where = f"it lies inside partition {inside[0]!r}" if inside else "there is no such module in it"
    names = ", ".join(repr(prefix + n) for n in close) or "none, the network is one partition"
    raise NetworkError(
        f"no partition of the network begins with {shown} ({where}); close to it: {names}"
    )


def _beginnings(partitions: Sequence[NetworkPartition]) -> dict[str, int]:
    """The partition number for each module name that a cut may be named after.

    These are dotted names of modules whose first layer begins a partition, and the partitions'
    names.
    """
    begins: dict[str, int] = {}
    seen: set[str] = set()
    for number, partition in enumerate(partitions):
        for index, module in enumerate(partition.modules):
            new = _prefixes([module]) - seen
            seen |= new
            if index == 0:
                begins.update(dict.fromkeys(sorted(new), number))
    for number, partition in enumerate(partitions):
        begins.setdefault(partition.name, number)
    return begins


def _prefixes(modules: Sequence[str]) -> set[str]:
    found = set()
    for module in modules:
        parts = module.split(".")
        found |= {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)} - {""}
    return found


# ---------------------------------------------------------------- further graphs of a network


class CannotFollow(Exception):
    """Raised if a further graph of a network has no cuts that suit the stages of the first graph.

    No cuts leave each stage with parameters and buffers of its own only, or such a cut is not
    allowed. The text says why, as a clause in which "it" is the network.
    """


def cuts_for_owned(graph: NetworkGraph, owned: Sequence[frozenset[str]]) -> list[int]:
    """Find positions to cut a further graph, so that each stage uses only tensors that it has.

    Called when a network that is cut already is captured again.

    Args:
        graph: of a network whose stages exist already, captured for another value or mode.
        owned: per stage, the names of the parameters and buffers that it has.

    Returns:
        The number of the first layer of stages 1, 2 ...; a stage may be left without layers.

    Raises:
        CannotFollow: there are no such positions, or a cut is not allowed there.
    """
    # Stage by stage from the front: owners of the layers' tensors bound from below and above where
    # a stage may begin, and it begins at the best place between these bounds.
    cuts = Cuts(graph)
    count = len(graph.layers)
    homes = [_homes(layer.parameters | layer.buffers, owned) for layer in graph.layers]
    positions: list[int] = []
    for stage in range(1, len(owned)):
        # after the layers that only earlier stages can have, before those of this and later stages
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
                    "Cut points that suit both would do: the strategy's plan=[...]"
                )
    return positions


def _homes(names: frozenset[str], owned: Sequence[frozenset[str]]) -> set[int]:
    """Numbers of the stages that own all of some tensors; if there are none, of those that own one.

    Args:
        names: the parameters and buffers of a layer.
        owned: per stage, the names of the parameters and buffers that it has.
    """
    if not names:
        return set()
    return {stage for stage, own in enumerate(owned) if names <= own} or {
        stage for stage, own in enumerate(owned) if names & own
    }
