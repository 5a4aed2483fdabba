"""What tests read and never change: made once for all of a run's workers."""

import os
from collections.abc import Callable
from fcntl import LOCK_EX, flock
from hashlib import sha256
from pathlib import Path

import pytest

from datamodules.synth import CohortSpec, generate


def once(
    tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]
) -> Path:
    """A folder that ``make`` fills, in the first worker that asks for this name."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    done = shared / f"{name}.done"
    with (shared / f"{name}.lock").open("w") as lock:
        flock(lock, LOCK_EX)
        if not done.exists():
            (shared / name).mkdir(exist_ok=True)
            make(shared / name)
            done.touch()
    return shared / name


def made(tmp_path_factory: pytest.TempPathFactory, spec: CohortSpec) -> Path:
    """The folder of a synthetic cohort. Not to be changed: tests that damage scans take a copy."""
    name = sha256(repr(spec).encode()).hexdigest()[:12]
    return once(tmp_path_factory, name, lambda folder: generate(folder / "cohort", spec)) / "cohort"
