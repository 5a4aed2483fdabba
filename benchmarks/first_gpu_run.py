"""What to run first on a machine with GPUs, and to send back: one file of JSON, and a table.

In ten minutes (``--minutes``) a GPT is trained a few steps at a time, in parts:

* ``A``: one device plain beside ``hybrid_gabra`` with its sizes left open: what it costs.
* ``B``: two stages and 1, 2, 4 and 8 micro-batches: kernels and launches beside plain, host time of
  each rank, and the step that the plan's simulation predicts for two devices.
* ``C``: 4 micro-batches with clipping, with 16-mixed, with logging.
* ``D``: compiled stages beside a compiled network on one device.
* ``E``: memory: plain, ranks, recomputed, 1F1B, and what NCCL takes.
* ``F``: the first step by its parts, with an empty cache of profiles and with a full one.
* ``G``: ``CUDA_LAUNCH_BLOCKING=1``, with messages of 8 MB and more.
* ``H``: with two GPUs, steps beside Lightning's ``ddp`` and FSDP2.

Each run has processes of its own, one a rank, and a limit. One that fails is noted with what it has
printed, and the next one begins; the file is written after each. Fewer GPUs than ranks are shared:
each rank runs as if on a host of its own, over real NCCL. Two processes on one GPU show kernels,
launches, host time and memory as elsewhere, and no speed: the table says so.

    python benchmarks/first_gpu_run.py                   # A to H; smaller, on CPUs, without a GPU
    python benchmarks/first_gpu_run.py --parts "A;B" --layers 12 --width 768
    python benchmarks/first_gpu_run.py --parts "exactness;shapes;killed"

The last line runs what else there is: two stages (``--ranks``) beside one device, five networks in
float64, with bf16-mixed and 16-mixed, and one device beside itself (what a device does not repeat
is no error of the stages); other shapes and arguments in float64, and a run that is resumed; and
one rank is killed: seconds until all have ended.
"""

