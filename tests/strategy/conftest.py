import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from prepared import Forked, start_ranks
from records import written

SCRIPT = Path(__file__).with_name("training_script.py")
ROOT = SCRIPT.parents[2]
USUAL = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
DEFAULTS = {
    "strategy": "hybrid",
    "network": "residual",
    "dtype": "float32",
    "replicas": 1,
    "stages": 1,
    "microbatches": 2,
    "samples": 24,
    "side": 8,
    "batch": 4,
    "steps": 20,
    "trainer": {"num_sanity_val_steps": 0, "limit_val_batches": 0},
}


class Training:
    """One run of a script in processes of its own.

    Args:
        folder: where it works.
        script: the script.
        launcher: what Python runs before the script, with its arguments.
        processes: how many a launcher starts; all ranks by default.
        config: of the script.
    """

    def __init__(
        self,
        folder: Path,
        *,
        script: Path = SCRIPT,
        launcher: Sequence[str] = (),
        processes: int | None = None,
        **config: Any,
    ) -> None:
        self.folder, self.script, self.launcher = folder, script, launcher
        self.config = {**DEFAULTS, **config}
        self.processes = processes or int(self.config["replicas"] * self.config["stages"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, default=written))

    def ran_on_workers(self) -> dict[int, set[str]]:
        """By rank of a worker, the modules that its stages have computed, forward and backward."""
        files = {path: json.loads(path.read_text()) for path in self.folder.glob("ran*.json")}
        return {
            int(path.stem.removeprefix("ran")): {n[1:] for n in ran if n.startswith("-")}
            for path, ran in files.items()
        }

    def held_by_workers(self) -> dict[int, int]:
        """By rank of a worker, the bytes of all its weights; where ``config`` has ``weighs``."""
        files = self.folder.glob("held*.json")
        return {int(p.stem.removeprefix("held")): json.loads(p.read_text()) for p in files}

    @property
    def output(self) -> str:
        """What all ranks have printed."""
        return (self.folder / "output.txt").read_text()

    def start(
        self, before: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[str]":
        """Start the script, in an environment that has some variables more.

        Args:
            before: a command that runs it, as `ip netns exec NAME`.
            environment: the variables.
        """
        with (self.folder / "output.txt").open("a") as output:
            return subprocess.Popen(
                [*before, sys.executable, *self.launcher, str(self.script), str(self.folder)],
                env=os.environ | USUAL | (environment or {}),
                cwd=self.folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # so that a test can press Ctrl-C there
            )

    def run(self) -> list[dict[str, Any]]:
        """Run to the end, in processes that have imported before. Returns what each driver saw."""
        return self.wait(
            start_ranks(
                [str(self.script), str(self.folder)],
                self.processes,
                env=os.environ | USUAL,
                cwd=self.folder,
                output=self.folder / "output.txt",
            )
        )

    def launch(self) -> list[dict[str, Any]]:
        """Run to the end, as a user's shell does. Returns what each driver has seen."""
        return self.wait([self.start()])

    def wait(self, processes: Sequence["subprocess.Popen[str] | Forked"]) -> list[dict[str, Any]]:
        """Wait for the end of what was started. Returns what each driver has seen."""
        try:
            for process in processes:
                assert process.wait(timeout=240) == 0, self.output
        finally:
            for process in processes:
                process.kill()
        return [
            torch.load(path, weights_only=False)
            for path in sorted(self.folder.glob("rank[0-9]*.pt"))
        ]


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Train with a configuration; see `training_script.py` and DEFAULTS."""
    runs = iter(range(100))
    return lambda **config: Training(tmp_path / str(next(runs)), **config).run()


def kill_while_it_saves(save: Callable[[Path], None], path: Path, after_s: float) -> None:
    """Kill a process that saves to a path again and again, so long after the first one is there."""
    process = multiprocessing.get_context("fork").Process(target=save, args=(path,), daemon=True)
    process.start()
    while not path.exists():
        time.sleep(0.01)
    time.sleep(after_s)
    process.kill()
    process.join()
