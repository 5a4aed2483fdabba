"""What workers write for their driver is what they own, as it is then; nothing is left of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from driven import Replica, batches, loss_of, model
from torch import nn

from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.driver.weights import FilesOfWorkers
from lightning_hybrid.state.tensor_file import FilesOfWorker, NoRoom, put_mapped, received


def test_the_driver_maps_what_the_workers_own(replicas: Any, tmp_path: Path) -> None:
    replica: Replica = replicas(model(), (1, 2, 0))
    loss_of(replica.model, replica(batches(1)[0])).backward()
    replica.driver.gradients.after_backward()
    files = FilesOfWorkers(replica.driver.commands, str(tmp_path), Coordinates(0, 1, 3))
    found = files.tensors(at_end=True)
    for rank, file in zip((1, 2), found, strict=True):
        named = dict(replica.modules[rank].named_parameters())
        assert file["weights"].keys() == file["gradients"].keys()
        assert file["weights"]
        for name, value in file["weights"].items():
            assert torch.equal(value, named[name])
            assert torch.equal(file["gradients"][name], named[name].grad)
    assert [*tmp_path.iterdir()] == []


def test_without_room_there_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_hybrid.state.tensor_file.TensorFile", _full)
    assert FilesOfWorker().answer([torch.ones(2)], "").value is None


@pytest.mark.parametrize("in_memory", [False, True])
def test_tensors_that_are_sent_keep_their_strides_and_what_is_no_dense_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    sparse, turned = torch.eye(3).to_sparse(), torch.randn(2, 3, 4).permute(2, 0, 1)
    value = {"a": [turned, 3, torch.empty(0)], "b": {"c": torch.ones(2), "d": sparse}}
    answer = FilesOfWorker().answer(value, None)
    if in_memory:
        monkeypatch.setattr("lightning_hybrid.state.tensor_file.os.access", lambda *_: False)
        monkeypatch.setattr("lightning_hybrid.state.tensor_file.TemporaryFile", _full)
    # (as messages carry them)
    found = received(replace(answer, tensors=[(n, t.contiguous()) for n, t in answer.tensors]), "")
    assert torch.equal(found["a"][0], turned)
    assert found["a"][0].stride() == turned.stride()
    assert found["a"][1:] == [3, value["a"][2]]
    assert torch.equal(found["b"]["c"], torch.ones(2))
    assert found["b"]["d"] is sparse


def test_a_quota_that_is_noticed_while_writing_is_a_lack_of_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = FilesOfWorker().answer([torch.ones(2)], None)
    monkeypatch.setattr("lightning_hybrid.state.tensor_file.TensorFile.store", _full)
    with pytest.raises(NoRoom, match="No space left"):
        received(answer, "")


def _full(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_weight_whose_memory_is_shown_elsewhere_keeps_it() -> None:
    module = nn.Linear(2, 2)
    shown = module.weight.detach()
    address = module.bias.data_ptr()
    put_mapped(module, {"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    assert shown.eq(1).all()
    assert module.bias.eq(1).all()
    assert module.bias.data_ptr() != address