import argparse
import atexit
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _gpu_parts import CASES, SHAPES, STEADY
from _gpu_tables import SIZES, SMALL, Part, parts_of, table
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
        self._variables: dict[str, str] = config.get("variables", {})
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
        told |= self._variables
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
        limit_s: what the processes of a part may take.
        ranks: how many stages a network has, but in parts A to H.
        minutes: what parts A to H may take together.
        sizes: of the network and the batch in these.
    """

    def __init__(
        self,
        accelerator: str,
        quick: bool,
        limit_s: float,
        ranks: int = 2,
        minutes: float = 10.0,
        sizes: Mapping[str, int] = SMALL,
    ) -> None:
        self.accelerator, self.quick, self.limit_s = accelerator, quick, limit_s
        self.ranks, self.minutes, self.sizes = ranks, minutes, dict(sizes)
        self._until: float | None = None
        self._known: dict[str, Found] = {}
        self._caches = Path(tempfile.mkdtemp(prefix="first_gpu_run"))
        atexit.register(shutil.rmtree, self._caches, ignore_errors=True)
        self.parts: dict[str, Callable[[], Found]] = {"environment": self.environment}
        on_gpu = accelerator == "gpu"
        devices = torch.cuda.device_count() if on_gpu else os.cpu_count() or 1
        self.usual = ["environment"]
        for letter, part in parts_of(devices, on_gpu=on_gpu).items():
            name = f"{letter}: {part.title}"
            self.usual.append(name)
            self.parts[name] = partial(self.of_steps, name, part)
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

    def of_steps(self, name: str, part: Part) -> Found:
        """Part A to H."""
        if part.left_out:
            return {"left out": part.left_out}
        if self._until is None:
            self._until = time.monotonic() + 60 * self.minutes
        runs = {name: self._once(config | self.sizes) for name, config in part.runs.items()}
        found: Found = {"title": name, "columns": part.columns, "hidden": part.hidden}
        found["shared"] = any(self._shares(config["ranks"]) for config in part.runs.values())
        found["runs"] = runs
        failed = [f"{name}: {run['error']}" for name, run in runs.items() if "error" in run]
        return found | ({"error": "; ".join(failed)} if failed else {})

    def _once(self, config: Found) -> Found:
        """A run of parts A to H, which several of them may look at."""
        key = json.dumps(config, sort_keys=True)
        if key not in self._known:
            assert self._until is not None
            left = self._until - time.monotonic()
            if left <= 0:
                return {"error": f"not begun: {self.minutes:g} minutes are over"}
            folder = self._caches / config.get("cache", "usual")
            variables = {"LIGHTNING_HYBRID_CACHE": str(folder), **config.get("variables", {})}
            run = self._plain(min(self.limit_s, left), **config | {"variables": variables})
            self._known[key] = run()
        return self._known[key]

    def _shares(self, ranks: int) -> bool:
        """Whether so many ranks are more than there are GPUs."""
        return self.accelerator == "gpu" and torch.cuda.device_count() < ranks

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

    def _plain(self, limit_s: float | None = None, **config: Any) -> Callable[[], Found]:
        """A part that is over when its ranks are."""

        def run() -> Found:
            with tempfile.TemporaryDirectory() as folder:
                ranks = Ranks(self._config(**config), Path(folder))
                result = ranks.wait(limit_s or self.limit_s)
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
            "shared": self._shares(ranks),
            "microbatches": 2 if self.quick else 4,
            "batch": 4 if self.quick else 16,
            "steps": STEADY + 4 if config["kind"] != "exactness" else 5,
        }
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
    if "left out" in found:
        return f"left out: {found['left out']}"
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
    return ""


def run(parts: Mapping[str, Callable[[], Found]], out: Path, about: Found) -> list[str]:
    """Run parts, and write what they find. Returns the names of those that failed."""
    console, results = Console(), {**about, "parts": {}}
    console.width = max(console.width, 120)
    for name, part in parts.items():
        try:
            found = part()
        except Exception as error:  # of this script: the other parts are worth having
            found = {"error": f"{type(error).__name__}: {error}"}
        results["parts"][name] = found
        out.write_text(json.dumps(results, indent=1))
        if "runs" in found:
            console.print(table(found))
        else:
            console.print(f"{name}: {summary(found)}", markup=False)
    return [name for name, found in results["parts"].items() if "error" in found]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    gpu = "gpu" if torch.cuda.device_count() else "cpu"
    parser.add_argument("--out", type=Path, default=Path("first_gpu_run.json"))
    parser.add_argument("--accelerator", choices=("gpu", "cpu"), default=gpu)
    parser.add_argument("--quick", action="store_true", help="small sizes: does it work at all?")
    parser.add_argument("--minutes", type=float, default=10.0, help="for parts A to H")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for each run of ranks")
    parser.add_argument("--ranks", type=int, default=2, help="stages of a network, but in A to H")
    parser.add_argument("--parts", default="", help="begins of names, separated by semicolons")
    for name, size in SIZES.items():
        text = f"in parts A to H: {size}, or {SMALL[name]} if small"
        parser.add_argument(f"--{name}", type=int, help=text)
    chosen = parser.parse_args(arguments)
    if chosen.accelerator == "gpu" and gpu == "cpu":
        parser.error(f"torch {torch.__version__} sees no GPU")
    quick = chosen.quick or gpu == "cpu"
    given = {name: getattr(chosen, name) for name in SIZES if getattr(chosen, name)}
    sizes = (SMALL if quick else SIZES) | given
    every = Run(chosen.accelerator, quick, chosen.limit, chosen.ranks, chosen.minutes, sizes)
    parts = {name: every.parts[name] for name in every.usual}
    if chosen.parts:
        wanted = tuple(text.strip() for text in chosen.parts.split(";"))
        for text in wanted:
            if not any(name.startswith(text) for name in every.parts):
                parser.error(f"there is no part {text!r}; known: {'; '.join(every.parts)}")
        parts = {name: part for name, part in every.parts.items() if name.startswith(wanted)}
    about = {"accelerator": chosen.accelerator, "quick": quick, "ranks": chosen.ranks, **sizes}
    failed = run(parts, chosen.out, about)
    print(f"{len(failed)} of {len(parts)} parts failed; send {chosen.out}")


if __name__ == "__main__":
    main()
