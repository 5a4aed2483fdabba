"""Run the partitions of a network on a real micro-batch, and look at the clock.

Nobody notices: what runs are the captured operations on copies of the weights, so buffers,
gradients and generators stay what they are, and no hook runs.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_hybrid.graph import (
    Cuts,
    NetworkGraph,
    NetworkPartition,
    PartitionProfile,
    Profile,
    Stage,
    cut,
    parameter_bytes,
)
from lightning_hybrid.stage import HookWatch, fresh, input_part, own_copy, stays_on_cpu, with_saved

ENOUGH_S = 0.1
"""What has been measured for that long is not repeated: its length is known well enough."""

Clock = Callable[[], float]
Advance = Callable[[int, int], None]
"""Hears how much is done, and how much there is to do."""


def clock_of(device: torch.device) -> Clock:
    """The clock for what runs on a device, in seconds.

    On a CPU with one thread it counts the seconds that this thread has the processor: those do not
    depend on what else the machine does at the moment, so a profile can be kept and used again.
    With more threads, and on accelerators (after their queue has run dry), it is the wall clock.
    """
    if device.type == "cpu":
        return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def dry() -> float:
        torch.accelerator.synchronize(device)
        return time.perf_counter()

    return dry


def measure(
    graph: NetworkGraph,
    partitions: Sequence[NetworkPartition],
    leaves: Sequence[Tensor],
    *,
    repeats: int = 3,
    device: torch.device | None = None,
    advance: Advance | None = None,
) -> Profile:
    """Run each partition, forward and backward, on a real micro-batch.

    The size must be the real one: a time is not proportional to it (on a CPU a convolution of a
    single sample takes a path that is several times slower). Partitions of equal code and sizes
    are measured once.

    Args:
        graph: the captured network.
        partitions: its partitions.
        leaves: the tensors of `NetworkGraph.bind` for one micro-batch.
        repeats: measurements after one that warms up, fewer where they take `ENOUGH_S` together;
            their median counts.
        device: where to measure; by default where the network was captured. Partitions go there one
            by one.
        advance: called before each partition with its number, from 1, and that of all.
    """
    device = device or graph.device
    # layers draw random numbers, which the user's generators must not notice
    forked = [device] if device.type == "cuda" else []
    with (
        torch.inference_mode(False),
        torch.random.fork_rng(devices=forked),
        torch.enable_grad(),
    ):
        try:
            return _measure(graph, partitions, leaves, repeats, device, advance)
        finally:
            if device.type != "cpu":  # the stages, and NCCL, want the memory
                torch.accelerator.empty_cache()


def _measure(
    graph: NetworkGraph,
    partitions: Sequence[NetworkPartition],
    leaves: Sequence[Tensor],
    repeats: int,
    device: torch.device,
    advance: Advance | None,
) -> Profile:
    batch = graph.batch_of(leaves) or 1
    scale = batch / (graph.batch or batch)
    cuts = Cuts(graph)
    numbers = graph.values_of_numbers(graph.sizes(leaves))
    values = [
        value if stays_on_cpu(graph, leaf) else value.to(device)
        for leaf, value in zip(graph.leaves, map(_outside_inference, fresh(graph, leaves)))
    ]
    state = dict((*graph.network.named_parameters(), *graph.network.named_buffers()))
    # most networks repeat a block: each kind is measured once
    known: dict[Hashable, tuple[_Times, int, int]] = {}
    profiles = []
    codes = cut(graph, partitions, range(1, len(partitions)))
    for number, (partition, code) in enumerate(zip(partitions, codes), 1):
        if advance is not None:
            advance(number, len(partitions))
        stage = Stage(code, graph.network, device)
        tensors = [own_copy(state[name], device) for name in code.tensors]
        key = code.code.shape(), code.layers[0] == 0, _sizes((*tensors, *values))
        if key not in known:
            one = _Partition(stage, tensors, values, numbers, clock_of(device))
            known[key] = one.timed(repeats, device)
        times, saved, working = known[key]
        with torch.no_grad():
            values = stage.run_with(tensors, values, numbers)
        output_bytes = sum(value.nbytes for value in values)
        if partition.stop == len(graph.layers):
            output_bytes = round(cuts.bytes(partition.stop) * scale)
        profiles.append(
            PartitionProfile(
                name=partition.name,
                flops=round(partition.flops * scale),
                output_bytes=output_bytes,
                **parameter_bytes(graph.network, partition.parameters),
                activation_bytes=saved,
                working_bytes=working,
                **times._asdict(),
            )
        )
    return Profile(tuple(profiles), batch, device_name(device))


def _outside_inference(leaf: Tensor) -> Tensor:
    """Lightning validates in inference mode, whose tensors no backward may keep."""
    return leaf.clone() if leaf.is_inference() else leaf


def _sizes(tensors: Sequence[Tensor]) -> Hashable:
    return tuple((tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in tensors)


def device_name(device: torch.device) -> str:
    """What a device is called: the model of a GPU, ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


# ---------------------------------------------------------------- one partition


class _Times(NamedTuple):
    """Median seconds; see `PartitionProfile`.

    Attributes:
        forward_s: of a forward.
        backward_input_s: of a backward that only makes the gradients of the inputs.
        backward_weight_s: what the gradients of the parameters add to that.
        input_apart_s: of the input part of a backward that is split; ``None``: it cannot be split.
        weight_apart_s: likewise of its weight part.
    """

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    input_apart_s: float | None = None
    weight_apart_s: float | None = None


def _medians(once: Callable[[], tuple[float, ...] | None], repeats: int) -> list[float]:
    """Of what is measured several times, value by value; empty where there is nothing to see."""
    found: list[tuple[float, ...]] = []
    while len(found) < repeats and sum(map(sum, found)) < ENOUGH_S:
        if (times := once()) is None:
            return []
        found.append(times)
    # a median forgets the one run that something has disturbed
    return [statistics.median(column) for column in zip(*found)]


