"""Each example runs as written, with two devices, to its end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
CLI = (
    *("fit", "--trainer.strategy=HybridGabraStrategy", "--trainer.accelerator=cpu"),
    *("--trainer.strategy.pipeline_parallel_size=2", "--trainer.devices=2"),
    "--trainer.max_epochs=2",
)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.conformance
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("before", "name", "after"),
    [
        ((), "one_argument.py", ()),
        ((), "large_model.py", ()),
        ((), "fine_tune_bert.py", ()),
        (TORCHRUN, "two_hosts.py", ()),
        ((), "unlike_devices.py", ()),
        ((), "cli.py", CLI),
    ],
    ids=["one_argument", "large_model", "fine_tune_bert", "two_hosts", "unlike_devices", "cli"],
)
def test_an_example_trains(
    tmp_path: Path, before: tuple[str, ...], name: str, after: tuple[str, ...]
) -> None:
    if name == "fine_tune_bert.py":
        pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, *before, EXAMPLES / name, *after],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "`Trainer.fit` stopped: `max_epochs" in said


def test_an_example_is_short_and_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert len(scripts) == listed.count(".py)")
    for script in scripts:
        assert len(script.read_text().splitlines()) <= 60, script.name
        assert f"({script.name})" in listed
