"""What to run first on a machine with GPUs, and to send back: one file of JSON.

In about ten minutes this finds out, part by part, what works on them:

* ``environment``: versions, devices, and how they are joined.
* ``exactness``: two stages (``--ranks``) beside one device, five networks in float64, with
  bf16-mixed and with 16-mixed, and one device beside itself: what a device does not repeat is no
  error of the stages.
* ``shapes``: other shapes and arguments beside one device in float64, and a run that is resumed.
* ``memory``: the most bytes that each rank has held, beside those of the plan.
* ``profile``: synchronisations and copies of a step, and how long NCCL's kernels and others run at
  the same time.
* ``speed``: samples per second in turn with Lightning's ``ddp`` and ``fsdp``.
* ``killed``: one rank is killed: seconds until all have ended, and their exit codes.

Each part has processes of its own, one a rank, and a time-out. One that fails is noted with what it
has printed, and the next one begins; the file is written after each.

    python benchmarks/first_gpu_run.py

Fewer GPUs than ranks are shared: each rank runs as if on a host of its own, over real NCCL.
Numbers, memory, synchronisations and the end of a lost rank are then as elsewhere; speed is not.

Without GPUs it runs on CPUs over gloo if asked to: ``--accelerator cpu --quick``.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from _gpu_parts import CASES, SHAPES, STEADY
from rich.console import Console

Found = dict[str, Any]
SCRIPT = Path(__file__).with_name("_gpu_parts.py")
PRINTED = 3000
"""So many of the last characters that a rank has printed are kept of one that fails."""


class Ranks:
    """The processes of a part, started as a cluster does.

    Args:
        config: of the part, as `_gpu_parts.py` reads it.
        folder: where they work.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path) -> None:
        self.folder, self.began = folder, time.monotonic()
        (folder / "config.json").write_text(json.dumps(config))
        self._count, port = int(config["ranks"]), _free_port()
        self._shared = bool(config["shared"])
        self.processes = [self._start(rank, port) for rank in range(self._count)]

    def _start(self, rank: int, port: int) -> "subprocess.Popen[bytes]":
        told = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1"}
        told["PART_RANK"] = f"{rank}"
        if self._count > 1:
            told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
            told |= {"LOCAL_RANK": f"{rank}", "NODE_RANK": "0"}
        if self._shared:
            # NCCL refuses two ranks of a host on one GPU
            told |= {"LOCAL_RANK": "0", "NODE_RANK": f"{rank}", "NCCL_HOSTID": f"host{rank}"}
            told |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        root = str(SCRIPT.parents[1])
        told["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
        with (self.folder / f"printed{rank}").open("wb") as printed:
            return subprocess.Popen(
                [sys.executable, str(SCRIPT), str(self.folder)],
                env=os.environ | told,
                stdout=printed,
                stderr=printed,
                start_new_session=True,
            )

    def wait(self, seconds: float) -> Found:
        """Wait for all, or kill them. Returns exit codes, and what was printed if one failed."""
        until, ended = time.monotonic() + seconds, {}
        while len(ended) < len(self.processes) and time.monotonic() < until:
            for rank, process in enumerate(self.processes):
                if rank not in ended and process.poll() is not None:
                    ended[rank] = time.monotonic()
            time.sleep(0.05)
        codes = [process.poll() for process in self.processes]
        self.kill()
        result: Found = {"exit codes": codes, "seconds": time.monotonic() - self.began}
        if None in codes:
            result["error"] = f"not over after {seconds:.0f} s: killed"
        if any(codes):
            result["printed"] = [self.printed(rank) for rank in range(len(codes))]
        return result | {"ended": ended}

    def found(self) -> list[Found]:
        """What each rank has left."""
        files = [self.folder / f"rank{rank}.json" for rank in range(len(self.processes))]
        return [json.loads(file.read_text()) if file.is_file() else {} for file in files]

    def printed(self, rank: int) -> str:
        return (self.folder / f"printed{rank}").read_text(errors="replace")[-PRINTED:]

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Run:
    """All parts, one after the other.

    Args:
        accelerator: ``"gpu"`` or ``"cpu"``.
        quick: sizes for a look whether it works, which say nothing of speed.
        limit_s: what a part may take.
        ranks: how many stages a network has.
    """

    def __init__(self, accelerator: str, quick: bool, limit_s: float, ranks: int = 2) -> None:
        self.accelerator, self.quick, self.limit_s = accelerator, quick, limit_s
        self.ranks = ranks
        self.parts: dict[str, Callable[[], Found]] = {"environment": self.environment}
        # (fp16 scales the loss, which Lightning does on GPUs alone)
        for precision in ("float64", "bf16", *(("fp16",) if accelerator == "gpu" else ())):
            for network in CASES:
                name = f"exactness: {network}, {precision}"
                self.parts[name] = self._plain(
                    kind="exactness", network=network, precision=precision
                )
        for name, shape in SHAPES.items():
            ranks = shape.replicas * shape.stages
            self.parts[f"shapes: {name}"] = self._plain(kind="shapes", shape=name, ranks=ranks)
        self.parts["memory"] = self._plain(kind="memory", network="transformer")
        self.parts["profile"] = self._plain(kind="profile", network="transformer")
        for network in ("transformer", "3D-ResAttNet"):
            self.parts[f"speed: {network}"] = lambda network=network: self.speed(network)
        for rank, name in enumerate(("driver", "worker")):
            self.parts[f"killed: {name}"] = lambda rank=rank: self.killed(rank)

    def environment(self) -> Found:
        """Versions, devices, and how they are joined."""
        names = (
            "lightning-hybrid",
            "torch",
            "lightning",
            "pytorch-lightning",
            "torchmetrics",
            "numpy",
        )
        found: Found = {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": {name: _version(name) for name in names},
            "commit": _printed("git", "-C", str(SCRIPT.parent), "rev-parse", "HEAD"),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
            "variables": {
                name: value
                for name, value in sorted(os.environ.items())
                if name.startswith(("NCCL_", "CUDA_", "TORCH_", "GLOO_", "OMP_"))
            },
            "torch": torch.__config__.show(),
        }
        if self.accelerator == "cpu":
            return found
        devices = range(torch.cuda.device_count())
        cuda: Any = torch.cuda
        return found | {
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": cuda.nccl.version() if torch.distributed.is_nccl_available() else None,
            "devices": [
                {"name": p.name, "bytes": p.total_memory, "capability": [p.major, p.minor]}
                for p in map(torch.cuda.get_device_properties, devices)
            ],
            "peer access": [
                [a == b or torch.cuda.can_device_access_peer(a, b) for b in devices]
                for a in devices
            ],
            "topology": _printed("nvidia-smi", "topo", "-m"),
            "driver": _printed(
                "nvidia-smi", "--query-gpu=driver_version,memory.used", "--format=csv"
            ),
        }

    def speed(self, network: str) -> Found:
        """Samples per second of each peer, in turn."""
        peers = ("hybrid", "ddp", *(("fsdp",) if self.accelerator == "gpu" else ()))
        found: Found = {peer: [] for peer in peers}
        for _ in range(1 if self.quick else 2):
            for peer in peers:
                found[peer].append(self._plain(kind="speed", network=network, peer=peer)())
        if self.accelerator == "cpu":
            found["fsdp"] = "Lightning's is for GPUs"
        return found

    def killed(self, rank: int) -> Found:
        """Kill this rank (0 is the driver's) in the middle of a training."""
        with tempfile.TemporaryDirectory() as folder:
            ranks = Ranks(self._config(kind="killed", network="perceptron"), Path(folder))
            marks = [Path(folder) / f"trains{n}" for n in range(self.ranks)]
            until = time.monotonic() + self.limit_s
            while not all(mark.exists() for mark in marks) and time.monotonic() < until:
                if any(process.poll() is not None for process in ranks.processes):
                    break
                time.sleep(0.05)
            trained = all(mark.exists() for mark in marks)
            time.sleep(1)
            ranks.processes[rank].send_signal(signal.SIGKILL)
            killed = time.monotonic()
            result = ranks.wait(120)
            ended = result.pop("ended")
            result["trained"] = trained
            result["seconds until all had ended"] = (
                max(ended.values()) - killed if len(ended) == self.ranks else None
            )
            # a rank that is killed, and one that says so, are as wanted
            if trained and len(ended) == self.ranks and 0 not in result["exit codes"]:
                result.pop("error", None)
            else:
                result["error"] = result.get("error", "a rank has not trained, or has not failed")
            return result

    def _plain(self, **config: Any) -> Callable[[], Found]:
        """A part that is over when its ranks are."""

        def run() -> Found:
            with tempfile.TemporaryDirectory() as folder:
                ranks = Ranks(self._config(**config), Path(folder))
                result = ranks.wait(self.limit_s)
                del result["ended"]
                if any(result["exit codes"]):
                    result.setdefault("error", f"exit codes {result['exit codes']}")
                return result | {"ranks": ranks.found()}

        return run

    def _config(self, **config: Any) -> Found:
        ranks = config.get("ranks", self.ranks)
        shared = {
            "accelerator": self.accelerator,
            "quick": self.quick,
            "ranks": ranks,
            "shared": self.accelerator == "gpu" and torch.cuda.device_count() < ranks,
            "microbatches": 2 if self.quick else 4,
            "batch": 4 if self.quick else 16,
            "steps": STEADY + 4 if config["kind"] != "exactness" else 5,
        }
        if config["kind"] == "speed" and not self.quick:
            shared["steps"] = 30
        return shared | config


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _printed(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout or done.stderr).strip()


def summary(found: Found) -> str:
    """A line of what a part has found."""
    if "error" in found:
        return f"FAILED: {found['error']}"
    if ranks := found.get("ranks"):
        if "two stages beside one device" in ranks[0]:
            two, one = (
                ranks[0]["two stages beside one device"],
                ranks[0]["one device beside itself"],
            )
            return (
                f"differs by {two['worst']:.1e} at most; one device from itself {one['worst']:.1e}"
            )
        if "beside one device" in ranks[0]:
            return "differs by {beside one device:.1e}, resumed by {resumed beside not:.1e}".format(
                **ranks[0]
            )
        return f"{found['seconds']:.0f} s"
    if (seconds := found.get("seconds until all had ended")) is not None:
        return f"all ended after {seconds:.1f} s, exit codes {found['exit codes']}"
    if "ddp" in found:
        rates = {
            peer: [
                each["ranks"][0].get("samples per second", 0) for each in runs if "ranks" in each
            ]
            for peer, runs in found.items()
            if isinstance(runs, list)
        }
        return ", ".join(f"{peer} {max(v, default=0):.1f} samples/s" for peer, v in rates.items())
    return ""


def run(parts: Mapping[str, Callable[[], Found]], out: Path, about: Found) -> list[str]:
    """Run parts, and write what they find. Returns the names of those that failed."""
    console, results = Console(), {**about, "parts": {}}
    for name, part in parts.items():
        try:
            found = part()
        except Exception as error:  # of this script: the other parts are worth having
            found = {"error": f"{type(error).__name__}: {error}"}
        results["parts"][name] = found
        out.write_text(json.dumps(results, indent=1))
        console.print(f"{name}: {summary(found)}", markup=False)
    return [name for name, found in results["parts"].items() if "error" in found]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("first_gpu_run.json"))
    parser.add_argument("--accelerator", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it work at all?")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for a part")
    parser.add_argument("--ranks", type=int, default=2, help="stages of a network")
    parser.add_argument("--parts", default="", help="begins of names, separated by semicolons")
    chosen = parser.parse_args(arguments)
    there = torch.cuda.device_count()
    if chosen.accelerator == "gpu" and not there:
        parser.error(
            f"torch {torch.__version__} sees no GPU: --accelerator cpu runs the same over gloo"
        )
    if chosen.accelerator == "gpu" and there < chosen.ranks:
        print(f"{chosen.ranks} ranks share {there} GPU(s): their speed says nothing")
    parts = Run(chosen.accelerator, chosen.quick, chosen.limit, chosen.ranks).parts
    wanted = tuple(text.strip() for text in chosen.parts.split(";"))
    for text in wanted:
        if not any(name.startswith(text) for name in parts):
            parser.error(f"there is no part {text!r}; known: {'; '.join(parts)}")
    parts = {name: part for name, part in parts.items() if name.startswith(wanted)}
    about = {"accelerator": chosen.accelerator, "quick": chosen.quick, "ranks": chosen.ranks}
    failed = run(parts, chosen.out, about)
    print(f"{len(failed)} of {len(parts)} parts failed; send {chosen.out}")


if __name__ == "__main__":
    main()
