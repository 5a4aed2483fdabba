"""Runs under torchrun whose ranks are killed: each goes on from its last checkpoint to the end.

``PYTHONPATH=.:tests/helpers python tests/strategy/random_restarts.py --kills 30`` trains in two or
four ranks under ``torchrun --max-restarts``, and kills a random rank at a random moment; every
fourth time two. In a run of two hosts it kills a whole host: the other one goes on alone, with a
new plan. The losses of all steps and the weights must be those of a run that nobody has disturbed,
bit for bit; of the run that went on with fewer ranks, to 1e-10.

It prints a line per run and ends with code 1 if one of them was wrong.
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
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from ports import free_port

HERE = Path(__file__).resolve()
SCRIPT = HERE.with_name("restarts_script.py")
PATHS = f"{HERE.parents[2]}{os.pathsep}{HERE.parents[1] / 'helpers'}"
LIMIT_S = 600.0
SHAPES = ((1, 2), (2, 2))
"""Replicas, and ranks of each."""


def start(folder: Path, replicas: int, *torchrun: str) -> "subprocess.Popen[bytes]":
    """Start torchrun in a process group of its own."""
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", *torchrun),
            *(str(SCRIPT), str(folder), str(replicas)),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS, "PYTHONWARNINGS": "ignore"},
        stdout=(folder / "output.txt").open("ab"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def on_one_host(ranks: int) -> tuple[str, ...]:
    return ("--standalone", f"--nproc-per-node={ranks}", "--max-restarts=3")


def kill(folder: Path, rank: int, agent: int | None = None) -> bool:
    """Kill the rank that has written its id last; not that of one agent. Whether it was there."""
    with suppress(OSError, ValueError):  # it has ended, or not begun
        pid = int((folder / f"pid.{rank}").read_text())
        process = Path(f"/proc/{pid}")
        # the number may be another program's by now
        if str(folder) not in (process / "cmdline").read_text():
            return False
        if agent is None or int((process / "stat").read_text().split()[3]) != agent:
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def until_saved(agent: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Wait until a run has its first checkpoint."""
    while not (folder / "checkpoints/last.ckpt").exists():
        time.sleep(0.02)
        assert agent.poll() is None, (folder / "output.txt").read_text()


def end(agents: list["subprocess.Popen[bytes]"], folder: Path, ranks: int) -> None:
    """Kill what is left: an agent that is killed leaves its ranks, in sessions of their own."""
    for agent in agents:
        with suppress(OSError):
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()
    for rank in range(ranks):
        kill(folder, rank)


def result(folder: Path) -> tuple[dict[int, float], dict[str, Any]]:
    losses, weights = torch.load(folder / "result.pt", weights_only=True)
    return losses, weights


@cache
def undisturbed(replicas: int, ranks: int) -> tuple[float, Any]:
    """Seconds of a run that nobody kills, and its losses and weights."""
    with tempfile.TemporaryDirectory() as name:
        began = time.monotonic()
        process = start(Path(name), replicas, *on_one_host(replicas * ranks))
        assert process.wait(LIMIT_S) == 0, (Path(name) / "output.txt").read_text()
        return time.monotonic() - began, result(Path(name))


def kill_one(shape: tuple[int, int], chance: random.Random, kills: int) -> dict[str, Any]:
    """A run with so many kills, and what was wrong with it."""
    replicas, ranks = shape
    seconds, expected = undisturbed(*shape)
    with tempfile.TemporaryDirectory() as name:
        folder, killed = Path(name), []
        process = start(folder, replicas, *on_one_host(replicas * ranks))
        try:
            for _ in range(kills):
                moment = chance.uniform(0.05, 1.0) * seconds
                time.sleep(moment)
                rank = chance.randrange(replicas * ranks)
                if kill(folder, rank):
                    steps = (folder / "checkpoints/last.ckpt").exists()
                    killed.append({"rank": rank, "after_s": round(moment, 1), "saved": steps})
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end([process], folder, replicas * ranks)
        starts = len((folder / "starts.txt").read_text().splitlines()) // (replicas * ranks)
        wrong = [] if code == 0 else [f"code {code}", (folder / "output.txt").read_text()[-3000:]]
        if code == 0:
            wrong = differences(result(folder), expected, 0.0)
        return {"shape": shape, "killed": killed, "starts": starts, "wrong": wrong}


def lose_a_host(chance: random.Random) -> dict[str, Any]:
    """A run of two hosts of which one is lost: the other goes on with what there is."""
    seconds, expected = undisturbed(1, 2)
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        common = (
            *("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d"),
            *("--rdzv-id=run", f"--rdzv-endpoint=127.0.0.1:{port}"),
            "--rdzv-conf=join_timeout=60,last_call_timeout=5,keep_alive_interval=1,"
            "keep_alive_max_attempt=3",
        )
        hosts = [start(folder, 1, *common)]
        try:
            time.sleep(1)  # the first one keeps the store
            hosts.append(start(folder, 1, *common))
            until_saved(hosts[0], folder)
            time.sleep(chance.uniform(0, 0.1) * seconds)
            os.killpg(hosts[1].pid, signal.SIGKILL)
            for rank in range(2):
                kill(folder, rank, agent=hosts[0].pid)
            code = hosts[0].wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(hosts, folder, 2)
        starts = (folder / "starts.txt").read_text().splitlines()
        wrong = [] if code == 0 else [f"code {code}", (folder / "output.txt").read_text()[-3000:]]
        if code == 0:
            wrong = differences(result(folder), expected, 1e-10)
        if "0 of 1" not in starts:
            wrong.append(f"nobody went on alone: {starts}")
        return {"shape": "two hosts", "killed": "a host", "starts": len(starts), "wrong": wrong}


def differences(found: Any, expected: Any, tolerance: float) -> list[str]:
    """What is not as in the run that nobody has disturbed."""
    (losses, weights), (other_losses, other_weights) = found, expected
    if losses.keys() != other_losses.keys():
        return [f"steps {sorted(losses)}"]
    wrong = [f"loss {n}" for n in losses if abs(losses[n] - other_losses[n]) > tolerance]
    close = {"rtol": 0.0, "atol": tolerance}
    return wrong + [n for n in weights if not torch.allclose(weights[n], other_weights[n], **close)]


def kill_many(kills: int, seed: int) -> Iterator[dict[str, Any]]:
    """So many runs, each with a kill or two; every tenth loses a host."""
    chance = random.Random(seed)
    for number in range(kills):
        if number % 10 == 0:
            yield lose_a_host(chance)
        else:
            yield kill_one(chance.choice(SHAPES), chance, kills=2 if number % 4 == 3 else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    wrong = 0
    for seen in kill_many(arguments.kills, arguments.seed):
        print(json.dumps(seen), flush=True)
        wrong += bool(seen["wrong"])
    print(f"{arguments.kills} runs, {wrong} wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
