"""Training steps of a GPT on one rank, for parts A to H of `first_gpu_run.py`."""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from _gpt import Gpt
from _timing import bare_trainer
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.profiler import profile, supported_activities
from torch.utils.data import DataLoader

from lightning_hybrid import HybridGabraStrategy
from lightning_hybrid.comm.connections import GroupWire
from lightning_hybrid.stage.engine import Engine

WARM_UP, PROFILED = 3, 2
"""Steps before those that are timed, and steps behind them that a profiler looks at."""
MIB = 2**20
SYNCHRONISES = (
    *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
    *("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero"),
)


class Words(LightningModule):
    """Trains the network on random words.

    Args:
        config: of the run.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.losses = config, list[Tensor]()
        names = ("width", "layers", "vocabulary", "length")
        self.net = Gpt(*(config[name] for name in names))
        if config["compiled"] and config["peer"] == "plain":
            self.net.compile()

    def configure_model(self) -> None:
        if self.config["peer"] == "fsdp2" and self.device_mesh is not None:
            mesh = self.device_mesh["data_parallel"]
            for block in (*self.net.blocks, self.net):
                fully_shard(block, mesh=mesh)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch)[0]
        self.losses.append(loss.detach())
        if self.config["logs"]:
            self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # (one that is fused unscales by itself, so that Lightning clips with none)
        fused = self.config["accelerator"] == "gpu" and not self.config["clips"]
        return torch.optim.AdamW(self.parameters(), 1e-4, fused=fused)


class Kept(DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, float] = {}

    def log_metrics(self, metrics: dict[str, float], *_: Any, **__: Any) -> None:
        self.found |= {name: float(value) for name, value in metrics.items()}

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


@dataclass
class Watch:
    """What one rank sees of its steps, each of which it is told the begin of.

    Attributes:
        steps: how many are timed.
        on_gpu: whether there is a device that works beside the host.
        began_s: when training began.
        count: steps that have begun.
        found: what was seen.
        messages: bytes of the largest message that was sent since the last step of the warm-up.
        keep: called with what was seen once all of it was: a rank that obeys never comes back from
            the fit.
    """

    steps: int
    on_gpu: bool
    began_s: float = 0.0
    count: int = 0
    found: dict[str, Any] = field(default_factory=dict)
    messages: int = 0
    keep: Callable[[dict[str, Any]], None] = lambda found: None

    def begin(self) -> None:
        """Training begins."""
        self.began_s = time.perf_counter()

    def step(self, *_: Any) -> None:
        """A step begins."""
        number, self.count = self.count, self.count + 1
        if number == 1:
            self._synchronise()
            self.found["first step, s"] = time.perf_counter() - self.began_s
        if number == WARM_UP:
            self._synchronise()
            if self.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            self._marks, self.messages = (time.perf_counter(), time.process_time()), 0
        if number == WARM_UP + self.steps:
            self._timed()
            self._profiler = profile(activities=list(supported_activities()))
            self._profiler.start()
        if number == WARM_UP + self.steps + PROFILED:
            self._synchronise()
            self._profiler.stop()
            self.found |= seen_by(self._profiler.events() or ())
            self.keep(self.found)

    def _timed(self) -> None:
        wall_s, cpu_s = self._marks
        self.found["host, ms"] = 1e3 * (time.process_time() - cpu_s) / self.steps
        self._synchronise()
        self.found["step, ms"] = 1e3 * (time.perf_counter() - wall_s) / self.steps
        self.found["largest message, MiB"] = self.messages / MIB
        if not self.on_gpu:
            return
        self.found["peak, MiB"] = torch.cuda.max_memory_allocated() / MIB
        self.found["reserved, MiB"] = torch.cuda.max_memory_reserved() / MIB
        self.found["reserved now, MiB"] = torch.cuda.memory_reserved() / MIB
        free, total = torch.cuda.mem_get_info()  # (of all processes)
        self.found["used, MiB"] = (total - free) / MIB

    def _synchronise(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


class OfDriver(Callback):
    """Tells a watch where steps begin on the rank that runs the user's code."""

    def __init__(self, watch: Watch) -> None:
        self.on_train_batch_start = watch.step  # type: ignore[method-assign]


def watch_worker(watch: Watch) -> None:
    """Tell it where steps begin on a rank that obeys: one forward pass of its engine is one."""
    forward = Engine.forward

    def watched(self: Engine, *given: Any, **named: Any) -> Any:
        watch.step()
        return forward(self, *given, **named)

    Engine.forward = watched  # type: ignore[method-assign]