@dataclass(frozen=True)
class _Partition:
    """A partition that is measured by itself.

    Attributes:
        stage: its code.
        tensors: copies of its parameters and buffers.
        values: what it takes from the partition before it.
        numbers: all numbers of the call.
        clock: tells seconds.
    """

    stage: Stage
    tensors: Sequence[Tensor]
    values: Sequence[Tensor]
    numbers: Sequence[Any]
    clock: Clock

    def timed(self, repeats: int, device: torch.device) -> tuple[_Times, int, int]:
        """Median seconds; bytes held between forward and backward; see `working_bytes`."""
        parameters = [tensor for tensor in self.tensors if tensor.requires_grad]
        held, peak = _Held(self.tensors), PeakMemory(device)
        with_saved(lambda: self._in_one(parameters), held.pack, lambda kept: kept)  # warms up
        saved = held.forget()
        made = sum(t.nbytes for t in parameters) + 2 * sum(v.nbytes for v in self.values)
        working = peak.taken() - saved - made  # gradients are counted elsewhere
        working = working if working >= LITTLE_BYTES else 0
        forwards, backwards = _medians(lambda: self._in_one(parameters), repeats)
        if not parameters or self.stage.layers[0] == 0:  # one kind of gradient alone
            halves = (0.0, backwards) if parameters else (backwards, 0.0, backwards, 0.0)
            return _Times(forwards, *halves), saved, working
        for_inputs = min(_medians(lambda: self._in_one([]), repeats)[1], backwards)
        apart = _medians(self._in_parts, repeats)
        return _Times(forwards, for_inputs, backwards - for_inputs, *apart), saved, working

    def _forward(self) -> tuple[float, list[Tensor], list[Any]]:
        """Seconds of a forward, the inputs that want gradients, and what it returns."""
        inputs = [value.detach() for value in self.values]
        if self.stage.layers[0] > 0:  # nobody wants the gradients of the network's own inputs
            inputs = [v.requires_grad_(v.is_floating_point()) for v in inputs]
        start = self.clock()
        outputs = self.stage.run_with(self.tensors, inputs, self.numbers)
        forward_s = self.clock() - start
        return forward_s, [value for value in inputs if value.requires_grad], outputs

    def _in_one(self, parameters: Sequence[Tensor]) -> tuple[float, float]:
        """Seconds of one forward, and of one backward for the inputs and these parameters."""
        forward_s, wanted, outputs = self._forward()
        results, needed = _results(outputs), [*wanted, *parameters]
        if not results or not needed:
            return forward_s, 0.0
        ones = [torch.ones_like(result) for result in results]
        start = self.clock()
        # an input may have no way to the outputs
        torch.autograd.grad(results, needed, ones, allow_unused=True)
        return forward_s, self.clock() - start

    def _in_parts(self) -> tuple[float, float] | None:
        """Seconds of the two parts of a backward; None: it cannot be split."""
        if self.stage.checkpointed:  # would be computed again for each part
            return None
        with HookWatch() as watch:
            _, wanted, outputs = self._forward()
        results = _results(outputs)
        if watch.seen or not results or not wanted:
            return None
        ones = [torch.ones_like(result) for result in results]
        start = self.clock()
        parts = input_part(results, ones, wanted)
        between = self.clock()
        if parts is None:
            return None
        parts[1].run()
        end = self.clock()
        for tensor in self.tensors:
            tensor.grad = None
        return between - start, end - between


def _results(outputs: Sequence[Any]) -> list[Tensor]:
    """What a backward begins at; a tensor that only passes through has no work to do."""
    return [
        o for o in outputs if isinstance(o, Tensor) and o.requires_grad and o.grad_fn is not None
    ]


class _Held:
    """Adds up the memory of the tensors that autograd keeps, parameters left out."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        # an address is only a name while its owner lives
        self._kept = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in known}
        self._bytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # autograd saves views, and several of one storage hold it once
        if storage.data_ptr() not in self._kept:
            self._kept[storage.data_ptr()] = storage
            self._bytes += storage.nbytes()
        return tensor

    def forget(self) -> int:
        """Let go of the tensors. Returns how many bytes they have."""
        self._kept.clear()
        return self._bytes


# ---------------------------------------------------------------- working memory

# What operations take for themselves while they run, such as the columns of a convolution: kernels
# allocate it and give it back before they return, so no tensor of a graph shows it.

LITTLE_BYTES = 8 * 2**20
"""What a process may take with anything that it does first."""
_PROCESS = Path("/proc/self")


class PeakMemory:
    """The most that a device, or on Linux this process, has taken since this was made.

    Args:
        device: where something follows.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._known = device, True
        try:
            self._reset()
        except (OSError, RuntimeError):  # no Linux; an allocator that does not count
            self._known = False
        self._before = self._most()

    def _reset(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self._device)
            return
        # memory that was freed, and not given back, would be taken again unseen
        with suppress(AttributeError, OSError):  # of glibc
            ctypes.CDLL(None).malloc_trim(0)
        (_PROCESS / "clear_refs").write_text("5")  # the most is what there is now

    def taken(self) -> int:
        """Bytes beyond what there was at the beginning; 0 where the system does not say."""
        return max(0, self._most() - self._before)

    def _most(self) -> int:
        if not self._known:
            return 0
        if self._device.type != "cpu":
            return torch.accelerator.max_memory_allocated(self._device)
        lines = (_PROCESS / "status").read_text().splitlines()
        fields = (line.split() for line in lines if line.startswith("VmHWM:"))
        return next((int(size) * 1024 for _, size, _ in fields), 0)
