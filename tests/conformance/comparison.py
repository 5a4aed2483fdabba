"""What differs between two nested records of tensors and values."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def differences(
    found: Any, expected: Any, tolerance: float, place: str = "record"
) -> Iterator[str]:
    """One line for each place where two structures differ.

    Numbers may differ by ``tolerance``, absolute and relative; a number is as good as a tensor of
    one element; everything else must be equal.
    """
    if isinstance(found, Tensor | float) and isinstance(expected, Tensor | float):
        yield from _of_tensors(torch.as_tensor(found), torch.as_tensor(expected), tolerance, place)
    elif isinstance(found, Mapping) and isinstance(expected, Mapping):
        if list(found) != list(expected):
            yield f"{place}: {list(found)}, expected {list(expected)}"
        for key in found.keys() & expected.keys():
            yield from differences(found[key], expected[key], tolerance, f"{place}[{key!r}]")
    elif _is_sequence(found) and _is_sequence(expected):
        if len(found) != len(expected):
            yield f"{place}: {len(found)} items, expected {len(expected)}"
        for index, (one, other) in enumerate(zip(found, expected)):
            yield from differences(one, other, tolerance, f"{place}[{index}]")
    elif found != expected:
        yield f"{place}: {found!r}, expected {expected!r}"


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _of_tensors(found: Tensor, expected: Tensor, tolerance: float, place: str) -> Iterator[str]:
    if found.shape != expected.shape:
        yield f"{place}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
        return
    found, expected = found.double(), expected.double()
    if not torch.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True):
        worst = (found - expected).abs().max().item()
        yield f"{place}: off by {worst:.3g}: {_short(found)}, expected {_short(expected)}"


def _short(tensor: Tensor) -> str:
    values = [f"{value:.6g}" for value in tensor.flatten()[:3].tolist()]
    return f"[{', '.join(values)}{', ...' if tensor.numel() > 3 else ''}]"
