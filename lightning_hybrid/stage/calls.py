"""What the stages of one rank keep of a call of the network, up to its last backward.

With recomputation they keep what runs the forward again (``recomputation.py``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_hybrid.comm import CallKey, TensorSpec
from lightning_hybrid.graph import Stage
from lightning_hybrid.stage.recomputation import Recipe

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
