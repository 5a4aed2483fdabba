"""Replica 0 gets the states of all others, bit for bit, in a file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import gloo_groups, together

from lightning_hybrid.state import divided_optimizer_states, tensor_file
from lightning_hybrid.state.divided_optimizer_states import StatesByName, gather_states


def states(rank: int) -> StatesByName:
    generator = torch.Generator().manual_seed(rank)
    turned = torch.randn(4, 3, 2, 2, generator=generator).to(memory_format=torch.channels_last)
    return {
        f"weight{rank}": {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn(70, 3, generator=generator),
            "square": turned,
            "short": torch.randn(5, generator=generator).bfloat16(),
            "none": None,
            "count": rank,
            "empty": torch.empty(0),
            "rows": torch.eye(3).to_sparse(),
        },
        f"bias{rank}": {},
    }


@pytest.mark.parametrize("piece", [tensor_file.PIECE_BYTES, 64])
def test_states_of_all_replicas_are_there_as_they_were(
    tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for end in (divided_optimizer_states, tensor_file):
        monkeypatch.setattr(end, "PIECE_BYTES", piece)
    groups: list[Any] = gloo_groups(60)
    found, nothing = together(
        lambda: gather_states(groups[0], states(0), str(tmp_path)),
        lambda: gather_states(groups[1], states(1), str(tmp_path)),
    )
    assert nothing == {}
    wanted = states(1)
    assert found.keys() == wanted.keys()
    for key, value in wanted["weight1"].items():
        mine = found["weight1"][key]
        if isinstance(value, torch.Tensor) and not value.is_sparse:
            assert torch.equal(mine, value)
            assert (mine.dtype, mine.stride()) == (value.dtype, value.stride())
        elif isinstance(value, torch.Tensor):
            assert torch.equal(mine.to_dense(), value.to_dense())
        else:
            assert mine == value
    assert not list(tmp_path.iterdir())
