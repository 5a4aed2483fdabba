"""Measure the time and memory that each partition of a network takes, on a real micro-batch.

The user's state does not change: the captured operations run on copies of the weights, so buffers,
gradients and random generators stay what they are, and no hook runs.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lightning_hybrid.graph import (
    Cuts,
    NetworkGraph,
    NetworkPartition,
    Stage,
    cut,
)
from lightning_hybrid.planning import PartitionTable
from lightning_hybrid.profiling.memory_free import give_back_memory
from lightning_hybrid.profiling.network_table import table_of
from lightning_hybrid.stage import copy_to_measure, fresh, input_part, stays_on_cpu, with_saved

ENOUGH_S = 0.1
"""Seconds after which a measurement is not repeated: so long a time is known well enough."""

ROUNDS_ON_A_GPU = 10
"""Largest number of measurements on a GPU. They are queued one after the other without a wait, so
that its queue does not run dry."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Moment:
    """The moment at which a GPU has finished all work that was queued so far.

    Subtract an earlier moment to get the time between both, a `Lapse`.

    Attributes:
        event: the event in the queue of the GPU that marks the moment.
    """

    event: torch.cuda.Event

    def __sub__(self, earlier: Moment) -> Lapse:
        return Lapse(earlier.event, self.event)


@dataclass(frozen=True)
class Lapse:
    """The time between two moments of a GPU.

    `float(lapse)` waits until the GPU has reached the second moment, and gives seconds.

    Attributes:
        begin: the event of the first moment.
        end: the event of the second moment.
    """

    begin: torch.cuda.Event
    end: torch.cuda.Event

    def __float__(self) -> float:
        self.end.synchronize()
        milliseconds: float = self.begin.elapsed_time(self.end)
        return milliseconds / 1e3


def _moment(device: torch.device) -> Moment:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return Moment(event)


def clock_of(device: torch.device) -> Clock:
    """Choose the function that reads the time in seconds, for measuring work on a device.

    On a CPU with one thread it reads the processor time of this thread, which does not depend on
    other work of the machine, so that a profile can be kept and used again. With more threads it
    reads the wall clock. On accelerators it waits until all queued operations have ended, then
    reads the wall clock.
    """
    if device.type == "cpu":
        return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def dry() -> float:
        """Wait until the device's queue is empty, then read the wall clock, in seconds."""
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
) -> PartitionTable:
    """Measure the forward and backward of each partition on a real micro-batch.

    The micro-batch must have its real size, since times are not proportional to it (on a CPU a
    convolution of a single sample takes a path that is several times slower). Partitions of equal
    code and sizes are measured once.

    Args:
        graph: the captured network.
        partitions: its partitions, in order.
        leaves: input tensors of one micro-batch, as `NetworkGraph.bind` gives them.
        repeats: number of measurements after a warm-up, of which the median is taken; fewer if they
            take more than `ENOUGH_S` together. (On a GPU there are `ROUNDS_ON_A_GPU`, between
            events of its queue, so that times are the device's and not the host's.)
        device: device to measure on; None: the network's. Partitions are copied there one by one.

    Returns:
        The table of the partitions, without optimizer state.
    """
    device = device or graph.device
    # layers draw random numbers: the user's generators are put back
    forked = [device] if device.type == "cuda" else []
    with (
        torch.inference_mode(False),
        torch.random.fork_rng(devices=forked),
        torch.enable_grad(),
    ):
        try:
            return _measure(graph, partitions, leaves, repeats, device)
        finally:
            if device.type != "cpu":  # for the stages and NCCL
                torch.accelerator.empty_cache()


def _measure(
    graph: NetworkGraph,
    partitions: Sequence[NetworkPartition],
    leaves: Sequence[Tensor],
    repeats: int,
    device: torch.device,
) -> PartitionTable:
    batch = graph.batch_of(leaves) or 1
    scale = batch / (graph.batch or batch)
    cuts = Cuts(graph)
    numbers = graph.values_of_numbers(graph.sizes(leaves))
    values = [
        value if stays_on_cpu(graph, leaf) else value.to(device)
        for leaf, value in zip(graph.leaves, map(_outside_inference, fresh(graph, leaves)))
    ]
    state = dict((*graph.network.named_parameters(), *graph.network.named_buffers()))
    # results and computed outputs by code and sizes: most networks repeat a block
    known: dict[Hashable, tuple[dict[str, Any], list[Any]]] = {}
    rows, differentiable = [], False
    codes = cut(graph, partitions, range(1, len(partitions)))
    for partition, code in zip(partitions, codes):
        stage, own = Stage(code, graph.network, device), [state[name] for name in code.tensors]
        # (activations that a partition passes on make no difference: a Llama's blocks are equal,
        # while more and more keys for its cache cross the cuts)
        inputs, given = [*own, *values], range(len(own), len(own) + len(values))
        passed_on = [number if number in given else None for number in code.code.passed_on()]
        used = [inputs[number] for number in code.code.used_inputs() if number < len(inputs)]
        trained_before = differentiable
        key = code.code.shape(), passed_on.count(None), trained_before, _sizes(used)
        differentiable |= any(tensor.requires_grad for tensor in own)
        if key not in known:
            tensors = [copy_to_measure(tensor, device) for tensor in own]
            clock = partial(_moment, device) if device.type == "cuda" else clock_of(device)
            one = _Partition(stage, tensors, values, numbers, clock, trained_before)
            times = one.timed(repeats, device)
            with torch.no_grad():
                results = zip(stage.run_with(tensors, values, numbers), passed_on)
                known[key] = times, [value for value, number in results if number is None]
        times, computed = known[key]
        new = iter(computed)
        values = [next(new) if number is None else inputs[number] for number in passed_on]
        output_bytes = sum(value.nbytes for value in values)
        if partition.stop == len(graph.layers):
            output_bytes = round(cuts.bytes(partition.stop) * scale)
        rows.append({**times, "output_bytes": output_bytes})
    return table_of(graph, partitions, rows, batch, device_name(device))


