"""Cache profiles on disk: later runs of a network on the same machine plan with the same profile.

The name of a file is a hash of all that its profile depends on (`describe_profile`). Files are
replaced whole, so processes do not disturb each other. If a file cannot be read, the profile is
measured and written again; if it cannot be written, it is used and not kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.graph import NetworkGraph, NetworkPartition
from lightning_hybrid.planning import PartitionTable
from lightning_hybrid.profiling.measure import device_name

FORMAT = 7
"""Number to increase when what is measured, or how, changes within a version of this package: files
with another number are not read."""


def cache_folder() -> Path:
    """Path of the cache: ``$LIGHTNING_HYBRID_CACHE``, or a folder in that of the user's caches.

    The folder is not created here.
    """
    own = os.environ.get("LIGHTNING_HYBRID_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lightning_hybrid"


def cached(
    measured: Callable[[], PartitionTable],
    graph: NetworkGraph,
    partitions: Sequence[NetworkPartition],
    leaves: Sequence[Tensor],
    device: torch.device,
) -> PartitionTable:
    """Read a profile from the disk; if there is none, measure it and write it to the disk.

    Args:
        measured: function that measures the profile.
        graph: graph of the network.
        partitions: partitions of the graph, in order.
        leaves: input tensors of one micro-batch, as `NetworkGraph.bind` gives them.
        device: device on which `measured` measures.
    """
    what = describe_profile(graph, partitions, leaves, device)
    name = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:24]
    # a missing home folder, a file in the way or a full disk must not end the run
    with suppress(OSError, RuntimeError):
        path = cache_folder() / "profiles" / f"{name}.json"
        known = _read(path, len(partitions))
        if known is not None:
            return known
    profile = measured()
    with suppress(OSError, RuntimeError):
        _write(path, profile.record())
    return profile


def describe_profile(
    graph: NetworkGraph,
    partitions: Sequence[NetworkPartition],
    leaves: Sequence[Tensor],
    device: torch.device,
) -> dict[str, Any]:
    """Describe all that a profile depends on, as a dictionary for JSON, whose hash names its file.

    Args:
        graph: graph of the network.
        partitions: partitions of the graph, in order.
        leaves: input tensors of one micro-batch, as `NetworkGraph.bind` gives them.
        device: device to measure on.
    """
    return {
        "format": FORMAT,
        "versions": {name: _version(name) for name in ("lightning-hybrid", "torch")},
        "network": hashlib.sha256("\n".join(_network(graph, partitions)).encode()).hexdigest(),
        "class": type(graph.network).__qualname__,
        "inputs": [[list(leaf.shape), str(leaf.dtype), list(leaf.stride())] for leaf in leaves],
        "device": _device(device),
        # torch chooses kernels by these settings
        "precision": {
            "autocast": torch.is_autocast_enabled(device.type)
            and str(torch.get_autocast_dtype(device.type)),
            "matmul": torch.get_float32_matmul_precision(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "cudnn": [torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark],
            "mkldnn": torch.backends.mkldnn.enabled,
        },
    }


def _network(graph: NetworkGraph, partitions: Sequence[NetworkPartition]) -> list[str]:
    """Describe a network in lines of text: its operations, parameters, buffers and partitions."""
    lines = [graph.fingerprint]
    for kind_of, tensors in (
        ("parameter", graph.network.named_parameters()),
        ("buffer", graph.network.named_buffers()),
    ):
        lines += [
            f"{kind_of} {name} {tuple(t.shape)} {t.stride()} {t.dtype} {t.requires_grad}"
            for name, t in tensors
        ]
    return lines + [f"{p.name} {p.start} {p.stop} {p.layers}" for p in partitions]


def _device(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        return {"name": device_name(device), "cuda": str(torch.version.cuda)}
    return {
        # hosts of a cluster may share a home folder and have different processors
        "name": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    """Name the model of this host's CPU."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return f"{platform.machine()} {platform.processor()}".strip()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a clone
        return "unknown"


def _read(path: Path, partitions: int) -> PartitionTable | None:
    """Read the profile in a file.

    Returns:
        The profile; None: there is no file, or it is broken, or it has another number of
        partitions.
    """
    try:
        profile = PartitionTable.from_record(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return profile if len(profile.names) == partitions else None


def _write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # a name of its own for each process, since hosts may share the folder
    new = path.with_suffix(f".{platform.node()}.{os.getpid()}.new")
    try:
        new.write_text(json.dumps(record, indent=1), encoding="utf-8")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
