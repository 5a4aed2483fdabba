"""A checkpoint that is read tensor by tensor is the one that was saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hybrid.remote import is_unread
from lightning_hybrid.state import tensor_file
from lightning_hybrid.state.tensor_file import NoAddresses, load_unread
from lightning_hybrid.state.whole_checkpoint import load_checkpoint


class Holder:
    """No container that a checkpoint is searched through."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256))
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.randn(8, 256)).square().sum().backward()
    optimizer.step()
    return module, optimizer


def saved(folder: Path) -> tuple[Path, dict[str, Any]]:
    module, optimizer = trained()
    checkpoint = {
        "state_dict": module.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "part": torch.arange(2.0**16).view(256, 256)[:, 3:].t(),
        "epoch": 3,
    }
    torch.save(checkpoint, folder / "saved.ckpt")
    return folder / "saved.ckpt", checkpoint


def test_large_tensors_have_no_memory_and_all_are_as_they_were(tmp_path: Path) -> None:
    path, checkpoint = saved(tmp_path)
    loaded = load_unread(path, weights_only=True)
    assert is_unread(loaded["state_dict"]["0.weight"])
    assert not is_unread(loaded["state_dict"]["0.bias"])
    assert loaded["part"].stride() == checkpoint["part"].stride()
    assert torch.equal(loaded["part"].clone(), checkpoint["part"])
    assert loaded["epoch"] == 3
    assert loaded["state_dict"]._metadata == checkpoint["state_dict"]._metadata
    assert [*tmp_path.iterdir()] == [path]


def test_a_module_and_an_optimizer_train_on_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = saved(tmp_path)
    monkeypatch.setattr(tensor_file, "free_addresses", lambda: 0)
    loaded = load_checkpoint(path)
    assert is_unread(loaded["state_dict"]["0.weight"])
    pairs = [trained(), trained()]
    with torch.no_grad():
        for parameter in pairs[0][0].parameters():
            parameter.zero_()
    pairs[0][0].load_state_dict(loaded["state_dict"])
    pairs[0][1].load_state_dict(loaded["optimizer_states"][0])
    for module, optimizer in pairs:
        optimizer.zero_grad()
        module(torch.ones(8, 256).mul(torch.arange(8.0)[:, None])).sum().backward()
        optimizer.step()
    for found, expected in zip(*(module.parameters() for module, _ in pairs)):
        assert torch.equal(found, expected)


def test_what_is_large_and_in_no_container_is_refused(tmp_path: Path) -> None:
    torch.save({"held": Holder(torch.ones(2**16))}, tmp_path / "saved.ckpt")
    with pytest.raises(NoAddresses, match="1 large tensors in objects"):
        load_unread(tmp_path / "saved.ckpt", weights_only=False)
