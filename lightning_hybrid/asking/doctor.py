"""Measure the devices and links of a machine or cluster, and compare its processes."""

import os
import platform
import shutil
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, combinations, pairwise
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_hybrid.comm import (
    PairProbe,
    Spread,
    choose_interface,
    chosen_interface,
    probe_all_reduce,
    probe_flops,
    probe_pair,
)
from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning import (
    ClusterDescription,
    Device,
    DeviceSpec,
    Level,
    measured_speeds,
    memory_of_rank,
)
from lightning_hybrid.process import LETTING_GO_S, Meeting, make_store
from lightning_hybrid.profiling import describe_device

_ALL_PAIRS = 8
"""Up to this number of ranks every pair is measured; with more, only consecutive ranks, and one
pair for each two hosts."""
_TIMEOUT = timedelta(seconds=120)
_SHARED = Path("/dev/shm")
_PACKAGES = ("torch", "lightning", "pytorch-lightning", "lightning-hybrid", "numpy")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was found and measured on one rank.

    Attributes:
        device: description of its device. Its speed is in FLOP/s of a matrix product in float32,
            measured on all ranks at the same time.
        versions: versions of Python and of packages, which must be equal on all ranks.
        address: address of the interface that leads to the main host.
        shared_bytes: free bytes of the host's shared memory; None: there is none.
    """

    device: Device
    versions: dict[str, str]
    address: str
    shared_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Checkup:
    """The measurements of all ranks, collected on rank 0.

    Attributes:
        facts: what was found on each rank, by rank.
        pairs: measurements between pairs of ranks, sorted by ranks; with many ranks not of all
            pairs.
        all_reduce_s: seconds of an all-reduce of 8 MiB over all ranks; None: there is one rank.
    """

    facts: tuple[Facts, ...]
    pairs: tuple[PairProbe, ...]
    all_reduce_s: Spread | None

    @property
    def hosts(self) -> list[str]:
        """Name of the host of each rank, by rank."""
        return [fact.device.host for fact in self.facts]

    def disagreements(self) -> list[str]:
        """List what differs between ranks and should not, as lines for the user; empty: nothing."""
        lines = []
        for name, value in self.facts[0].versions.items():
            for rank, fact in enumerate(self.facts):
                if fact.versions.get(name) != value:
                    other = fact.versions.get(name)
                    lines.append(f"{name}: rank 0 has {value}, rank {rank} has {other}")
        for rank, fact in enumerate(self.facts):
            if len(set(self.hosts)) > 1 and fact.address.startswith("127."):
                lines.append(
                    f"interface: rank {rank} reaches the main host over loopback though there are "
                    "several hosts; set MASTER_ADDR to an address that all hosts see"
                )
        return lines

    def cluster(self, name: str) -> ClusterDescription:
        """Make a description of the cluster for the commands `plan` and `simulate`.

        Args:
            name: name of the cluster.
        """
        devices = [fact.device for fact in self.facts]
        unit = devices[0].units_per_s
        return ClusterDescription(
            name=name,
            about="Measured by lightning-hybrid doctor: compute is a matrix product in float32, "
            "latency and bandwidth are medians over pairs.",
            devices=tuple(
                DeviceSpec(
                    name=device.name,
                    flops_per_s=_rounded(speed * unit),
                    memory_bytes=_memory(device, devices),
                )
                for device, speed in zip(devices, measured_speeds(devices))
            ),
            levels=tuple(self._levels()),
        )

    def _levels(self) -> list[Level]:
        hosts, count = self.hosts, len(self.facts)
        if count == 1:
            return []
        each = hosts.count(hosts[0])
        blocks = [set(hosts[k : k + each]) for k in range(0, count, each)]
        inside = [p for p in self.pairs if hosts[p.ranks[0]] == hosts[p.ranks[1]]]
        across = [p for p in self.pairs if p not in inside]
        # two levels if all hosts have as many consecutive ranks; else all links are taken to be
        # as slow as those between hosts
        even = all(len(block) == 1 for block in blocks) and len(set(hosts)) * each == count
        if not across:
            return [_level("within a host", count, inside)]
        if not even or not inside:
            return [_level("between hosts", count, across)]
        return [_level("within a host", each, inside), _level("between hosts", count, across)]


def check_up() -> Checkup | None:
    """Measure this rank and its links to others (collective: all ranks call this together).

    Reads the environment variables that torchrun sets: ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``,
    ``MASTER_PORT``, and if they are set ``LOCAL_RANK`` (else 0) and ``LOCAL_WORLD_SIZE`` (else 1).
    Makes a default process group, and destroys it.

    Returns:
        On rank 0 the measurements of all ranks; None on all others.

    Raises:
        PlanError: the ranks do not find each other, or one is lost.
    """
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_RANK", 0))
    on_gpu = torch.cuda.is_available() and local < torch.cuda.device_count()
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    elif count > 1:
        torch.set_num_threads(1)  # as each rank has in a run on CPUs
    meeting = _meeting(rank, count)
    choose_interface(meeting.address, meeting.port, meeting.hosts)
    try:
        store = dist.PrefixStore("doctor", make_store(meeting, _TIMEOUT))
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        with chosen_interface():
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=count, timeout=_TIMEOUT
            )
            try:
                return _together(rank, count, device)
            finally:
                dist.destroy_process_group()
                time.sleep(LETTING_GO_S)
    except (RuntimeError, ValueError, OSError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(
            f"rank {rank} of {count} could not measure with the others over "
            f"{meeting.address}:{meeting.port}: {' '.join(str(error).split())}. "
            f"Is the port open on {meeting.address}, "
            "and does GLOO_SOCKET_IFNAME (or NCCL_SOCKET_IFNAME) name the interface between the "
            "hosts?"
        ) from error


def _meeting(rank: int, count: int) -> Meeting:
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    on_this_host = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return Meeting(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        hosts=-(-count // on_this_host),
        serve=rank == 0 and not agent_serves,
    )


def _together(rank: int, count: int, device: torch.device) -> Checkup | None:
    hosts: list[str] = [""] * count
    dist.all_gather_object(hosts, socket.gethostname())
    flops = probe_flops(device)
    facts: list[Facts] = [None] * count  # type: ignore[list-item]
    dist.all_gather_object(facts, _facts(device, flops))
    found = [probe_pair(one, other, device) for one, other in _pairs(hosts)]
    everything: list[list[PairProbe]] = [[] for _ in range(count)]
    dist.all_gather_object(everything, [pair for pair in found if pair is not None])
    all_reduce = probe_all_reduce(device) if count > 1 else None
    if rank:
        return None
    return Checkup(
        facts=tuple(facts),
        pairs=tuple(sorted(chain.from_iterable(everything), key=lambda pair: pair.ranks)),
        all_reduce_s=all_reduce,
    )


def _pairs(hosts: list[str]) -> list[tuple[int, int]]:
    """Return the pairs of ranks to measure, in order, the smaller rank first; see `_ALL_PAIRS`.

    Args:
        hosts: name of the host of each rank, by rank.
    """
    if len(hosts) <= _ALL_PAIRS:
        return list(combinations(range(len(hosts)), 2))
    first = [hosts.index(host) for host in dict.fromkeys(hosts)]
    return sorted({*pairwise(range(len(hosts))), *combinations(first, 2)})


def _facts(device: torch.device, flops_per_s: float) -> Facts:
    return Facts(
        device=describe_device(device, (flops_per_s, flops_per_s)),
        versions={"python": platform.python_version()}
        | {name: _version(name) for name in _PACKAGES}
        | {"cuda": str(torch.version.cuda)},
        address=_address(),
        shared_bytes=shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else None,
    )


def _address() -> str:
    with suppress(OSError, ValueError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))  # sends nothing
        return str(probe.getsockname()[0])
    return "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _level(name: str, devices: int, pairs: list[PairProbe]) -> Level:
    return Level(
        name=name,
        devices=devices,
        bandwidth_bytes_per_s=_rounded(
            Spread.of([pair.bandwidth_bytes_per_s.median for pair in pairs]).median
        ),
        latency_s=_rounded(Spread.of([pair.latency_s.median for pair in pairs]).median),
    )


def _memory(device: Device, devices: Sequence[Device]) -> float | None:
    size = memory_of_rank(device, devices)
    return None if size is None else _rounded(size)


def _rounded(value: float) -> float:
    """Round to three significant digits."""
    return float(f"{value:.3g}")