def watch_messages(watch: Watch) -> None:
    """Tell it how large messages between ranks are."""
    send = GroupWire.send

    def watched(self: GroupWire, tensor: Tensor) -> Any:
        watch.messages = max(watch.messages, tensor.nbytes)
        return send(self, tensor)

    GroupWire.send = watched  # type: ignore[method-assign]


def seen_by(events: Sequence[Any]) -> dict[str, Any]:
    """Of a step: kernels and their time, and what the host has waited for."""
    device = torch.autograd.DeviceType.CUDA
    kernels = [
        (event.time_range.start, event.time_range.end, "nccl" in event.name.lower())
        for event in events
        if event.device_type == device and "Mem" not in event.name[:3]
    ]
    waits = Counter(event.name for event in events if event.name in SYNCHRONISES)
    found: dict[str, Any] = {"waits": {name: n / PROFILED for name, n in sorted(waits.items())}}
    if kernels:
        found["launches"] = sum(not nccl for *_, nccl in kernels) / PROFILED
        for name, microseconds in overlap(kernels).items():
            found[f"{name}, ms"] = microseconds / 1e3 / PROFILED
    return found


def overlap(kernels: Sequence[tuple[float, float, bool]]) -> dict[str, float]:
    """Microseconds in which kernels run: NCCL's, others, and both at the same time.

    Args:
        kernels: of each its begin, its end, and whether it is NCCL's.
    """
    edges = sorted(
        [(begin, 1, nccl) for begin, _, nccl in kernels]
        + [(end, -1, nccl) for _, end, nccl in kernels]
    )
    running, total, before = {True: 0, False: 0}, Counter[str](), edges[0][0]
    for now, change, nccl in edges:
        names = ("NCCL", running[True]), ("device", running[False])
        for name, count in (*names, ("both", min(running.values()))):
            total[name] += now - before if count else 0
        running[nccl] += change
        before = now
    return {name: total[name] for name in ("NCCL", "device", "both")}


def _write(out: Path, found: dict[str, Any]) -> None:
    out.write_text(json.dumps(found))


def strategy_of(config: dict[str, Any]) -> Any:
    """The strategy of a peer."""
    ranks = config["ranks"]
    if config["peer"] == "plain":
        return "auto"
    if config["peer"] == "ddp":
        return "ddp"
    if config["peer"] == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    sizes: dict[str, Any] = {}
    if ranks > 1:
        sizes = {"data_parallel_size": 1, "pipeline_parallel_size": ranks}
        sizes["num_microbatches"] = config["microbatches"]
    return HybridGabraStrategy(
        **sizes,
        schedule=config["schedule"],
        recompute=config["recompute"],
        compile_stages=config["compiled"],
        log_performance=config["logs"],
        verify=False,  # (it is in few steps, and not in those that are timed elsewhere)
    )


def steps(config: dict[str, Any], places: dict[str, int]) -> dict[str, Any]:
    """Train, and tell what this rank has seen."""
    on_gpu = config["accelerator"] == "gpu"
    rank, kept = int(os.environ["PART_RANK"]), Kept()
    watch = Watch(config["steps"], on_gpu)
    watch_messages(watch)
    obeys = rank > 0 and config["peer"] == "hybrid"
    if obeys:
        out = Path(sys.argv[1]) / f"rank{rank}.json"
        watch.keep = lambda found: _write(out, found)
        watch_worker(watch)
    if on_gpu:
        torch.zeros(1, device="cuda")  # makes the context, which is not looked at
    seed_everything(0, verbose=False)
    options: dict[str, Any] = {"precision": config["precision"], "callbacks": []}
    if not obeys:
        options["callbacks"].append(OfDriver(watch))
    if config["clips"]:
        options["gradient_clip_val"] = 1.0
    count = WARM_UP + config["steps"] + PROFILED + 1
    strategy, module = strategy_of(config), Words(config)
    trainer = bare_trainer(strategy, config["accelerator"], **places, max_steps=count, **options)
    if config["logs"]:
        trainer.loggers, trainer.log_every_n_steps = [kept], 1
    words = torch.randint(config["vocabulary"], (config["batch"], config["length"]))
    share = config["batch"] // (trainer.world_size if config["peer"] in ("ddp", "fsdp2") else 1)
    watch.begin()
    trainer.fit(module, DataLoader(words.repeat(count, 1), batch_size=share))
    found = watch.found
    if not obeys:
        found["losses"] = [loss.item() for loss in module.losses]
        found["start"] = {n: v for n, v in kept.found.items() if n.startswith("hybrid/start/")}
    if plan := getattr(strategy, "plan", None):
        found["predicted, ms"] = 1e3 * plan.predicted_step_s if plan.predicted_step_s else None
        found["plan"] = asdict(plan)
    return found
