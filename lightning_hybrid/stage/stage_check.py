"""Checks that stages compute what the network that they were cut from computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.errors import StitchError
from lightning_hybrid.graph import Leaf, NetworkGraph, Stage, StageCode, cut_at, make_stages
from lightning_hybrid.remote import empty_like_on, is_deferred, value_of

Result = TypeVar("Result")

_ROUNDED = {torch.float64: 1e-6, torch.float32: 1e-2}
"""By how much two runs on a GPU may differ, as a share of the largest number; in shorter types 5
%."""


def with_room_for(module: nn.Module, device: torch.device) -> torch.device:
    """Choose where to compute a whole network: on this rank's GPU if it has room, else on the CPU.

    There is room if the GPU's free memory is at least twice the size of the parameters and buffers
    that are not on it yet. If ``device`` is no GPU, it is returned.

    Args:
        module: the network.
        device: the device of this rank.
    """
    if device.type != "cuda":
        return device
    away = (t for t in (*module.parameters(), *module.buffers()) if t.device != device)
    size = sum(tensor.nbytes for tensor in away if tensor.layout == torch.strided)
    return device if 2 * size <= torch.cuda.mem_get_info(device)[0] else torch.device("cpu")


def check(
    graph: NetworkGraph,
    codes: Sequence[StageCode],
    leaves: Sequence[Tensor],
    device: torch.device | None = None,
) -> None:
    """Run the captured network and its stages on the same inputs, and compare bit for bit.

    Called on the driver when a network is cut, before ranks get their stages. On a GPU the outputs
    are compared up to rounding, since a GPU does not always add in the same order. Both runs start
    from the same random state and buffers, no backward follows, and what they write to buffers is
    undone. Stages get copies of tensors, as over a link, but slices as they are: a number is
    possibly rounded otherwise if it lies elsewhere in memory.

    Args:
        graph: the captured network.
        codes: its stages.
        leaves: the inputs, from `NetworkGraph.bind`, on the device where the network is.
        device: where to compute, with copies of the weights if they are elsewhere; ``None``: the
            device of the first input.

    Raises:
        StitchError: the outputs differ, or stages fail.
    """
    device = device or next((leaf.device for leaf in leaves), torch.device("cpu"))
    leaves = [
        value if stays_on_cpu(graph, leaf) else value.to(device)
        for leaf, value in zip(graph.leaves, leaves)
    ]
    # 1. The whole and the stages, from the same start, one after the other.
    whole, parts = (make_stages(some, graph.network, device) for some in (cut_at(graph, []), codes))
    expected = _once(graph, whole, leaves, lambda value: value, device)
    try:
        found = _once(graph, parts, leaves, _received, device)
    except Exception as error:
        raise _refusal(graph, f"they fail with {error}") from error
    # 2. Compare all outputs.
    names = [node.name for node in (*graph.tensor_outputs, *graph.scalar_outputs)]
    for name, one, other in zip(names, expected, found, strict=True):
        if (differs := _difference(one, other, exact=device.type == "cpu")) is not None:
            raise _refusal(graph, f"output {name!r} {differs}")


def _refusal(graph: NetworkGraph, what: str) -> StitchError:
    return StitchError(
        f"the stages of {type(graph.network).__name__} do not compute what the network computes: "
        f"{what}. Give other cut points (the strategy's plan=[...]), and please report this "
        "network."
    )


def run(
    graph: NetworkGraph,
    stages: Sequence[Stage],
    leaves: Sequence[Tensor],
    received: Callable[[Any], Any] = lambda value: value,
    tensors: Mapping[str, Tensor] | None = None,
) -> list[Any]:
    """Run the forward of all stages of a network in this process, one after the other.

    Args:
        graph: the captured network.
        stages: its stages, in order.
        leaves: the inputs, from `NetworkGraph.bind`.
        received: called with each input of each stage, a tensor or a number; returns the value that
            the stage gets in its place.
        tensors: parameters and buffers by name; ``None``: the network's own.

    Returns:
        The outputs of the last stage, tensors and numbers.
    """
    numbers = graph.values_of_numbers(graph.sizes(leaves))
    values: list[Any] = list(leaves)
    for stage in stages:
        own = stage.taken()
        taken = [own[name] if tensors is None else tensors[name] for name in own]
        values = stage.run_with(taken, [received(value) for value in values], numbers)
    return values


def _received(value: Any) -> Any:
    """Copy a tensor that a stage has sent, as a link does.

    A slice (a view with gaps, which `clone` would leave out) and a number stay as they are.
    """
    if not isinstance(value, Tensor):
        return value
    copy = value.clone()
    return copy if copy.stride() == value.stride() else value


def _once(
    graph: NetworkGraph,
    stages: Sequence[Stage],
    leaves: Sequence[Tensor],
    received: Callable[[Any], Any],
    device: torch.device,
) -> list[Any]:
    tensors = _copies(stages, device)

    def forward() -> list[Any]:
        grad = torch.set_grad_enabled(graph.differentiable)
        forked = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        with _put_back(graph.network, graph.written), forked, grad:
            found = run(graph, stages, fresh(graph, leaves), received, tensors)
            # (copies: a buffer that is written and returned is put back on leaving)
            return [v.detach().clone() if isinstance(v, Tensor) else v for v in found]

    # no backward follows, so that no activation of the whole network needs to be kept
    return with_saved(forward, lambda _: None, _was_dropped)


def with_saved(
    run: Callable[[], Result], pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> Result:
    """Run code with hooks on the tensors that autograd saves, or without if it fails with them.

    `torch.func` refuses such hooks, and a forward that runs a backward inside needs what was saved.
    In these cases ``run`` is called a second time, without hooks. Returns what ``run`` returns.

    Args:
        run: the code.
        pack: makes of a tensor to save what is saved in its place.
        unpack: makes the tensor of what ``pack`` has returned; may raise a ``RuntimeError`` whose
            text has "saved tensor" to have ``run`` called again.
    """
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return run()
    except RuntimeError as error:
        if "saved tensor" not in str(error):
            raise
    return run()


@contextmanager
def _put_back(network: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Context that undoes at its end what is written inside to parameters and buffers.

    Args:
        network: the network.
        names: names of these parameters and buffers; deferred ones are left out.
    """
    tensors = dict((*network.named_parameters(), *network.named_buffers()))
    written = [tensors[name] for name in names if not is_deferred(tensors[name])]
    with as_they_are():
        kept = [(tensor, tensor.detach().clone()) for tensor in written]
    try:
        yield
    finally:
        with torch.no_grad(), as_they_are():
            for tensor, copy in kept:
                tensor.copy_(copy)


