"""Functions that TorchDynamo does not follow, written as Python that it does.

They take the place of the originals in captured code alone (`torch.compiler.substitute_in_graph`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


@torch.compiler.substitute_in_graph(pow, can_constant_fold_through=True)
def _pow(base: Any, exp: Any, mod: Any = None) -> Any:
    """``pow(x, 2)``, which TorchDynamo knows as ``x ** 2`` only."""
    return operator.pow(base, exp) if mod is None else operator.pow(base, exp) % mod


@torch.compiler.substitute_in_graph(checkpoint_sequential, skip_signature_check=True)
def _checkpoint_sequential(
    functions: Any,
    segments: Any,
    input: Any,
    use_reentrant: Any = True,
    **options: Any,
) -> Any:
    """Each segment but the last in a checkpointed region of its own, as torch has it."""
    parts = list(functions.children()) if isinstance(functions, nn.Sequential) else list(functions)

    def run_from(start: int, stop: int) -> Callable[[Any], Any]:
        def run(value: Any) -> Any:
            for function in parts[start:stop]:
                value = function(value)
            return value

        return run

    size, start = len(parts) // segments, 0
    for _ in range(segments - 1):
        input = checkpoint(
            run_from(start, start + size),
            input,
            use_reentrant=use_reentrant,
            **options,
        )
        start += size
    return run_from(start, len(parts))(input)
