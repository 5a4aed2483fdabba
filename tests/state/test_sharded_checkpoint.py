"""A sharded checkpoint is the ordinary one, whoever has written its parts."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader

from lightning_hybrid._trees import tensors_in
from lightning_hybrid.comm import TensorSpec
from lightning_hybrid.errors import HybridError
from lightning_hybrid.remote import is_unread
from lightning_hybrid.state import sharded_checkpoint
from lightning_hybrid.state.sharded_checkpoint import (
    DividedCheckpoint,
    TensorAddress,
    finish,
    read_sharded,
    save_alone,
    unread_there,
    write_rest,
    write_shard,
)
from lightning_hybrid.state.whole_checkpoint import load_checkpoint, save_checkpoint


def checkpoint() -> dict[str, Any]:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.randn(8, 3)).square().sum().backward()
    optimizer.step()
    state = module.state_dict()
    state["order"] = torch.arange(12.0).view(3, 4).t()
    state["half"] = torch.arange(12.0).bfloat16()[::2]
    state["sparse"] = torch.eye(3).to_sparse()
    return {
        "epoch": 3,
        "state_dict": state,
        "callbacks": {"best": torch.tensor(0.5)},
        "optimizer_states": [optimizer.state_dict(), {"state": {}, "param_groups": []}],
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert list(found["state_dict"]) == list(expected["state_dict"])
    assert found["state_dict"]._metadata == expected["state_dict"]._metadata
    pairs = [dict(tensors_in(each)) for each in (found, expected)]
    assert pairs[0].keys() == pairs[1].keys()
    for path, tensor in pairs[0].items():
        other = pairs[1][path]
        assert tensor.dtype == other.dtype
        assert torch.equal(tensor.to_dense(), other.to_dense()), path
    assert (
        found["optimizer_states"][0]["param_groups"]
        == (expected["optimizer_states"][0]["param_groups"])
    )


def test_what_is_read_is_what_was_saved(tmp_path: Path) -> None:
    expected = checkpoint()
    save_alone(expected, tmp_path)
    found = read_sharded(tmp_path, weights_only=True)
    assert_same(found, expected)
    state = found["state_dict"]
    assert state["0.weight"] is state["2.weight"]  # tied, it is there once
    assert state["order"].stride() == expected["state_dict"]["order"].stride()
    assert {file.name for file in tmp_path.iterdir()} == {".metadata", "__0_0.distcp", "meta.pt"}


def test_torch_and_lightning_find_the_names_that_they_expect(tmp_path: Path) -> None:
    save_alone(checkpoint(), tmp_path)
    keys = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert {"state_dict.0.weight", "optimizer_0.state.3.exp_avg"} <= keys.keys()
    rest = torch.load(tmp_path / "meta.pt", weights_only=True)
    assert rest["epoch"] == 3
    assert rest["callbacks"]["best"] == 0.5


def test_large_tensors_are_read_when_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = checkpoint()
    save_alone(expected, tmp_path)
    monkeypatch.setattr(sharded_checkpoint, "_SMALL_BYTES", 16)
    found = read_sharded(tmp_path)
    assert is_unread(found["state_dict"]["0.weight"])
    assert not is_unread(found["optimizer_states"][0]["state"][0]["step"])
    save_checkpoint(found, tmp_path / "whole.ckpt")
    assert_same(torch.load(tmp_path / "whole.ckpt", weights_only=True), expected)


def test_each_rank_writes_what_it_owns(tmp_path: Path) -> None:
    expected = checkpoint()
    away = {"0.weight": 1, "2.weight": 1, "1.running_mean": 2}
    left = {(rank, name): expected["state_dict"][name] for name, rank in away.items()} | {
        (2, "exp_avg"): expected["optimizer_states"][0]["state"][2]["exp_avg"]
    }
    reads: list[TensorAddress] = []

    def there(owned: TensorAddress) -> Tensor:
        tensor = left[owned.rank, owned.state or owned.name]

        def read() -> Tensor:
            reads.append(owned)
            return tensor

        return unread_there(TensorSpec.of(tensor, gradient=False), owned, read)

    given = {**expected, "state_dict": expected["state_dict"].copy()}
    tied = there(TensorAddress(1, "0.weight"))
    given["state_dict"]._metadata = expected["state_dict"]._metadata
    given["state_dict"] |= {"0.weight": tied, "2.weight": tied}
    given["state_dict"]["1.running_mean"] = there(TensorAddress(2, "1.running_mean"))
    states = {**expected["optimizer_states"][0]["state"]}
    states[2] = {**states[2], "exp_avg": there(TensorAddress(2, "1.bias", 0, "exp_avg"))}
    given["optimizer_states"] = [
        {**expected["optimizer_states"][0], "state": states},
        expected["optimizer_states"][1],
    ]
    given["callbacks"] = {"best": torch.tensor(0.5), "shown": tied[1:]}
    divided = DividedCheckpoint.of(given)
    owners = {rank: [*owned.values()] for rank, owned in divided.elsewhere.items()}
    assert owners == {
        1: [TensorAddress(1, "0.weight")],
        2: [TensorAddress(2, "1.running_mean"), TensorAddress(2, "1.bias", 0, "exp_avg")],
    }
    shards = [write_shard(tmp_path, 0, divided.here)]
    for rank, owned in divided.elsewhere.items():
        tensors = {key: left[rank, one.state or one.name] for key, one in owned.items()}
        shards.append(write_shard(tmp_path, rank, tensors))
    assert not reads
    write_rest(tmp_path, divided.rest)
    finish(tmp_path, shards)
    assert len([*tmp_path.glob("__*.distcp")]) == 3
    found = read_sharded(tmp_path, weights_only=True)
    assert torch.equal(found["callbacks"].pop("shown"), expected["state_dict"]["0.weight"][1:])
    assert_same(found, expected)


@pytest.mark.parametrize("name", ["meta.pt", ".metadata"])
def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path, name: str) -> None:
    save_alone(checkpoint(), tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(HybridError, match="is no sharded checkpoint"):
        load_checkpoint(tmp_path)


def test_a_disk_that_is_full_is_named(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        for write in (
            lambda: write_shard(tmp_path, 0, {("state_dict", "weight"): torch.ones(100_000)}),
            lambda: write_rest(tmp_path, {"large": torch.ones(100_000)}),
        ):
            with pytest.raises(OSError, match=f"File too large: '{tmp_path}'"):
                write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_host_that_does_not_see_the_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="all hosts must share its file system"):
        write_shard(tmp_path / "other", 1, {})
