"""Kills random ranks of runs under torchrun at random moments, and looks at what comes of the runs.

Claim: each run ends, with the losses and the weights of one undisturbed process (plain Lightning,
float64, to 1e-10). torchrun starts killed runs again with as many processes as before, with those
of the host that is left of two, or a second launch has one process in place of two; the script
(``_restarted.py``) goes on by ``ckpt_path="last"``. Nobody outlives a run.

    python benchmarks/restarts.py [--kills 30] [--seed 0] [--only restarted|host|launch]
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import torch

SCRIPT = Path(__file__).with_name("_restarted.py")
LIMIT_S, OUTLIVES_S = 180.0, 10.0
STARTS = 4
TOLERANCE = 1e-10
PHASES = ("started", "training", "training", "saving", "saving", "ending")
AFTER_S = {"started": 8.0, "training": 2.0, "saving": 0.05, "ending": 0.5}
"""Somewhere in so many seconds after the begin of a phase a rank is killed."""
OPTIONS: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {"data_parallel_size": 1}),
    (2, {"pipeline_parallel_size": 1}),
    (2, {"data_parallel_size": 1, "record": "sharded"}),
    (2, {"pipeline_parallel_size": 1, "record": "by speed"}),
    (2, {}),
    (4, {"data_parallel_size": 2, "record": "divided"}),
)
"""Processes and options of `_restarted.py`; sizes that are left open follow from what there is."""


@dataclass
class Run:
    """A run in a folder of its own.

    Attributes:
        folder: an empty one.
        options: of the script.
        agents: of torchrun, one for each host.
        kills: what was killed, and the seconds until the next start trains, or the run is over.
        wrong: what should not be.
    """

    folder: Path
    options: dict[str, Any] | None
    agents: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    kills: list[tuple[str, float]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def start(self, *before: str) -> None:
        """Start a process of Python with the script, behind other arguments."""
        root = Path(__file__).parents[1]
        paths = os.pathsep.join([str(root), *sys.path])
        told = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"}
        with (self.folder / "output.txt").open("ab") as output:
            command = [str(SCRIPT), str(self.folder), json.dumps(self.options)]
            process = subprocess.Popen(
                [sys.executable, *before, *command],
                env=os.environ | told,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.agents.append(process)

    def torchrun(self, *arguments: str) -> None:
        """Start an agent, and by it ranks."""
        self.start("-m", "torch.distributed.run", *arguments)

    def wait(self, seen: Callable[[], Any]) -> bool:
        """Wait until something is seen. False: the run has ended before, or hangs."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if seen():
                return True
            if all(agent.poll() is not None for agent in self.agents):
                return False
            time.sleep(0.005)
        self.wrong.append(f"hangs for {LIMIT_S:.0f} s")
        return False

    def ranks(self) -> dict[int, str]:
        """The ranks that live: the process of each, and what it has said at its start."""
        found = {}
        for path in self.folder.glob("started.*"):
            with suppress(OSError, ValueError):  # it is being written, or has ended
                pid = int(path.read_text())
                if str(self.folder) in Path(f"/proc/{pid}/cmdline").read_text():
                    found[pid] = path.name.removeprefix("started.")
        return found

    def kill_one(self, dice: random.Random, start: int) -> None:
        """Kill a random rank in a random phase of a start, if it comes to that."""
        phase, share, number = dice.choice(PHASES), dice.random(), dice.randint(1, 3)
        mark = f"{phase} {number}.{start}" if phase == "saving" else f"{phase}.{start}"
        if not self.wait(lambda: any(self.folder.glob(f"{mark}*"))):
            return
        time.sleep(share * AFTER_S[phase])
        ranks = [pid for pid, name in self.ranks().items() if name.startswith(f"{start}.")]
        if not ranks:
            return
        victim = dice.choice(sorted(ranks))
        name = self.ranks().get(victim, "").partition(".")[2]
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
            self.killed(f"rank {name}, {phase}", start)

    def killed(self, what: str, start: int) -> None:
        """Note a kill, and wait until the next start trains, or the run is over."""
        began = time.monotonic()
        self.wait((self.folder / f"training.{start + 1}").exists)
        self.kills.append((what, time.monotonic() - began))

    def finish(self, expected: "Seen") -> None:
        """Wait for the end, and compare."""
        self.wait(lambda: False)
        codes = [agent.poll() for agent in self.agents]
        if 0 not in codes:
            self.wrong.append(f"ended with {codes}")
        deadline = time.monotonic() + OUTLIVES_S
        while self.ranks() and time.monotonic() < deadline:
            time.sleep(0.1)
        self.wrong += [f"rank {name} lives on" for name in self.ranks().values()]
        if not self.wrong:
            self.wrong = expected.differences(Seen.of(self.folder))

    def end(self) -> None:
        """Leave no process, whatever has happened."""
        for agent in self.agents:
            with suppress(OSError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
        for pid in self.ranks():  # torchrun starts them in sessions of their own
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Seen:
    """What a run has left: what was noted of each loss, by all its starts, and the weights."""

    losses: dict[str, set[float]]
    weights: dict[str, torch.Tensor]

    @classmethod
    def of(cls, folder: Path) -> "Seen":
        losses: dict[str, set[float]] = {}
        for line in (folder / "losses.txt").read_text().splitlines():
            name, _, value = line.partition(": ")
            losses.setdefault(name, set()).add(float(value))
        return cls(losses, torch.load(folder / "weights.pt", weights_only=True))

    def differences(self, other: "Seen") -> list[str]:
        """What another run has that this one, which was not disturbed, has not."""
        wrong = [f"{name} is missing" for name in self.losses.keys() - other.losses.keys()]
        for name, values in other.losses.items():
            (mine,) = self.losses.get(name, {float("nan")})
            wrong += [f"{name}: {v}, not {mine}" for v in values if not abs(v - mine) < TOLERANCE]
        for name, value in other.weights.items():
            off = (value - self.weights[name]).abs().max().item()
            wrong += [f"{name} is {off:.1e} off"] if not off < TOLERANCE else []
        return wrong


def restarted(run: Run, processes: int, dice: random.Random) -> None:
    """torchrun starts all ranks again, up to four times."""
    many = f"--nproc-per-node={processes}"
    run.torchrun("--standalone", many, f"--max-restarts={STARTS}")
    for start in range(STARTS - 1):
        before = len(run.kills)
        run.kill_one(dice, start)
        if len(run.kills) == before:
            return


def host(run: Run, _: int, dice: random.Random) -> None:
    """Of two hosts one is lost, with its agent and its rank; the other goes on alone.

    Agents meet in a file, which no host takes along. Of two with a port one would serve, the first
    to take it, and the other end with it.
    """
    for _host in range(2):
        run.torchrun(
            "--nnodes=1:2",
            "--nproc-per-node=1",
            "--max-restarts=3",
            "--rdzv-backend=c10d",
            "--rdzv-id=run",
            f"--rdzv-endpoint={run.folder / 'agents'}",
            "--rdzv-conf=store_type=file,last_call_timeout=20,keep_alive_interval=3",
        )
    if not run.wait(lambda: any(run.folder.glob("saving 1.0"))):
        return
    time.sleep(dice.random() * AFTER_S["training"])
    by_name = {name.partition(".")[2]: rank for rank, name in run.ranks().items()}
    name = dice.choice(sorted(by_name))
    os.killpg(_parent(by_name[name]), signal.SIGKILL)
    os.kill(by_name[name], signal.SIGKILL)
    run.killed(f"host of rank {name}", 0)
    if not any(run.folder.glob("started.*.0 of 1")):
        run.wrong.append("nobody goes on alone")


def launch(run: Run, processes: int, dice: random.Random) -> None:
    """A killed run is over, and a second launch has one process."""
    run.torchrun("--standalone", f"--nproc-per-node={processes}")
    run.kill_one(dice, 0)
    run.wait(lambda: False)
    if run.kills:
        run.torchrun("--standalone", "--nproc-per-node=1")


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


KINDS = {"restarted": restarted, "host": host, "launch": launch}


def runs(kinds: list[str], seed: int) -> Iterator[tuple[str, Run]]:
    """Runs without end, of every kind that is wanted, and what they are."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        undisturbed = Run(Path(name), None)
        undisturbed.start()
        undisturbed.wait(lambda: False)
        expected = Seen.of(undisturbed.folder)
    for kind, (processes, options) in zip(cycle(kinds), cycle(OPTIONS)):
        with tempfile.TemporaryDirectory() as name:
            run = Run(Path(name), options)
            try:
                KINDS[kind](run, processes, dice)
                run.finish(expected)
                if run.wrong:
                    print((run.folder / "output.txt").read_text(), file=sys.stderr)
            finally:
                run.end()
        yield f"{kind}, {processes} ranks, {options}", run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=KINDS)
    arguments = parser.parse_args()
    kinds = [arguments.only] if arguments.only else ["restarted", "restarted", "host", "launch"]
    again, wrong, number = dict[str, float](), 0, 0
    with suppress(KeyboardInterrupt):  # what was seen until then is recorded
        for name, run in runs(kinds, arguments.seed):
            for what, seconds in run.kills:
                print(f"run {number}, {name}: {what}, {seconds:.1f} s", flush=True)
                again[f"{len(again)}: {name}; {what}"] = seconds
            for each in run.wrong:
                print(f"run {number}, {name}: WRONG: {each}", flush=True)
            number += 1
            wrong += bool(run.wrong)
            if len(again) >= arguments.kills:
                break
    from _results import record  # (tests import this file from another folder)

    record({"runs that went wrong": float(wrong), "runs": float(number)}, "")
    record(again, "s until it trains again, or ends")
    print(f"{len(again)} kills, {wrong} of {number} runs wrong; {median(again.values()):.1f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
