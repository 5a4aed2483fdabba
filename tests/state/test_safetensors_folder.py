"""`lightning-hybrid consolidate --to safetensors`: the folder that `from_pretrained` takes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from libraries import needs

from lightning_hybrid.cli import main
from lightning_hybrid.errors import HybridError
from lightning_hybrid.state import ShardedSaves, save_alone, save_checkpoint
from lightning_hybrid.state.safetensors_folder import write_safetensors

MIB = 2**20
real = pytest.mark.real


def memory(field: str) -> int:
    """A line of `/proc/self/status`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def saved(weights: dict[str, Any], path: Path, kind: str) -> Path:
    """A checkpoint with these weights, as a folder or as a file."""
    checkpoint = {"epoch": 1, "state_dict": weights}
    if kind == "sharded":
        ShardedSaves().save(lambda folder: save_alone(checkpoint, folder), path)
    else:
        save_checkpoint(checkpoint, path)
    return path


@real
@needs("safetensors")
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_each_weight_is_in_one_of_the_files(tmp_path: Path, kind: str) -> None:
    from safetensors.torch import load_file

    weights = {f"net.{n}": torch.randn(3, 40_000, dtype=torch.bfloat16) for n in range(5)}
    weights["net.0.turned"] = torch.randn(4, 30_000).t()
    weights["net.small"] = torch.tensor(7)
    weights["net.tied"] = weights["net.3"]
    path, out = saved(weights, tmp_path / "saved.ckpt", kind), tmp_path / "out"
    size = ["--max-shard-size", "500 kB"]
    assert main(["consolidate", str(path), str(out), "--to", "safetensors", *size]) == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("model-0000?-of-00004.safetensors"))
    assert len(files) == 4
    found = {}
    for file in files:
        part = load_file(file)
        assert all(index["weight_map"][name] == file.name for name in part)
        found |= part
    expected = {name.removeprefix("net."): w for name, w in weights.items() if name != "net.tied"}
    assert found.keys() == expected.keys() == index["weight_map"].keys()
    for name, weight in expected.items():
        assert found[name].dtype is weight.dtype
        assert torch.equal(found[name], weight)


CONSOLIDATES = """
import sys
import torch.distributed.checkpoint
import safetensors.torch
from test_safetensors_folder import memory
from lightning_hybrid.cli import main
from lightning_hybrid.errors import HybridError

before = memory("VmRSS")
assert main(sys.argv[1:]) == 0
print(memory("VmHWM") - before)
"""


@real
@needs("safetensors")
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_folder_is_written_in_the_memory_of_one_file(tmp_path: Path, kind: str) -> None:
    weights = {f"net.{n}": torch.full((4 * MIB,), float(n)) for n in range(24)}  # of 16 MiB
    path, out = saved(weights, tmp_path / "saved.ckpt", kind), tmp_path / "out"
    command = ["consolidate", str(path), str(out), "--to", "safetensors"]
    here = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    done = subprocess.run(
        [sys.executable, "-c", CONSOLIDATES, *command, "--max-shard-size", "64 MiB"],
        env=os.environ | {"PYTHONPATH": here},
        check=True,
        capture_output=True,
        text=True,
    )
    assert len([*out.glob("*.safetensors")]) == 6
    # a file, and a tensor twice while it is read from the folder; all are 384 MiB
    assert int(done.stdout.split()[-1]) < (64 + 2 * 16 + 8) * MIB


@real
@needs("safetensors")
def test_of_several_networks_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    weights = {"student.weight": torch.ones(2), "teacher.body.weight": torch.zeros(2)}
    path = saved(weights, tmp_path / "saved.ckpt", "full")
    out = str(tmp_path / "out")
    command = ["consolidate", str(path), out, "--to", "safetensors"]
    assert main(command) == 2
    assert "say which of student, teacher" in capsys.readouterr().err
    assert main([*command, "--network", "nobody"]) == 2
    assert "nobody names no weights" in capsys.readouterr().err
    assert main([*command, "--network", "teacher.body"]) == 0
    assert [*load_file(f"{out}/model.safetensors")] == ["weight"]
    assert main([*command, "--network", "student"]) == 2
    assert "is there already" in capsys.readouterr().err


def test_without_the_library_the_error_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    path = saved({"net.weight": torch.ones(2)}, tmp_path / "saved.ckpt", "full")
    out = tmp_path / "out"
    assert main(["consolidate", str(path), str(out), "--to", "safetensors"]) == 2
    assert "pip install safetensors" in capsys.readouterr().err
    assert not out.exists()


@real
@needs("safetensors")
def test_what_is_no_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(HybridError, match=r"'net\.extra' is a dict and no tensor"):
        write_safetensors({"net.extra": {}}, tmp_path / "out", MIB)
    assert [*tmp_path.iterdir()] == []
