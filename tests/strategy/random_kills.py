"""Runs whose ranks are killed at random moments: who outlives whom, and what is left on the disk.

``PYTHONPATH=.:tests/helpers python tests/strategy/random_kills.py --kills 100`` trains in two to
four ranks, with networks made in ``__init__`` and in ``configure_model``, large activations and a
checkpoint every other step, of each kind. Ranks are started by the script, forked as if by a
cluster, or each by an agent of torchrun, as on a host of its own. It takes a random phase of a
random rank and, somewhere in it, sends SIGKILL (as the kernel does where memory ends) or SIGTERM,
or leaves the process no more memory than it has. Whatever happens then:

* no rank lives 30 s longer than the first that has died;
* a checkpoint that is there is whole, and bit for bit that of the undisturbed run;
* no process is left, and no other file but `.NAME.part`, which the next attempt removes.

It prints a line per kill and ends with code 1 if one of these did not hold.
"""

import argparse
import faulthandler
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ports import free_port
from prepared import start_ranks

PHASES = ("import", "start", "capture", "step", "checkpoint", "end", "later", "exit")
"""In their order. A driver touches `PHASE.RANK` at its begin for the ranks of its replica; "start"
begins with the script."""
LAUNCHES = ("script", "agents", "forked", "forked", "forked")
"""Forked ranks need no import, which is most of the time of the others."""
_IMPORT_S = 6.0  # about
LIMIT_S = 30.0  # that the others may live on
STEPS, EVERY, WIDTH, ROWS = 6, 2, 1024, 2048  # activations of 8 MB, 4 times what a socket holds
HERE = Path(__file__).resolve()
PATHS = f"{HERE.parents[2]}{os.pathsep}{HERE.parents[1] / 'helpers'}"


@dataclass(frozen=True)
class Shape:
    """What is trained.

    Attributes:
        stages: of one replica, a rank each.
        deferred: whether the network is made in `configure_model`.
        checkpoint: `full`, `sharded` or `beside`, sharded while training goes on.
        replicas: of the stages; two of them divide the states of the optimizer.
    """

    stages: int
    deferred: bool
    checkpoint: str = "full"
    replicas: int = 1

    @property
    def ranks(self) -> int:
        """Of all replicas."""
        return self.stages * self.replicas

    def __str__(self) -> str:
        where = "configure_model" if self.deferred else "__init__"
        return f"{self.replicas} x {self.stages} ranks, {where}, {self.checkpoint}"


SHAPES = [
    *(Shape(stages, deferred) for stages in (2, 3) for deferred in (False, True)),
    Shape(2, deferred=False, checkpoint="sharded"),
    Shape(3, deferred=True, checkpoint="beside"),
    Shape(2, deferred=False, replicas=2),
]


