"""What a run returns on its driver it returns on the workers, if there can be a copy of it."""

import pickle
import threading
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_hybrid.results import Snapshot, collect_results


def on_a_worker(returned: Any) -> Any:
    """What ``trainer.predict`` returns on a worker if it returns this on its driver."""
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(LightningModule())
    results = collect_results(trainer, returned, Snapshot(trainer))
    return pickle.loads(pickle.dumps(results)).value()


def test_plain_values_are_copied() -> None:
    found = on_a_worker([{"logits": torch.arange(3), "name": "x"}, None])
    assert found[0]["logits"].tolist() == [0, 1, 2]
    assert found[0]["name"] == "x"
    assert found[1] is None


@pytest.mark.parametrize("returned", [[threading.Lock()], [lambda: 1]])
def test_what_cannot_be_copied_is_none_with_a_warning(returned: list[Any]) -> None:
    with pytest.warns(UserWarning, match=r"None on this one.*(Lock|lambda|pickle)"):
        assert on_a_worker(returned) is None
