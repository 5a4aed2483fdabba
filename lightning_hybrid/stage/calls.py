"""What the stages of one rank keep of a call of the network: inputs, and how to run it again.

With recomputation of activations a forward keeps its inputs, and runs again when its backward
comes. It then draws the same random numbers as before, and writes to copies of the buffers that it
has written before. Only memory and time differ from a run without recomputation.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_hybrid._torch.autograd import own_saved_tensors
from lightning_hybrid.comm import CallKey, TensorSpec
from lightning_hybrid.graph import Stage

Values = list[Tensor]
Gradients = list[Tensor | None]
Ends = Callable[[int, Values], tuple[Values, Gradients]]
"""Called by the driver's last stage after the forward of a micro-batch whose backward follows at
once, inside of the call (schedule `1f1b`). Takes the number of the micro-batch and its outputs;
returns a pair: the outputs to keep, and for each output its gradient (``None``: it gets none)."""


@dataclass
class Traffic:
    """What one stage has learned of the tensors that it exchanges in calls with one key.

    Attributes:
        incoming: by micro-batch, specs of the values that come from the previous stage (for stage
            0, of the network's inputs).
        outgoing: by micro-batch, specs of the values that go to the next stage.
        uses_rng: whether this stage or a stage before it has drawn random numbers.
        gradients_in: for each value of ``outgoing``, whether it gets a gradient. The keys are pairs
            (number of the pattern, number of the ring). A pattern says which outputs of the network
            have a gradient; a ring is the ranks that a micro-batch passes.
        gradients_out: for each value of ``incoming``, whether it gets a gradient; with the same
            keys.
    """

    incoming: dict[int, list[TensorSpec]] = field(default_factory=dict)
    outgoing: dict[int, list[TensorSpec]] = field(default_factory=dict)
    uses_rng: bool = False
    gradients_in: dict[tuple[int, int], list[bool]] = field(default_factory=dict)
    gradients_out: dict[tuple[int, int], list[bool]] = field(default_factory=dict)


@dataclass(frozen=True)
class SavedForward:
    """What the backward of a micro-batch needs of its forward, beside what autograd has saved.

    Attributes:
        values: the inputs, which are leaves of the graph.
        roots: for each output, its edge in autograd's graph, where the backward begins; ``None``
            for an output that requires no gradient. (An edge, since the output itself would stay in
            memory.)
    """

    values: Values
    roots: list[GradientEdge | None]

    @classmethod
    def of(cls, values: Values, outputs: Sequence[Any]) -> "SavedForward":
        """Make it from a forward's inputs and outputs, without a reference to the outputs.

        Args:
            values: the inputs.
            outputs: what ``Stage`` returns: tensors, and Python numbers, which have no edge.
        """
        learns = (isinstance(value, Tensor) and value.requires_grad for value in outputs)
        return cls(values, [get_gradient_edge(v) if d else None for v, d in zip(outputs, learns)])


@dataclass(frozen=True)
class Recipe:
    """What is kept of the forward of a micro-batch, to run it again in the backward.

    Attributes:
        values: the inputs of the stage.
        states: states of the random generators before the forward (from `random_state`); empty if
            the stage draws no random numbers.
        buffers: by name, copies of the buffers that the forward writes, made before it.
    """

    values: Values
    states: Values
    buffers: dict[str, Tensor]


@dataclass
class Call:
    """One call of the network on one rank, from its forward to its last backward.

    Attributes:
        number: number of the call among the calls of the network.
        draw: number that decides the random numbers; see
            :func:`lightning_hybrid.stage.random_numbers.microbatch_seed`.
        key: decides which tensors are exchanged; only the first call with a key sends shapes.
        exchange: whether headers with shapes travel before the activations, as in that first call.
        uses_rng: whether the states of the generators travel with the activations.
        traffic: `Traffic` of each stage of this rank.
        saved: for each stage of this rank, by micro-batch, what its backward needs.
        states: after the forward, states of the generators behind the last stage; empty if this
            rank does not have the last stage, or if the states do not travel.
        ahead: whether it runs before its turn on all stages but the last (streamed schedules); see
            :mod:`lightning_hybrid.stage.early_forwards`.
        again: whether it repeats a call that has run before (under `1f1b`, for outputs or gradients
            that were not asked for then); what it writes to buffers is not kept.
        averages: whether the gradients in ``aside`` are averaged over the replicas while the call
            runs.
        aside: only if backwards run inside of the call (`1f1b`), else empty: for each stage of this
            rank, by name of a parameter, the leaf of autograd that collects the parameter's
            gradient until the user's backward (see :func:`leaves_of`).
    """

    number: int
    draw: int
    key: CallKey
    exchange: bool
    uses_rng: bool
    traffic: list[Traffic]
    saved: list[dict[int, SavedForward | Recipe]]
    states: Values = field(default_factory=list)
    ahead: bool = False
    again: bool = False
    averages: bool = False
    aside: list[dict[str, Tensor]] = field(default_factory=list)


def leaves_of(stages: Sequence[Stage]) -> list[dict[str, Tensor]]:
    """Make leaves of autograd that share the memory of the stages' trained parameters.

    Called at the beginning of a call inside of which backwards run (`1f1b`). A forward that
    computes with the leaves (``Stage.run_with``) leaves gradients in ``leaf.grad``, and neither in
    ``parameter.grad`` nor seen by hooks of the parameters. A parameter that has several names, or
    is in several stages, has one leaf.

    Returns:
        For each stage, in the order of ``stages``, the leaves by name of the parameter.
    """
    made: dict[int, Tensor] = {}
    found: list[dict[str, Tensor]] = []
    for stage in stages:
        found.append({})
        for name, p in stage.taken().items():
            if isinstance(p, nn.Parameter) and p.requires_grad:
                if id(p) not in made:
                    made[id(p)] = p.detach().requires_grad_()
                found[-1][name] = made[id(p)]
    return found


def gradients_aside(
    aside: Sequence[Mapping[str, Tensor]], stages: Sequence[Stage], *, keep: bool
) -> list[tuple[Tensor, Tensor]]:
    """Take the gradients from the leaves of :func:`leaves_of`.

    Called in the user's backward, after backwards inside of the call (`1f1b`) have filled the
    leaves.

    Args:
        aside: for each stage, the leaves by name of the parameter.
        stages: the same stages, in the same order.
        keep: whether the leaves keep their gradients, and copies are returned; else ``leaf.grad``
            is set to ``None``.

    Returns:
        Pairs of a parameter and its gradient; only parameters that require a gradient and whose
        leaf has one.
    """
    weights: dict[Tensor, Tensor] = {}
    for stage, leaves in zip(stages, aside):
        taken = stage.taken()
        weights |= {leaf: taken[name] for name, leaf in leaves.items()}
    found: list[tuple[Tensor, Tensor]] = []
    for leaf, weight in weights.items():
        gradient = leaf.grad
        if gradient is None or not weight.requires_grad:
            continue
        if keep:
            gradient = gradient.clone()
        else:
            leaf.grad = None
        found.append((weight, gradient))
    return found


def saving_nothing() -> AbstractContextManager[Any]:
    """Context in which autograd saves no activations: a backward through what it records fails."""
    return torch.autograd.graph.saved_tensors_hooks(lambda _: None, _nothing)


def forward(
    stage: Stage, values: Values, numbers: Sequence[Any], states: Values
) -> tuple[list[Any], Recipe]:
    """Run the forward of a micro-batch without saving activations; :func:`again` can repeat it.

    Called if activations are recomputed (``Placement.recompute``).

    Args:
        stage: the stage.
        values: its inputs for this micro-batch.
        numbers: for this micro-batch, the values of ``NetworkGraph.numbers`` (Python numbers that
            follow from the sizes of the inputs).
        states: states of the random generators now (from `random_state`); empty if the stage draws
            no random numbers.

    Returns:
        A pair: the outputs, which require gradients as ever, and the recipe for :func:`again`.
    """
    buffers = {name: value.detach().clone() for name, value in stage.changed().items()}
    # a stage may write to an input that needs no gradient
    kept = [value if value.requires_grad else value.clone() for value in values]
    # recorded all the same, so that outputs require gradients where they would
    with torch.enable_grad(), saving_nothing():
        outputs = stage(values, numbers)
    return outputs, Recipe(kept, states, buffers)


def again(
    stage: Stage,
    recipe: Recipe,
    numbers: Sequence[Any],
    aside: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[Values, list[Any]]:
    """Run a forward again, with the current weights and saved activations. The recipe stays valid.

    The caller sets the random generators to the recipe's states before. Buffers do not change.

    Args:
        stage: the stage.
        recipe: from :func:`forward`.
        numbers: for this micro-batch, the values of ``NetworkGraph.numbers`` (Python numbers that
            follow from the sizes of the inputs).
        aside: by name, tensors to compute with in the place of the stage's parameters; see
            `Call.aside`.

    Returns:
        A pair of lists: the inputs, which are leaves of the graph, and the outputs.
    """
    buffers = {name: value.clone() for name, value in recipe.buffers.items()}
    tensors = {**stage.taken(), **aside, **buffers}
    # the recipe stays as it is: a backward with `retain_graph` runs it once more
    values = [value if value.requires_grad else value.clone() for value in recipe.values]
    with torch.enable_grad(), own_saved_tensors():
        outputs = stage.run_with([*tensors.values()], values, numbers)
    return values, outputs


def _nothing(_: None) -> Tensor:
    raise AssertionError("a forward that runs again keeps nothing")
