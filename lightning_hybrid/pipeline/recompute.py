"""Activation recomputation: a forward keeps its inputs, and runs again when its backward comes.

It then draws the random numbers that it has drawn, and writes to copies of the buffers that it has
written, so that nothing but memory and time is other than without.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid._torch.autograd import own_saved_tensors
from lightning_hybrid.network import Stage
from lightning_hybrid.pipeline.calls import Recipe, Values


def saving_nothing() -> AbstractContextManager[Any]:
    """Inside, autograd keeps no activations: what is recorded can't be gone back through."""
    return torch.autograd.graph.saved_tensors_hooks(lambda _: None, _nothing)


def forward(
    stage: Stage, values: Values, numbers: Sequence[Any], states: Values
) -> tuple[list[Any], Recipe]:
    """Run the forward of a micro-batch, and keep what :func:`again` needs of it.

    Args:
        stage: the stage.
        values: its inputs.
        numbers: those of the call.
        states: of the generators, if it draws random numbers.

    Returns:
        The outputs, and the recipe.
    """
    buffers = {
        name: value.detach().clone()
        for name, value in stage.taken().items()
        if name in stage.written
    }
    # a stage may write to an input that needs no gradient
    kept = [value if value.requires_grad else value.clone() for value in values]
    with torch.enable_grad(), saving_nothing():
        outputs = stage(values, numbers)
    return outputs, Recipe(kept, states, buffers)


def again(stage: Stage, recipe: Recipe, numbers: Sequence[Any]) -> tuple[Values, list[Any]]:
    """Run a forward again, with the weights of now. Returns its inputs and its outputs."""
    buffers = {name: value.clone() for name, value in recipe.buffers.items()}
    # the recipe stays as it is: a backward with `retain_graph` runs it once more
    values = [value if value.requires_grad else value.clone() for value in recipe.values]
    with torch.enable_grad(), own_saved_tensors():
        outputs = stage.run_with([*(stage.taken() | buffers).values()], values, numbers)
    return values, outputs


def _nothing(_: None) -> Tensor:
    raise AssertionError("a forward that runs again keeps nothing")
