"""Of a mapped checkpoint only what was changed stays in memory."""

import sys
from pathlib import Path

import pytest
import torch

from lightning_hybrid.state.tensor_file import let_go_of_checkpoints, remember_mapped

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def in_memory(path: Path) -> int:
    """Bytes of a file that this process has in memory."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:  # "7f00-7f10 rw-p 0000 08:01 123 /path"
            ours = line.endswith(f" {path}")
        elif ours and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def test_pages_that_were_read_go_back_and_what_was_written_stays(tmp_path: Path) -> None:
    path, size = (tmp_path / "saved.ckpt").resolve(), 2**20
    torch.save({"read": torch.ones(size), "written": torch.ones(size)}, path)
    loaded = torch.load(path, mmap=True)
    remember_mapped(path)
    assert loaded["read"].sum() == size
    loaded["written"].add_(1)
    assert in_memory(path) >= 8 * size
    let_go_of_checkpoints()
    assert in_memory(path) < 5 * size
    assert loaded["read"].sum() == size
    assert loaded["written"].sum() == 2 * size