def train(folder: Path, shape: Shape) -> None:  # noqa: C901  one script
    """The script of a user."""
    rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
    hosts = shape.ranks if "RANK" in os.environ else 1
    driver = rank - rank % shape.stages

    def begin(phase: str) -> None:
        for each in range(driver, driver + shape.stages):  # workers run none of this
            (folder / "phases" / f"{phase}.{each}").touch()

    begin("start")
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_hybrid import Equal, HybridGabraStrategy, Sharded

    faulthandler.register(signal.SIGQUIT)  # tells where a rank is that does not end

    class Network(nn.Sequential):
        def __init__(self) -> None:
            layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
            super().__init__(*layers)

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = None if shape.deferred else Network()

        def configure_model(self) -> None:
            self.net = self.net or Network()
            begin("capture")
            for layer in self.net:
                layer[0].weight.register_post_accumulate_grad_hook(lambda _: begin("step"))

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            assert self.net is not None
            loss: Tensor = self.net(batch[0]).square().mean()
            return loss

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.training_step(batch, batch_idx)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    class Marks(Callback):
        def on_save_checkpoint(self, *_: Any) -> None:
            for each in range(shape.ranks):  # replica 0 alone hears of it
                (folder / "phases" / f"checkpoint.{each}").touch()

        def on_train_end(self, *_: Any) -> None:
            begin("end")

    seed_everything(1, verbose=False)
    saving: Any = {"filename": "{step}", "every_n_train_steps": EVERY, "save_top_k": -1}
    trainer = Trainer(
        strategy=HybridGabraStrategy(
            pipeline_parallel_size=shape.stages,
            data_parallel_size=shape.replicas,
            num_microbatches=1,
            plan=["net.1", "net.2"][: shape.stages - 1],
            replicas=Equal(shard_states=shape.replicas > 1),
            checkpoint=(
                "full"
                if shape.checkpoint == "full"
                else Sharded(asynchronous=shape.checkpoint == "beside")
            ),
        ),
        accelerator="cpu",
        devices=shape.ranks // hosts,
        num_nodes=hosts,
        max_steps=STEPS,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder / "checkpoints", **saving), Marks()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, rows = Model(), ROWS * shape.replicas
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(rows * STEPS, WIDTH)), ROWS))
    begin("later")
    if not shape.deferred:  # what other ranks own is mapped here
        sum(float(parameter.sum()) for parameter in model.parameters())
    trainer.save_checkpoint(folder / "checkpoints" / "later.ckpt")
    trainer.validate(model, DataLoader(TensorDataset(torch.randn(8, WIDTH)), 8), verbose=False)
    begin("exit")


