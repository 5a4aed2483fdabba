"""Loops of users of Fabric, in real processes, against plain Fabric: one device, or ``ddp``."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import USUAL
from fabric_script import LOOPS
from prepared import start_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]
SCRIPT = Path(__file__).with_name("fabric_script.py")
TOLERANCE = 1e-10


def seen(
    folder: Path, loops: Sequence[str], replicas: int, stages: int, **options: Any
) -> list[list[dict[str, Any]]]:
    """Run loops in one group of processes: of each loop what each replica's ranks have seen."""
    folder.mkdir(exist_ok=True)
    config = {"loops": [*loops], "replicas": replicas, "stages": stages, "options": options}
    (folder / "config.json").write_text(json.dumps(config))
    output, count = folder / "output.txt", replicas * max(1, stages)
    ranks = start_ranks(
        [str(SCRIPT), str(folder)], count, env=os.environ | USUAL, cwd=folder, output=output
    )
    try:
        for process in ranks:
            assert process.wait(timeout=600) == 0, output.read_text()
    finally:
        for process in ranks:
            process.kill()
    return [
        [
            {path.name: torch.load(path) for path in sorted(folder.glob(f"{name}.{replica}.*.pt"))}
            for replica in range(replicas)
        ]
        for name in loops
    ]


def assert_equal(
    folder: Path, loops: Sequence[str], replicas: int, stages: int, **options: Any
) -> None:
    """Every rank has what its replica's device has under plain Fabric."""
    expected = seen(folder / "plain", loops, replicas, 0)
    found = seen(folder / "staged", loops, replicas, stages, **options)
    for name, ours, theirs in zip(loops, found, expected, strict=True):
        for replica, (mine, one) in enumerate(zip(ours, theirs, strict=True)):
            assert len(mine) == stages, f"{name}: {[*mine]}"
            for rank, record in mine.items():
                [reference] = one.values()
                torch.testing.assert_close(
                    record,
                    reference,
                    rtol=0,
                    atol=TOLERANCE,
                    msg=lambda m, place=(name, replica, rank): f"{place}: {m}",
                )
