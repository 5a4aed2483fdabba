"""Synthetic cohorts that tests read and never change: made once for all of a run's workers."""

import os
from fcntl import LOCK_EX, flock
from hashlib import sha256
from pathlib import Path

import pytest

from datamodules.synth import CohortSpec, generate


def made(tmp_path_factory: pytest.TempPathFactory, spec: CohortSpec) -> Path:
    """The folder of a cohort. Not to be changed: tests that damage scans take a copy."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    name = sha256(repr(spec).encode()).hexdigest()[:12]
    with (shared / f"{name}.lock").open("w") as lock:
        flock(lock, LOCK_EX)
        generate(shared / name / "cohort", spec)
    return shared / name / "cohort"
