"""What workers write for their driver is what they own, as it is then; nothing is left of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from driven import Replica, batches, loss_of, model
from torch import nn

from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.driver.weights import FilesOfWorkers
from lightning_hybrid.state.tensor_file import FilesOfWorker, put_mapped


def test_the_driver_maps_what_the_workers_own(replicas: Any, tmp_path: Path) -> None:
    replica: Replica = replicas(model(), (1, 2, 0))
    loss_of(replica.model, replica(batches(1)[0])).backward()
    replica.driver.gradients.after_backward()
    files = FilesOfWorkers(replica.driver.commands, str(tmp_path), Coordinates(0, 1, 3))
    found = files.tensors(at_end=True)
    assert found is not None
    for rank, file in zip((1, 2), found, strict=True):
        named = dict(replica.modules[rank].named_parameters())
        assert file["weights"].keys() == file["gradients"].keys()
        assert file["weights"]
        for name, value in file["weights"].items():
            assert torch.equal(value, named[name])
            assert torch.equal(file["gradients"][name], named[name].grad)
    assert [*tmp_path.iterdir()] == []


def test_without_room_there_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lightning_hybrid.state.tensor_file.TensorFile", full)
    assert FilesOfWorker(nn.Module()).write([torch.ones(2)], "") is None


def test_a_weight_whose_memory_is_shown_elsewhere_keeps_it() -> None:
    module = nn.Linear(2, 2)
    shown = module.weight.detach()
    address = module.bias.data_ptr()
    put_mapped(module, {"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    assert shown.eq(1).all()
    assert module.bias.eq(1).all()
    assert module.bias.data_ptr() != address
