"""Measure the network between all processes of a group: point-to-point in pairs, and all-reduce.

For ``lightning-hybrid doctor``; a run measures its links itself (``process/device_survey.py``).
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

LARGE_BYTES = 8 * 2**20
"""Size in bytes of the messages that measure the bandwidth, and of the tensor of the all-reduce."""
_SMALL = 8
_MANY = 30
_FEW = 7
_WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median and range of repeated measurements of one quantity.

    Attributes:
        median: the median, in the unit of the measurements.
        least: the smallest measurement.
        most: the largest measurement.
    """

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """The median and range of a list of measurements, which must not be empty."""
        return cls(median=statistics.median(values), least=min(values), most=max(values))


@dataclass(frozen=True, kw_only=True)
class PairProbe:
    """Latency and bandwidth between two ranks, with traffic in one direction at a time.

    Attributes:
        ranks: global ranks: the one that has measured, then the other one.
        latency_s: half the round trip of a message of 8 bytes, in seconds.
        bandwidth_bytes_per_s: bytes per second of messages of `LARGE_BYTES`, without the latency.
    """

    ranks: tuple[int, int]
    latency_s: Spread
    bandwidth_bytes_per_s: Spread


def probe_pair(one: int, other: int, device: torch.device) -> PairProbe | None:
    """Measure the link between two ranks by messages to and fro; all ranks call this together.

    Uses the default group of ``torch.distributed``, which must have been made.

    Args:
        one: global rank of the rank that measures.
        other: global rank of the other rank.
        device: device of this rank; messages travel from its memory to that of the other rank's
            device, and back.

    Returns:
        The measurement on rank `one`; ``None`` on all other ranks.
    """
    rank = dist.get_rank()
    dist.barrier()
    if rank not in (one, other):
        return None
    small = torch.zeros(_SMALL, dtype=torch.uint8, device=device)
    large = torch.zeros(LARGE_BYTES, dtype=torch.uint8, device=device)

    def both_ways(tensor: Tensor) -> Callable[[], None]:
        # NCCL runs operations in the order of the calls: one end must begin with a receive
        def run() -> None:
            if rank == one:
                dist.send(tensor, other)
                dist.recv(tensor, other)
            else:
                dist.recv(tensor, one)
                dist.send(tensor, one)

        return run

    latencies = [s / 2 for s in _times(both_ways(small), _MANY, device)]
    transfers = [s / 2 for s in _times(both_ways(large), _FEW, device)]
    if rank != one:
        return None
    latency = Spread.of(latencies)
    # noise may exceed the transfer on a fast link: at least a tenth is taken to be transfer
    rates = [LARGE_BYTES / max(s - latency.median, s / 10) for s in transfers]
    return PairProbe(ranks=(one, other), latency_s=latency, bandwidth_bytes_per_s=Spread.of(rates))


def probe_all_reduce(device: torch.device) -> Spread:
    """Measure the seconds of an all-reduce of `LARGE_BYTES`; all ranks call this together.

    Uses the default group of ``torch.distributed``, which must have been made.

    Args:
        device: device of this rank, in whose memory the tensor is.
    """
    load = torch.zeros(LARGE_BYTES // 4, dtype=torch.float32, device=device)
    dist.barrier()
    return Spread.of(_times(lambda: dist.all_reduce(load), _FEW, device))


def probe_flops(device: torch.device, width: int = 1024) -> float:
    """Measure the FLOP/s of a float32 matrix product on this rank's device; all ranks call it.

    All ranks measure at the same time, so that ranks on one host slow each other down.

    Args:
        device: the device of this rank.
        width: number of rows and columns of the matrices.

    Returns:
        This rank's FLOP/s, the median of several measurements.
    """
    a, b = (torch.ones(width, width, dtype=torch.float32, device=device) for _ in range(2))
    dist.barrier()
    times = _times(lambda: torch.mm(a, b), _FEW, device)
    return 2 * width**3 / statistics.median(times)


def _times(run: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    times = []
    for _ in range(repeats + _WARM_UP):
        start = time.perf_counter()
        run()
        # operations on a GPU are asynchronous: wait until they have ended
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return times[_WARM_UP:]