class Run:
    """A training in processes of its own.

    Args:
        folder: an empty one.
        shape: what is trained.
        launch: see LAUNCHES.
    """

    def __init__(self, folder: Path, shape: Shape, launch: str) -> None:
        self.folder, self._launch = folder, launch
        for name in ("phases", "temporary", "checkpoints"):
            (folder / name).mkdir(parents=True)
        command = [
            str(HERE),
            "--train",
            str(folder),
            str(shape.stages),
            str(int(shape.deferred)),
            shape.checkpoint,
            str(shape.replicas),
        ]
        usual = {"OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS, "PYTHONWARNINGS": "ignore"}
        environment = {**os.environ, **usual, "TMPDIR": str(folder / "temporary")}
        output = folder / "output.txt"
        self.began = time.time()
        self.started: dict[int, Any] = {}
        if launch == "forked":
            place: Any = {"env": environment, "cwd": folder, "output": output}
            self.started.update(enumerate(start_ranks(command, shape.ranks, **place)))
            return
        agents: list[list[str]] = [[]]
        if launch == "agents":
            where = [f"--nnodes={shape.ranks}", f"--master-port={free_port()}"]
            agent = ["-m", "torch.distributed.run", "--master-addr=127.0.0.1", *where]
            agents = [[*agent, f"--node-rank={rank}"] for rank in range(shape.ranks)]
        with output.open("w") as file:
            for rank, before in enumerate(agents):
                self.started[rank] = subprocess.Popen(
                    [sys.executable, *before, *command],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )

    @property
    def output(self) -> str:
        """What all ranks have printed."""
        return (self.folder / "output.txt").read_text()

    def over(self) -> bool:
        """Whether all that was started from here has ended."""
        return None not in [process.poll() for process in self.started.values()]

    def code(self) -> int:
        """The exit code, once all ranks have ended: of the first that has failed."""
        codes = [self._code(process) for process in self.started.values()]
        return next(filter(None, codes), 0)

    def _code(self, process: Any) -> int:
        # an agent whose rank has ended well waits for those of the others, for five minutes
        with suppress(subprocess.TimeoutExpired):
            return int(process.wait(10 if self._launch == "agents" else 600))
        process.kill()
        return int(process.wait())

    def processes(self) -> dict[int, int]:
        """Those that live, and the rank of each; helpers, such as loaders, have that of another."""
        sessions = {process.pid: rank for rank, process in self.started.items()}
        found = {}
        for pid, session in _sessions():
            told = _environment(pid)
            if self._launch == "agents":  # which start ranks in other sessions
                ours = told.get("TMPDIR") == str(self.folder / "temporary") and "RANK" in told
            else:
                ours = session in sessions
            if ours:
                rank = told.get("RANK", told.get("LOCAL_RANK", "0"))
                found[pid] = sessions[session] if self._launch == "forked" else int(rank)
        return found

    def ranks(self) -> dict[int, int]:
        """Process numbers by rank, of the ranks that live."""
        return {rank: pid for pid, rank in sorted(self.processes().items(), reverse=True)}

    def begun(self, phase: str, rank: int) -> bool:
        """Whether this rank has come so far."""
        return (self.folder / "phases" / f"{phase}.{rank}").exists()

    def wait_for(self, phase: str, rank: int) -> int | None:
        """Wait for the begin of a phase. Returns the process of the rank; ``None``: it has ended"""
        while not self.over():
            pid = self.ranks().get(rank)
            if pid is not None and (phase == "import" or self.begun(phase, rank)):
                return pid
            time.sleep(0.01)
        return None

    def times(self) -> dict[str, float]:
        """When each phase begins, in seconds since the start, on the last rank to come to it."""
        return {
            phase: max(
                (path.stat().st_mtime for path in (self.folder / "phases").glob(f"{phase}.*")),
                default=0.0,
            )
            for phase in PHASES
        }


def _sessions() -> Iterator[tuple[int, int]]:
    """Process and session of all that are not dead."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX":
            yield int(path.parent.name), int(fields[3])


def _environment(pid: int) -> dict[str, str]:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def leave_no_memory(pid: int) -> None:
    """Every later request of the process for memory fails."""
    size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (size, size))


KINDS = {
    "SIGKILL": lambda pid: os.kill(pid, signal.SIGKILL),
    "SIGTERM": lambda pid: os.kill(pid, signal.SIGTERM),
    "no memory": leave_no_memory,
}


@dataclass
class Undisturbed:
    """A run without a kill.

    Attributes:
        lasts_s: how long each phase takes.
        checkpoints: the names and contents of its checkpoints.
    """

    lasts_s: dict[str, float]
    checkpoints: dict[str, Any]

    @classmethod
    def of(cls, folder: Path, shape: Shape) -> "Undisturbed":
        """Run it."""
        run = Run(folder, shape, "forked")
        if run.code():
            raise SystemExit(run.output)
        begins = [run.began, *(run.times()[phase] for phase in PHASES[1:]), time.time()]
        lasts = {name: max(b - a, 0.01) for name, a, b in zip(PHASES, begins, begins[1:])}
        lasts["import"] = _IMPORT_S
        # the first checkpoint is in the middle of the steps, which are few
        lasts["step"] = lasts["checkpoint"] = lasts["step"] + lasts["checkpoint"]
        return cls(lasts, {path.name: _load(path) for path in folder.glob("checkpoints/*")})


def _load(path: Path) -> Any:
    from lightning_hybrid.state import load_checkpoint

    loaded = load_checkpoint(path, weights_only=True)
    for callback in loaded["callbacks"].values():  # paths of this run
        callback.clear()
    return loaded


def _equal(found: Any, expected: Any) -> bool:
    import torch

    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, dict):
        keys = found.keys() == expected.keys()
        return keys and all(_equal(found[key], value) for key, value in expected.items())
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(_equal, found, expected))
    return bool(found == expected)


def wait_for_end(run: Run, victim: int | None) -> tuple[float | None, list[str]]:
    """Wait for the end of all processes.

    Returns:
        How many seconds the last one has lived longer than the first (``None``: nobody has died
        before its end), and what was not as it should be.
    """
    first: float | None = None
    ranks = set(run.ranks().values()) | ({victim} if victim else set())
    while living := run.processes():
        now = time.monotonic()
        if first is None and not ranks <= living.keys():
            first = now
        if (first is not None and now - first > LIMIT_S) or time.time() - run.began > 600:
            for how in (signal.SIGQUIT, signal.SIGKILL):
                for pid in run.processes():
                    os.kill(pid, how)
                time.sleep(1)
            return LIMIT_S, [f"ranks {sorted(living.values())} live on"]
        ranks |= {pid for pid in run.ranks().values() if pid in living}
        time.sleep(0.05)
        run.over()  # asks, so that what has ended does not stay
    return None if first is None else time.monotonic() - first, []


def left_behind(run: Run, expected: dict[str, Any]) -> list[str]:
    """What is wrong with the files of a run that has ended."""
    wrong = []
    for path in (run.folder / "checkpoints").iterdir():
        if path.name.startswith("."):  # the next attempt removes it
            continue
        try:
            if path.name not in expected:
                wrong.append(f"{path.name} was left")
            elif not _equal(_load(path), expected[path.name]):
                wrong.append(f"{path.name} is not that of the undisturbed run")
        except Exception as error:  # whatever makes it unreadable
            wrong.append(f"{path.name} cannot be read: {type(error).__name__}: {error}")
    names = {"phases", "temporary", "checkpoints", "output.txt"}
    wrong += [f"{p.name} was left" for p in run.folder.iterdir() if p.name not in names]
    # torch keeps what it has compiled, and folders for logs
    temporary = [path.name for path in (run.folder / "temporary").iterdir()]
    return wrong + [f"TMPDIR/{n} was left" for n in temporary if not n.startswith("torch")]


def kill_one(draw: random.Random, folder: Path, undisturbed: Callable[[Shape], Undisturbed]) -> Any:
    """One run and one kill. Returns what happened, as plain data."""
    shape, phase = draw.choice(SHAPES), draw.choice(PHASES)
    launch = "script" if phase in ("import", "start") else draw.choice(LAUNCHES)
    kind, rank, share = draw.choice([*KINDS]), draw.randrange(shape.ranks), draw.random()
    expected = undisturbed(shape)
    run = Run(folder, shape, launch)
    pid, outlived, wrong = run.wait_for(phase, rank), None, list[str]()
    if pid is not None:
        time.sleep(share * expected.lasts_s[phase])
        try:
            KINDS[kind](pid)
        except (OSError, IndexError, ValueError):  # it has ended
            pid = None
        outlived, wrong = wait_for_end(run, pid)
    code = run.code()
    wrong += left_behind(run, expected.checkpoints)
    if not code and run.begun("exit", 0):
        missing = expected.checkpoints.keys() - {p.name for p in folder.glob("checkpoints/*")}
        wrong += [f"{name} is missing" for name in missing]
    return {
        "shape": f"{shape}, {launch}",
        "kind": kind,
        "phase": phase,
        "rank": rank,
        "reached": pid is not None,
        "code": code,
        "outlived_s": None if outlived is None else round(outlived, 1),
        "wrong": wrong,
        "output": run.output if wrong else "",
    }


def kill_many(kills: int, seed: int) -> Iterator[Any]:
    """Runs and kills, one after the other; see :func:`kill_one`."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:

        @cache
        def undisturbed(shape: Shape) -> Undisturbed:
            return Undisturbed.of(Path(name) / str(shape), shape)

        for _ in range(kills):
            with tempfile.TemporaryDirectory(dir=name) as folder:
                yield kill_one(draw, Path(folder), undisturbed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        folder, stages, deferred, checkpoint, replicas = arguments.train
        shape = Shape(int(stages), bool(int(deferred)), checkpoint, int(replicas))
        train(Path(folder), shape)
        return
    longest, failed, counts = 0.0, 0, Counter[str]()
    for seen in kill_many(arguments.kills, arguments.seed):
        print(json.dumps(seen), flush=True)
        failed += bool(seen["wrong"])
        longest = max(longest, seen["outlived_s"] or 0.0)
        counts[seen["kind"] if seen["code"] else "went on"] += 1
    print(
        f"{arguments.kills} kills ({dict(counts)}), {failed} wrong; the last process ended "
        f"{longest:.1f} s after the first at most"
    )
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
