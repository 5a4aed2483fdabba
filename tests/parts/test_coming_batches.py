"""The train loader under a schedule that begins with later batches early."""

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hybrid.errors import NetworkError
from lightning_hybrid.parts.coming_batches import ComingBatch, ComingBatches, ComingLoader


class Loader:
    """Counts what was taken from it; a batch may be an error."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.count, self.fails_at, self.given = count, fails_at, 0
        self.sampler, self.num_workers = "mine", 1

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.given, self.count):
            if number == self.fails_at:
                raise ValueError("on purpose")
            self.given = number + 1
            yield torch.tensor(float(number))
        self.given = 0


class Trained:
    """What a Trainer does with its loader."""

    def __init__(self, loader: Any, barrier: Any = "epoch", **trainer: Any) -> None:
        usual = {
            "training": True,
            "num_training_batches": len(loader),
            "accumulate_grad_batches": 1,
            "max_steps": -1,
            "global_step": 0,
            "precision_plugin": SimpleNamespace(convert_input=lambda batch: batch + 100),
            "fit_loop": SimpleNamespace(epoch_loop=SimpleNamespace(batch_idx=-1)),
        }
        self.trainer: Any = SimpleNamespace(**{**usual, **trainer})
        self.coming = ComingBatches(self.trainer, barrier)
        self.loader = self.trainer.train_dataloader = self.coming.train_loader(loader)
        self.moved: list[float] = []
        self.batches = iter(self.loader)

    def step(self, look: int) -> tuple[float, list[float]]:
        """A step that looks at later batches. Returns its own, and those."""
        batch = next(self.batches)
        if batch < 100:
            batch = self.trainer.precision_plugin.convert_input(batch)
        mine = self.coming.move_batch(batch, self.move)
        self.trainer.fit_loop.epoch_loop.batch_idx += 1
        with self.coming.step():
            assert self.coming.ahead(0).tensors[0] is mine
            later = [self.coming.ahead(count) for count in range(1, look + 1)]
        return mine.item(), [each.tensors[0].item() for each in later if each]

    def move(self, batch: Tensor) -> Tensor:
        self.moved.append(batch.item())
        return batch + 1000


def test_later_batches_are_seen_as_they_will_come_and_each_is_made_once() -> None:
    run = Trained(Loader(5))
    seen = [run.step(2) for _ in range(5)]
    assert [own for own, _ in seen] == [1100, 1101, 1102, 1103, 1104]
    assert [later for _, later in seen] == [[1101, 1102], [1102, 1103], [1103, 1104], [1104], []]
    assert run.moved == [100, 101, 102, 103, 104]
    with pytest.raises(StopIteration):
        next(run.batches)


@pytest.mark.parametrize(
    ("barrier", "trainer", "expected"),
    [
        ("step", {"accumulate_grad_batches": 3}, [2, 1, 0, 2, 1, 0, 1, 0]),
        ("epoch", {"accumulate_grad_batches": 3}, [3, 3, 3, 3, 3, 2, 1, 0]),
        ("epoch", {"num_training_batches": 4}, [3, 2, 1, 0]),
        ("epoch", {"max_steps": 5, "global_step": 2}, [2]),
        ("epoch", {"max_steps": 3, "global_step": 2, "accumulate_grad_batches": 3}, [2]),
    ],
)
def test_no_batch_is_seen_across_the_barrier(
    barrier: str, trainer: dict[str, Any], expected: list[int]
) -> None:
    run = Trained(Loader(8), barrier, **trainer)
    assert [len(run.step(3)[1]) for _ in expected] == expected


def test_an_error_of_the_loader_comes_in_its_turn() -> None:
    run = Trained(Loader(5, fails_at=2))
    assert run.step(3) == (1100, [1101])
    assert run.step(3) == (1101, [])
    with pytest.raises(ValueError, match="on purpose"):
        run.step(3)


def test_who_looks_at_the_loader_in_a_callback_disturbs_nobody() -> None:
    run = Trained(Loader(4))
    seen = []
    for _ in range(4):
        seen.append(run.step(2)[0])
        given, run.loader.given = run.loader.given, 0
        assert next(iter(run.loader)) == 0
        run.loader.given = given
    assert seen == [1100, 1101, 1102, 1103]


def test_the_wrapper_is_the_loader_in_all_else() -> None:
    loader = Loader(3)
    wrapped = Trained(loader).loader
    assert (len(wrapped), wrapped.sampler) == (3, "mine")
    wrapped.sampler = "other"
    assert loader.sampler == "other"
    copy = pickle.loads(pickle.dumps(wrapped))
    assert isinstance(copy, ComingLoader)
    assert [value.item() for value in copy] == [0, 1, 2]


def test_a_loader_made_for_validation_in_the_middle_of_training_is_not_that_of_training() -> None:
    run = Trained(Loader(3))
    assert len(run.coming.train_loader(Loader(2))) == 2  # as the Tuner has it made
    assert [run.step(1) for _ in range(3)] == [(1100, [1101]), (1101, [1102]), (1102, [])]


def test_several_loaders_under_a_streamed_schedule_are_refused() -> None:
    run = Trained(Loader(3))
    run.trainer.train_dataloader = [run.loader, run.loader]
    with pytest.raises(NetworkError, match="one train loader"):
        run.step(0)


def test_a_loader_without_worker_processes_under_a_streamed_schedule_is_refused() -> None:
    run = Trained(Loader(3))
    run.loader.num_workers = 0
    with pytest.raises(NetworkError, match=r"num_workers=1.*schedule='gpipe'"):
        run.step(0)


def test_a_loader_with_a_state_under_a_streamed_schedule_is_refused() -> None:
    class Resumable(Loader):
        def state_dict(self) -> dict[str, int]:
            return {"given": self.given}

    with pytest.raises(NetworkError, match=r"Resumable\.state_dict.*schedule='gpipe'"):
        Trained(Resumable(3)).step(0)


def test_tensors_of_another_class_are_known_as_the_network_gets_them() -> None:
    class Named(Tensor):
        pass

    batch, x = ComingBatch(None, None), torch.ones(2).as_subclass(Named)
    assert batch.make_ready(lambda raw: raw, {"x": x})["x"] is x
    [found] = batch.tensors
    assert type(found) is Tensor
    assert found.data_ptr() == x.data_ptr()