def _was_dropped(_: None) -> Tensor:
    raise RuntimeError("this saved tensor was dropped")


def fresh(graph: NetworkGraph, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Copy the inputs of a graph that the network writes to; return all inputs, in their order.

    Args:
        graph: the captured network.
        leaves: the inputs, from `NetworkGraph.bind`.
    """
    written = {leaf.node for leaf in graph.written_leaves}
    return [
        tensor.detach().clone() if leaf.node in written else tensor
        for leaf, tensor in zip(graph.leaves, leaves)
    ]


def stays_on_cpu(graph: NetworkGraph, leaf: Leaf) -> bool:
    """Whether an input was on the CPU when its network was captured on another device.

    (Its present device says nothing: before a network is cut, it waits on the CPU with its inputs.)
    """
    example = leaf.node.meta.get("example_value")
    return isinstance(example, Tensor) and example.device.type == "cpu" != graph.device.type


def _copies(stages: Sequence[Stage], device: torch.device) -> dict[str, Tensor] | None:
    """Copy the tensors that stages use to ``device``.

    Returns:
        The copies by name; ``None``: all tensors are on ``device`` already, and nothing was copied.
    """
    named = {name: tensor for stage in stages for name, tensor in stage.taken().items()}
    with as_they_are():
        if all(tensor.device == device for tensor in named.values()):
            return None
    return {name: own_copy(tensor, device) for name, tensor in named.items()}


def own_copy(value: Tensor, device: torch.device) -> Tensor:
    """Copy a parameter or buffer (deferred ones, too) to ``device``, into new memory."""
    with as_they_are():
        wanted = value.requires_grad
        copy = value_of(value).detach().to(device, copy=True)
    return copy.requires_grad_(wanted)


def copy_to_measure(value: Tensor, device: torch.device) -> Tensor:
    """Copy a parameter or buffer to ``device``, to measure code that computes with it.

    If the numbers of a parameter are not on this rank (mostly another rank owns it), the copy has
    random numbers.
    """
    if not (is_deferred(value) and isinstance(value, nn.Parameter)) or value.itemsize == 1:
        return own_copy(value, device)
    with as_they_are():
        copy = empty_like_on(value, device)
        copy = _noise(copy) if copy.is_floating_point() else copy.zero_()
        return copy.requires_grad_(value.requires_grad)


_NOISE_ELEMENTS = 2**16


def _noise(tensor: Tensor) -> Tensor:
    """Fill a tensor without gaps with random numbers, and return it.

    The numbers repeat, since drawing takes long on a CPU.
    """
    flat = tensor.as_strided((tensor.numel(),), (1,))
    drawn = flat[:_NOISE_ELEMENTS].normal_(std=0.02)
    for part in flat[_NOISE_ELEMENTS:].split(_NOISE_ELEMENTS):
        part.copy_(drawn[: len(part)])
    return tensor


def _difference(one: Any, other: Any, *, exact: bool) -> str | None:
    """Say in words how a result differs from the right one; ``None``: it does not.

    Args:
        one: the right result, a tensor or a number.
        other: the result to compare.
        exact: whether to compare bit for bit; else up to rounding.
    """
    if not isinstance(one, Tensor):
        same = one == other or (one != one and other != other)
        return None if same else f"is {other} and not {one}"
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"is {tuple(other.shape)} {other.dtype} and not {tuple(one.shape)} {one.dtype}"
    if torch.equal(one, other):
        return None
    wide = torch.complex128 if one.is_complex() else torch.float64
    right, found = one.to(wide), other.to(wide)
    if one.is_floating_point() or one.is_complex():
        share = 0.0 if exact else _ROUNDED.get(one.abs().dtype, 0.05)
        largest = right.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
        if torch.allclose(found, right, rtol=0.0, atol=share * largest, equal_nan=True):
            return None
    return f"differs by up to {(right - found).abs().max().item():.3g}"
