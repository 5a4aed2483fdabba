"""Recomputation of activations: a forward that keeps its inputs alone, and runs again when needed.

When its backward comes, the forward runs again, draws the same random numbers as before, and writes
to copies of the buffers that it has written before. Only memory and time differ from a run without
recomputation.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid._torch.autograd import own_saved_tensors
from lightning_hybrid.graph import Stage


@dataclass(frozen=True)
class Recipe:
    """What is kept of the forward of a micro-batch, to run it again in the backward.

    Attributes:
        values: the inputs of the stage.
        states: states of the random generators before the forward (from `random_state`); empty if
            the stage draws no random numbers.
        buffers: by name, copies of the buffers that the forward writes, made before it.
    """

    values: list[Tensor]
    states: list[Tensor]
    buffers: dict[str, Tensor]


def saving_nothing() -> AbstractContextManager[Any]:
    """Context in which autograd saves no activations: a backward through what it records fails."""
    return torch.autograd.graph.saved_tensors_hooks(lambda _: None, _nothing)


def forward(
    stage: Stage, values: list[Tensor], numbers: Sequence[Any], states: list[Tensor]
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
) -> tuple[list[Tensor], list[Any]]:
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