def _outside_inference(leaf: Tensor) -> Tensor:
    """Copy a tensor that was made in inference mode, since autograd cannot save such a tensor.

    Other tensors are returned as they are.
    """
    return leaf.clone() if leaf.is_inference() else leaf


def _sizes(tensors: Sequence[Tensor]) -> Hashable:
    return tuple((tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in tensors)


def device_name(device: torch.device) -> str:
    """Name a device: the model of a GPU, or ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


# ---------------------------------------------------------------- one partition


Times = tuple[float | Lapse, ...]


def _medians(once: Callable[[], Times | None], repeats: int) -> list[float]:
    """Call ``once`` several times, and take the median of each time that it returns.

    Args:
        once: function that measures, and returns a tuple of times, in seconds or as a `Lapse`; or
            None, if they cannot be measured.
        repeats: largest number of measurements on a CPU; fewer after `ENOUGH_S`.

    Returns:
        The medians in seconds, in the order of the tuple; empty if ``once`` returns None.
    """
    first = once()
    if first is None:
        return []
    found = [_seconds(first)]
    if any(isinstance(time, Lapse) for time in first):
        # no wait from here on: a queue that runs dry would add the time of a launch to each
        rounds = min(ROUNDS_ON_A_GPU, math.ceil(ENOUGH_S / max(sum(found[0]), 1e-9)))
        queued = [once() for _ in range(rounds - 1)]
        found += [_seconds(times) for times in queued if times is not None]
    while len(found) < repeats and sum(map(sum, found)) < ENOUGH_S:
        times = once()
        if times is None:
            return []
        found.append(_seconds(times))
    # the median is not changed by one run that other work has disturbed
    return [statistics.median(column) for column in zip(*found)]


def _seconds(times: Times) -> list[float]:
    return [float(time) for time in times]


@dataclass(frozen=True)
class _Partition:
    """A partition with all that is needed to run it by itself.

    Attributes:
        stage: the partition as a stage.
        tensors: copies of its parameters and buffers.
        values: what crosses the cut before it: its input activations, in order.
        numbers: values of the graph's inputs that are Python numbers, as `Stage` takes them.
        clock: function that reads the time, in seconds or as a `Moment`.
        differentiable: whether an earlier partition is trained, so that a backward computes
            gradients of the inputs for it. (The network's own inputs get no gradients.)
    """

    stage: Stage
    tensors: Sequence[Tensor]
    values: Sequence[Tensor]
    numbers: Sequence[Any]
    clock: Callable[[], Any]
    differentiable: bool

    def timed(self, repeats: int, device: torch.device) -> dict[str, Any]:
        """Measure the partition: median times and sizes, by their names in a `PartitionTable`.

        Args:
            repeats: number of measurements on a CPU.
            device: device that the partition is on.
        """
        parameters = [tensor for tensor in self.tensors if tensor.requires_grad]
        held, peak = _SavedMemory(self.tensors), PeakMemory(device)
        with_saved(lambda: self._in_one(parameters), held.pack, lambda kept: kept)  # warms up
        saved = held.forget()
        made = sum(t.nbytes for t in parameters) + 2 * sum(v.nbytes for v in self.values)
        working = peak.taken() - saved - made  # gradients are counted elsewhere
        working = working if working >= LITTLE_BYTES else 0
        forwards, backwards = _medians(lambda: self._in_one(parameters), repeats)
        # of a backward that cannot be split, the input part is the whole
        apart: Sequence[float | None] = (backwards, None)
        if not parameters:
            apart = backwards, 0.0
        elif self.differentiable:
            apart = _medians(self._in_parts, repeats) or apart
        return {
            "forward_s": forwards,
            "backward_s": backwards,
            "input_part_s": apart[0],
            "weight_part_s": apart[1],
            "activation_bytes": saved,
            "working_bytes": working,
        }

    def _forward(self) -> tuple[float | Lapse, list[Tensor], list[Any]]:
        """Run a forward.

        Returns:
            Its time, in seconds or as a `Lapse`; the inputs that require gradients; and the
            outputs, as `Stage.run_with` returns them.
        """
        inputs = [value.detach() for value in self.values]
        if self.differentiable:
            inputs = [v.requires_grad_(v.is_floating_point()) for v in inputs]
        start = self.clock()
        outputs = self.stage.run_with(self.tensors, inputs, self.numbers)
        forward_s = self.clock() - start
        return forward_s, [value for value in inputs if value.requires_grad], outputs

    def _in_one(self, parameters: Sequence[Tensor]) -> Times:
        """Run a forward, and a backward as one operation.

        Args:
            parameters: parameters whose gradients the backward computes, beside those of the
                inputs.

        Returns:
            The times of the forward and of the backward, in seconds or as a `Lapse`; 0 for a
            backward that computes nothing.
        """
        forward_s, wanted, outputs = self._forward()
        results, needed = _results(outputs), [*wanted, *parameters]
        if not results or not needed:
            return forward_s, 0.0
        ones = [torch.ones_like(result) for result in results]
        start = self.clock()
        # possibly an input does not contribute to the outputs
        torch.autograd.grad(results, needed, ones, allow_unused=True)
        return forward_s, self.clock() - start

    def _in_parts(self) -> Times | None:
        """Run a forward, and a backward in two parts.

        Returns:
            The times of the input part and of the weight part, in seconds or as a `Lapse`; None:
            the backward cannot be split.
        """
        if self.stage.checkpointed:  # it would be recomputed for each part
            return None
        _, wanted, outputs = self._forward()
        results = _results(outputs)
        if not results or not wanted:
            return None
        ones = [torch.ones_like(result) for result in results]
        roots = [get_gradient_edge(result) for result in results]
        start = self.clock()
        parts = input_part(roots, ones, wanted)
        between = self.clock()
        if parts is None:
            return None
        parts[1].run()
        end = self.clock()
        for tensor in self.tensors:
            tensor.grad = None
        return between - start, end - between


def _results(outputs: Sequence[Any]) -> list[Tensor]:
    """Choose the outputs at which a backward begins: tensors that the partition has computed."""
    return [
        o for o in outputs if isinstance(o, Tensor) and o.requires_grad and o.grad_fn is not None
    ]


class _SavedMemory:
    """Adds up the bytes of the tensors that autograd saves for the backward.

    `pack` is a hook for saved tensors: autograd calls it with each tensor that it saves.

    Args:
        known: tensors that do not count, such as parameters.
    """

    def __init__(self, known: Sequence[Tensor]) -> None:
        # the storages are kept alive, since an address may be used again when its owner is freed
        self._kept = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in known}
        self._bytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # several saved views of one storage count once
        if storage.data_ptr() not in self._kept:
            self._kept[storage.data_ptr()] = storage
            self._bytes += storage.nbytes()
        return tensor

    def forget(self) -> int:
        """Release the saved tensors, and return their size in bytes."""
        self._kept.clear()
        return self._bytes


# ---------------------------------------------------------------- working memory

# Memory that operations use while they run, such as the columns of a convolution: kernels allocate
# and free it before they return, so no tensor of a graph shows it.

LITTLE_BYTES = 8 * 2**20
"""Working memory of fewer bytes counts as none: a process may take as much for anything that it
does for the first time."""
_PROCESS = Path("/proc/self")


class PeakMemory:
    """Watches the peak of memory in use, from when this object is made.

    On a GPU it is the memory of this process's tensors there, on a CPU under Linux that of the
    process.

    Args:
        device: device on which the watched operations run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known = True
        try:
            self._reset()
        except (OSError, RuntimeError):  # not Linux; or an allocator that does not count
            self._known = False
        self._before = self._most()

    def _reset(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self._device)
            return
        give_back_memory()  # used again, it would not count
        (_PROCESS / "clear_refs").write_text("5")  # resets the peak to the memory in use now

    def taken(self) -> int:
        """Bytes of the peak beyond the memory in use at the beginning; 0 if it is not known."""
        return max(0, self._most() - self._before)

    def _most(self) -> int:
        if not self._known:
            return 0
        if self._device.type != "cpu":
            return torch.accelerator.max_memory_allocated(self._device)
        lines = (_PROCESS / "status").read_text().splitlines()
        fields = (line.split() for line in lines if line.startswith("VmHWM:"))
        return next((int(size) * 1024 for _, size, _ in fields), 0)
