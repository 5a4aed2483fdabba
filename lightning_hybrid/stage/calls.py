"""What the stages of one rank know of a call of the network: inputs, random numbers, recomputation.

A stage that draws (dropout) would draw other numbers than one device does, and other ones again
under another number of stages. So each micro-batch has a generator of its own, seeded from the
run's seed, the replica, the batch, the call and the micro-batch, and its *state travels with the
activations*: stage k + 1 goes on where stage k stopped. The numbers then depend on the seed and
on the micro-batch alone. The generators of the user's code are never touched.

With recomputation of activations a forward keeps its inputs, and runs again when its backward
comes. It then draws the random numbers that it has drawn, and writes to copies of the buffers that
it has written, so that nothing but memory and time is other than without.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from threading import Lock
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
"""What the driver makes of a micro-batch's outputs where its backward follows at once: which of
them are kept, and the gradients of all."""


@dataclass
class Traffic:
    """What one stage has learned of the tensors that it exchanges in calls with one key.

    Attributes:
        incoming: per micro-batch, what comes from the previous stage.
        outgoing: per micro-batch, what goes to the next one.
        uses_rng: whether a stage up to this one has drawn random numbers.
        gradients_in: which of ``outgoing`` get a gradient, per (number of the pattern of gradients
            that the network's outputs have, ring of ranks that the micro-batch goes around).
        gradients_out: likewise, which of ``incoming`` get one.
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
        values: the inputs.
        roots: where the backward begins: the edge of each output in autograd's graph; ``None`` for
            one without a gradient. (An edge, since the output itself would stay in memory.)
    """

    values: Values
    roots: list[GradientEdge | None]

    @classmethod
    def of(cls, values: Values, outputs: Sequence[Any]) -> "SavedForward":
        """The graph of a forward from its inputs and outputs."""
        learns = (isinstance(value, Tensor) and value.requires_grad for value in outputs)
        return cls(values, [get_gradient_edge(v) if d else None for v, d in zip(outputs, learns)])


@dataclass(frozen=True)
class Recipe:
    """What it takes to run the forward of a micro-batch again.

    Attributes:
        values: its inputs.
        states: states of the generators before it; empty if it draws no random numbers.
        buffers: by name, copies of the buffers that it writes, from before it.
    """

    values: Values
    states: Values
    buffers: dict[str, Tensor]


@dataclass
class Call:
    """One call of the network on one rank, from its forward to its last backward.

    Attributes:
        number: counts the calls of the network.
        draw: decides the random numbers; see
            :func:`lightning_hybrid.stage.calls.draw_number`.
        key: decides which tensors are exchanged; only the first call with a key sends shapes.
        exchange: whether headers with shapes travel before the activations, as in that first call.
        uses_rng: whether the generators' state travels with the activations.
        traffic: `Traffic` of each stage of this rank.
        saved: for each stage of this rank, per micro-batch, what its backward needs.
        states: states of the generators after the last stage, if it is on this rank and they
            travel.
        ahead: whether it runs before its turn on all stages but the last; see
            :mod:`lightning_hybrid.stage.early_forwards`.
        again: whether it has run before, so that what it writes to buffers is not kept.
        averages: whether what is left aside is averaged over the replicas inside of the call.
        aside: for each stage of this rank, if backwards run inside of the call: by name, what
            stands for its parameters and collects their gradients.
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
    """Of each stage, by name, leaves in the memory of its trained parameters.

    They have gradients of their own, of which hooks of the parameters hear nothing. Of a parameter
    that has several names, or is in several stages, there is one.
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
    """The trained parameters of stages with the gradients that were left aside for them.

    Args:
        aside: from :func:`leaves_of`; they have no gradients afterwards.
        stages: the same stages.
        keep: whether they keep theirs, and copies are given.
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
    """Inside, autograd saves no activations: no backward can go through what it records."""
    return torch.autograd.graph.saved_tensors_hooks(lambda _: None, _nothing)


def forward(
    stage: Stage, values: Values, numbers: Sequence[Any], states: Values
) -> tuple[list[Any], Recipe]:
    """Run the forward of a micro-batch, and keep what :func:`again` needs of it.

    Args:
        stage: the stage.
        values: its inputs.
        numbers: those of the call.
        states: states of the generators, if it draws random numbers.

    Returns:
        The outputs, and the recipe.
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
    """Run a forward again, with the current weights. Returns its inputs and its outputs.

    Args:
        stage: the stage.
        recipe: what it takes.
        numbers: those of the call.
        aside: see `Call`, of this stage.
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


_one_at_a_time = Lock()
"""Held while a generator's state is read or set. Two threads that do so may wait for ever (torch
2.13): one has the generator's lock, and gives Python's to the other, which keeps that while it
waits for the generator."""


def draw_number(batch: int, call: int) -> int:
    """The number of a call that decides its random numbers.

    Args:
        batch: how many training batches the run has seen before; it is in the checkpoint, so that
            a run that is resumed draws what it would have drawn.
        call: how many differentiable calls this batch has seen before.
    """
    return batch << 16 | call


def microbatch_seed(seed: int, replica: int, draw: int, microbatch: int) -> int:
    """The seed of one micro-batch's generators (64 bits); ``draw`` as by :func:`draw_number`."""
    # a hash: four numbers become one, and neighbours among them get streams that are not related
    text = f"{seed}/{replica}/{draw}/{microbatch}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def random_state(device: torch.device) -> list[Tensor]:
    """The states of the generators that a layer on ``device`` may draw from, as byte tensors.

    They are on the CPU; reading a GPU's generator waits for no kernel.
    """
    with _one_at_a_time:
        states = [torch.get_rng_state()]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        return states


@cache
def state_specs(device: torch.device) -> tuple[TensorSpec, ...]:
    """Shapes and types of the tensors from :func:`random_state`, for a receiver."""
    return tuple(TensorSpec.of(state) for state in random_state(device))


def set_random_state(states: list[Tensor], device: torch.device) -> None:
    """Set the generators to ``states`` from :func:`random_state`."""
    with _one_at_a_time:
        torch.set_rng_state(states[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states[1], device)


@contextmanager
def generators_of_microbatch(seed: int | None, device: torch.device) -> Iterator[None]:
    """Inside, draw from a micro-batch's generators; afterwards the old ones are back.

    Args:
        seed: where the micro-batch's generators start; ``None`` where a state follows.
        device: the device whose generators are meant, beside the CPU's.
    """
    before = random_state(device)
    try:
        if seed is not None:
            with _one_at_a_time:
                torch.manual_seed(seed)
        yield
    finally:
        set_random_state(before, device)
