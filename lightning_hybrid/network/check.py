"""Check stages against the network that they were cut from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.errors import StitchError
from lightning_hybrid.network.effects import untouched
from lightning_hybrid.network.graph import NetworkGraph
from lightning_hybrid.network.stage import Stage
from lightning_hybrid.network.structure import rebuild, spelled, tensors_in

Trail = list[tuple[str, tuple[float, ...]]]
"""For each call of a module: its name and a few sums over what it returned."""


def check(
    graph: NetworkGraph,
    stages: Sequence[Stage],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Run the network and its stages on the same inputs and compare bit for bit.

    Both start from the same random state and the same buffers, without gradients, in the mode that
    the network is in; nothing of it remains, except that hooks on inner modules have run. The
    network's own ``forward`` is called, so hooks of the network itself do not run.

    Raises:
        StitchError: the outputs differ; names the output and the first module that differs.
    """
    kwargs = dict(kwargs or {})
    leaves = graph.bind(args, kwargs)

    def whole() -> Any:
        return graph.network.forward(*args, **kwargs)

    def stitched() -> Any:
        return graph.pack(run(stages, leaves))

    outputs = [_once(graph.network, call) for call in (whole, stitched)]
    expected, found = (list(tensors_in(output)) for output in outputs)
    paths = [path for path, _ in expected]
    if paths != [path for path, _ in found]:
        raise StitchError(
            f"the network returns {type(outputs[0]).__name__} with {len(expected)} tensors, "
            f"the stages {type(outputs[1]).__name__} with {len(found)}"
        )
    for path, one, other in zip(paths, (t for _, t in expected), (t for _, t in found)):
        if not _same_bits(one, other):
            raise StitchError(
                f"the stages do not compute what the network computes: output{spelled(path)} "
                f"{_difference(one, other)}; {_first_module(graph, whole, stitched)}. Its code "
                "probably depends on something that tracing cannot see; register a hook on it or "
                "move that code into a sub-module of its own to keep it as one layer"
            )


def splits_along_batch(
    graph: NetworkGraph,
    network: nn.Module | Sequence[Stage],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    microbatches: int = 2,
) -> bool:
    """Whether, in evaluation, micro-batches one after the other give what the whole batch gives.

    False when an output's first dimension is not the batch's, or when the values differ by more
    than rounding: by the square root of the machine precision, relative to the largest value.
    Leaves no trace, except that hooks on inner modules have run.

    Args:
        graph: the traced network.
        network: the network itself, or its stages.
        args: arguments of a call.
        kwargs: its keyword arguments.
        microbatches: number of parts, as in `torch.Tensor.chunk`.
    """
    leaves = graph.bind(args, dict(kwargs or {}))
    batch = graph.batch_of(leaves)
    if batch is None:
        return False
    call = _runner(network, args, dict(kwargs or {}))

    def evaluated(part: list[Tensor]) -> list[Tensor]:
        for module in graph.network.modules():
            module.training = False
        return [value for _, value in tensors_in(call(part))]

    whole = _once(graph.network, lambda: evaluated(leaves))
    if any(value.dim() == 0 or value.shape[0] != batch for value in whole):
        return False
    parts = graph.split(leaves, microbatches)
    outputs = [_once(graph.network, partial(evaluated, part)) for part in parts]
    if any(v.dim() == 0 for output in outputs for v in output) or {*map(len, outputs)} != {
        len(whole)
    }:
        return False
    try:
        return all(_close(a, torch.cat(b)) for a, b in zip(whole, zip(*outputs)))
    except RuntimeError:  # parts that cannot be joined
        return False


def run(stages: Sequence[Stage], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Run stages one after the other."""
    values = list(leaves)
    for stage in stages:
        values = stage(values)
    return values


def _runner(
    network: nn.Module | Sequence[Stage], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[list[Tensor]], Any]:
    if not isinstance(network, nn.Module):
        return lambda leaves: run(network, leaves)

    def call(leaves: list[Tensor]) -> Any:
        rest = iter(leaves)
        new_args, new_kwargs = rebuild(
            (args, kwargs), lambda v: next(rest) if isinstance(v, Tensor) else v
        )
        return network.forward(*new_args, **new_kwargs)

    return call


def _once(network: nn.Module, call: Callable[[], Any]) -> Any:
    with untouched(network), torch.no_grad():
        return call()


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    equal = one == other
    if one.is_floating_point() or one.is_complex():
        equal |= one.isnan() & other.isnan()
    return bool(equal.all())


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    tolerance = torch.finfo(one.dtype).eps ** 0.5
    scale = one.abs().max().item() if one.numel() else 0.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _difference(one: Tensor, other: Tensor) -> str:
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"is {tuple(other.shape)} {other.dtype} and not {tuple(one.shape)} {one.dtype}"
    largest = (one.double() - other.double()).abs().max().item()
    return f"differs by up to {largest:.3g}"


def _first_module(
    graph: NetworkGraph, whole: Callable[[], Any], stitched: Callable[[], Any]
) -> str:
    """Run both once more and say which module's output is the first to differ."""
    trails = []
    for call in (whole, stitched):
        with _followed(graph) as trail:
            _once(graph.network, call)
        trails.append(trail)
    for (name, sums), (other, other_sums) in zip(*trails):
        if name != other:
            return f"the network calls module {name!r} where the stages call {other!r}"
        if str(sums) != str(other_sums):  # as text: NaN equals itself
            return f"the first module whose output differs is {name!r}"
    return "no module's output differs, so the code between modules does"


@contextlib.contextmanager
def _followed(graph: NetworkGraph) -> Iterator[Trail]:
    """Note down what each module that is a layer returns."""
    trail: Trail = []

    def note(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        sums = [v.double() for _, v in tensors_in(output) if not v.is_complex()]
        trail.append((name, tuple(s for v in sums for s in (v.sum().item(), v.norm().item()))))

    names = dict.fromkeys(layer.module for layer in graph.layers if layer.is_module)
    handles = [
        graph.network.get_submodule(name).register_forward_hook(partial(note, name))
        for name in names
    ]
    try:
        yield trail
    finally:
        for handle in handles:
            handle.remove()
