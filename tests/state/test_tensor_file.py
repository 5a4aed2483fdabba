"""What a process has written to a file, others read where it is, and change for themselves."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hybrid.state import tensor_file
from lightning_hybrid.state.tensor_file import TensorFile, Ticket, read_files

VALUES: dict[str, Tensor] = {
    "matrix": torch.arange(12.0).view(3, 4),
    "channels last": torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "part": torch.arange(12).view(3, 4)[:, 1:3],
    "bfloat16": torch.arange(5.0).bfloat16(),
    "complex": torch.arange(3.0) * 1j,
    "bool": torch.tensor([True, False]),
    "number": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Callable[[Any], Ticket]]:
    """Writes a value to a file that is open until the end of the test."""
    with ExitStack() as stack:

        def written(value: Any) -> Ticket:
            file = TensorFile(str(tmp_path))
            stack.callback(file.close)
            return file.write(value)

        yield written


def test_all_kinds_of_tensors_come_back_as_they_were(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 16)
    [found] = read_files([write({"values": VALUES, "step": 3})]) or []
    assert found["step"] == 3
    for name, value in VALUES.items():
        assert torch.equal(found["values"][name].to_dense(), value.to_dense()), name
        assert found["values"][name].dtype == value.dtype
    assert found["values"]["channels last"].stride() == VALUES["channels last"].stride()


def test_a_change_is_the_readers_alone(write: Any) -> None:
    ticket = write([torch.ones(3)])
    [[mine]], [[theirs]] = (read_files([ticket]) or [] for _ in range(2))
    mine.add_(1)
    assert mine.tolist() == [2, 2, 2]
    assert theirs.tolist() == [1, 1, 1]


def test_it_is_read_after_its_writer_is_gone_and_leaves_nothing(tmp_path: Path) -> None:
    file = TensorFile(str(tmp_path))
    ticket = file.write([torch.ones(3)])
    [[value]] = read_files([ticket]) or []
    file.close()
    assert value.tolist() == [1, 1, 1]
    assert [*tmp_path.iterdir()] == []
    assert read_files([ticket]) is None


def test_another_file_at_its_path_is_not_taken_for_it(write: Any) -> None:
    ticket, elsewhere = write([torch.ones(3)]), write([torch.zeros(3)])
    assert read_files([replace(ticket, path=elsewhere.path)]) is None


def test_a_pipe_at_its_path_is_not_read(write: Any) -> None:
    """In a container on another host a process of the same number may have one there."""
    reads, writes = os.pipe()
    os.write(writes, b"words for somebody")
    assert read_files([replace(write([torch.ones(3)]), path=f"/proc/self/fd/{reads}")]) is None
    assert os.read(reads, 100) == b"words for somebody"
    for end in (reads, writes):
        os.close(end)


def test_where_nothing_can_be_written_the_temporary_folder_has_it(tmp_path: Path) -> None:
    file = TensorFile(str(tmp_path / "missing"))
    assert read_files([file.write([torch.ones(3)])]) is not None
    file.close()
