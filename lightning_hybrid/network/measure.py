"""Run the partitions of a network on a real micro-batch, and look at the clock.

Nobody notices: buffers, modes, generators and gradients are afterwards what they were, and no hook
runs, neither of modules nor of parameters.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import torch
from torch import Tensor, nn

from lightning_hybrid.compat import hooks_silenced
from lightning_hybrid.network.cuts import Cuts
from lightning_hybrid.network.deferred import made
from lightning_hybrid.network.effects import untouched
from lightning_hybrid.network.graph import NetworkGraph
from lightning_hybrid.network.partition import NetworkPartition
from lightning_hybrid.network.profile import PartitionProfile, Profile, parameter_bytes
from lightning_hybrid.network.stage import Stage, cut

Clock = Callable[[], float]


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
) -> Profile:
    """Run each partition, forward and backward, on a real micro-batch.

    The size must be the real one: a time is not proportional to it (on a CPU a convolution of a
    single sample takes a path that is several times slower). The network is measured as it trains,
    also when the first call is a validation's, so that all runs get the same numbers.

    Args:
        graph: the traced network.
        partitions: its partitions.
        leaves: the tensors of `NetworkGraph.bind` for one micro-batch.
        repeats: measurements after one that warms up; their median counts.
        device: where to measure; by default where the inputs are. Partitions go there one by one.
    """
    device = device or next((leaf.device for leaf in leaves), torch.device("cpu"))
    with _unnoticed(graph.network, device):
        if graph.training is None and not all(m.training for m in graph.network.modules()):
            # it may not be able to train on these: a norm on a single sample, say
            with suppress(Exception), _training(graph.network):
                return _measure(graph, partitions, leaves, repeats, device)
        return _measure(graph, partitions, leaves, repeats, device)


def _measure(
    graph: NetworkGraph,
    partitions: Sequence[NetworkPartition],
    leaves: Sequence[Tensor],
    repeats: int,
    device: torch.device,
) -> Profile:
    batch = graph.batch_of(leaves) or 1
    scale = batch / (graph.batch or batch)
    cuts = Cuts(graph)
    # Lightning validates in inference mode, whose tensors no backward may keep
    values = [leaf.clone() if leaf.is_inference() else leaf for leaf in leaves]
    values = [value.to(device) for value in values]
    profiles = []
    for partition, stage in zip(partitions, cut(graph, partitions, range(1, len(partitions)))):
        with made([*stage.parameters(), *stage.buffers()]):
            at_home = [(p, p.data) for p in stage.parameters()]
            stage.move(device)
            own = [p for p in stage.parameters() if p.requires_grad]
            times, saved = _timed(stage, values, own, repeats, device)
            with torch.no_grad():
                values = stage(values)
            for parameter, data in at_home:
                parameter.data = data
        is_last = partition.stop == len(graph.layers)
        profiles.append(
            PartitionProfile(
                partition.name,
                round(partition.flops * scale),
                *times,
                round(cuts.bytes(partition.stop) * scale)
                if is_last
                else sum(v.nbytes for v in values),
                *parameter_bytes(graph.network, partition.parameters),
                saved,
            )
        )
    return Profile(tuple(profiles), batch, device_name(device))


def device_name(device: torch.device) -> str:
    """What a device is called: the model of a GPU, ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


# ---------------------------------------------------------------- one partition


def _timed(
    stage: Stage,
    values: Sequence[Tensor],
    parameters: Sequence[Tensor],
    repeats: int,
    device: torch.device,
) -> tuple[tuple[float, float, float], int]:
    """Median seconds forward, backward for inputs, and more for weights; bytes held between."""
    clock = clock_of(device)
    held = _Held([*stage.parameters(), *stage.buffers()])
    with torch.autograd.graph.saved_tensors_hooks(held.pack, lambda kept: kept):
        _round(stage, values, parameters, clock)  # warms up
    saved = held.forget()
    rounds = [_round(stage, values, parameters, clock) for _ in range(repeats)]
    forwards, backwards = (statistics.median(column) for column in zip(*rounds))
    if not parameters or stage.layers[0] == 0:  # one kind of gradient alone
        halves = (0.0, backwards) if parameters else (backwards, 0.0)
        return (forwards, *halves), saved
    alone = [_round(stage, values, [], clock)[1] for _ in range(repeats)]
    for_inputs = min(statistics.median(alone), backwards)
    return (forwards, for_inputs, backwards - for_inputs), saved


def _round(
    stage: Stage, values: Sequence[Tensor], parameters: Sequence[Tensor], clock: Clock
) -> tuple[float, float]:
    """Seconds of one forward, and of one backward for the inputs and these parameters."""
    is_first = stage.layers[0] == 0
    inputs = [value.detach() for value in values]
    wanted = [v.requires_grad_() for v in inputs if v.is_floating_point() and not is_first]
    start = clock()
    outputs = stage(inputs)
    forward_s = clock() - start
    # a tensor that only passes through has no work to do
    results = [o for o in outputs if o.requires_grad and o.grad_fn is not None]
    needed = [*wanted, *parameters]
    if not results or not needed:
        return forward_s, 0.0
    ones = [torch.ones_like(o) for o in results]
    start = clock()
    torch.autograd.grad(results, needed, ones, allow_unused=True)
    return forward_s, clock() - start


class _Held:
    """Adds up the memory of the tensors that autograd keeps, parameters left out."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        # an address is only a name while its owner lives
        self._kept = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in known}
        self._bytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._kept:
            self._kept[storage.data_ptr()] = storage
            self._bytes += storage.nbytes()
        return tensor

    def forget(self) -> int:
        """Let go of them. Returns their bytes."""
        self._kept.clear()
        return self._bytes


# ---------------------------------------------------------------- nobody notices


@contextmanager
def _unnoticed(network: nn.Module, device: torch.device) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        if device.type == "cuda":  # the network may still be on the CPU
            stack.enter_context(torch.random.fork_rng(devices=[device]))
        stack.enter_context(untouched(network))
        stack.enter_context(hooks_silenced(network))
        stack.enter_context(_other_parameters(network))
        stack.enter_context(torch.enable_grad())
        yield


@contextmanager
def _other_parameters(network: nn.Module) -> Iterator[None]:
    """Parameters with the same memory and neither hooks nor gradients; tied ones stay tied."""
    others: dict[int, nn.Parameter] = {}
    own = [
        (module, name, parameter)
        for module in network.modules()
        if not isinstance(module, torch.jit.ScriptModule)  # their parameters are theirs
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    for _, _, parameter in own:
        if id(parameter) not in others:
            others[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
    for module, name, parameter in own:
        setattr(module, name, others[id(parameter)])
    try:
        yield
    finally:
        for module, name, parameter in own:
            setattr(module, name, parameter)


@contextmanager
def _training(network: nn.Module) -> Iterator[None]:
    """All modules in training, by the flag alone: the user's ``train`` is not called."""
    flags = [(module, module.training) for module in network.modules()]
    for module, _ in flags:
        module.training = True
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
