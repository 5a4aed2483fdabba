"""What a run does on a driver and on a worker, with a driver, a worker and ranks that only note."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor, nn
from torch.optim import SGD

import lightning_hybrid.run.session as sessions
from lightning_hybrid import HybridGabraStrategy, Plan
from lightning_hybrid._torch.autograd import run_backwards_by
from lightning_hybrid.comm.connections import ConnectionLost
from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.comm.travelling_errors import Failure
from lightning_hybrid.config import Config
from lightning_hybrid.driver.progress import StartProgress
from lightning_hybrid.errors import HybridError
from lightning_hybrid.process import NoWorld, Phase, World
from lightning_hybrid.run.building import BetweenRuns, Building
from lightning_hybrid.run.framework import TrainerFramework
from lightning_hybrid.run.part import Part
from lightning_hybrid.run.run import Run
from lightning_hybrid.run.session import DriverSession

# Lightning's advice on unused devices and loggers
pytestmark = pytest.mark.filterwarnings("ignore")
PLAN = Plan(replicas=1, stages=2, microbatches=2, schedule="gpipe", cuts=("b",))
FAILURE = Failure("rank 1 failed")


@pytest.fixture(autouse=True)
def _backwards_as_ever() -> Iterator[None]:
    """Sessions that a test does not end have backward passes run by them, of later tests too."""
    yield
    run_backwards_by(None)


class Notes:
    """Notes every call of a method, as its name; contexts as their name and its end."""

    CONTEXTS = ("gathered", "suspended", "statistics")

    def __init__(self, notes: list[Any]) -> None:
        self.notes, self.synchronize = notes, True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.context(name) if name in self.CONTEXTS else self.method(name)

    def method(self, name: str) -> Any:
        return lambda *_, **__: self.notes.append(name)

    def context(self, name: str) -> Any:
        @contextmanager
        def entered(**_: Any) -> Iterator[None]:
            self.notes.append(name)
            yield
            self.notes.append(f"end of {name}")

        return entered


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


def make_run(coordinates: Coordinates | None = None, **changes: Any) -> Run:
    module = Net()
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(module)
    trainer.state.fn, trainer.state.status = TrainerFn.FITTING, TrainerStatus.RUNNING
    here = coordinates or Coordinates(0, 1, 2)
    mesh = SimpleNamespace(
        coordinates=here, drivers=None, store=None, survivors=None, statistics=lambda: "group"
    )
    world: Any = SimpleNamespace(coordinates=here, phase=Phase.RUNNING, mesh=mesh)
    fields = {
        "config": Config(),
        "framework": TrainerFramework(trainer),
        "module": module,
        "world": world,
        "device": torch.device("cpu"),
        "precision": trainer.precision_plugin,
        "fitting": True,
        "synchronised": True,
        "building": Building(),
        "stopwatch": None,
        "shared": frozenset(module.state_dict()),
        "plans": {"net": PLAN},
        "progress": StartProgress(None),
    }
    return Run(**{**fields, **changes})


class Driven:
    """A driver's session, and the notes of all that it calls."""

    def __init__(self, run: Run | None = None, parts: Sequence[Part] = ()) -> None:
        self.notes: list[Any] = []
        self.run, self.driver = run or make_run(), Notes(self.notes)
        for part in ("remote", "weights", "gradients", "optimizers", "clipping", "state_dicts"):
            setattr(self.driver, part, Notes(self.notes))
        self.driver.weights.changed = False
        with patch.multiple(
            sessions,
            Driver=lambda *_, **__: self.driver,
            Discovery=lambda *_: Notes(self.notes),
            Synchronised=lambda _: Notes(self.notes).statistics(),
            broadcast_object=lambda _, value: value,
        ):
            self.session = DriverSession(self.run, None, parts)
        self.notes.clear()


def test_a_step_calls_the_users_code_inside_the_statistics() -> None:
    driven = Driven()
    assert driven.session.step(lambda: driven.notes.append("user") or 1.0) == 1.0
    assert driven.notes == ["begin_step", "statistics", "user", "end of statistics", "require"]


def test_a_step_without_a_loss_needs_no_network() -> None:
    driven = Driven()
    assert driven.session.step(lambda: None) is None
    assert "require" not in driven.notes


def test_gradients_are_averaged_after_a_backward() -> None:
    driven = Driven()
    driven.session.backward(lambda: driven.notes.append("autograd"))
    order = ["before_backward", "statistics", "autograd", "end of statistics", "after_backward"]
    assert driven.notes == order


def test_gradients_are_averaged_again_after_an_accumulation_that_failed() -> None:
    driven = Driven()
    context = driven.session.accumulating()
    context.__enter__()
    assert not driven.driver.gradients.synchronize
    assert not context.__exit__(KeyError, KeyError(), None)
    assert driven.driver.gradients.synchronize


def test_a_state_dict_is_of_replicas_that_are_well() -> None:
    driven = Driven()
    state = driven.session.state_dict(driven.run.module, here=True)
    assert driven.notes == [
        "interrupt",
        "check",
        "broadcast_buffers",
        "gathered",
        "end of gathered",
    ]
    torch.testing.assert_close(state, driven.run.module.state_dict())


def test_after_a_failure_a_state_dict_is_what_is_left() -> None:
    driven = Driven()
    driven.run.world.phase = Phase.FAILED
    driven.session.state_dict(driven.run.module, here=True)
    assert driven.notes == ["gathered", "end of gathered"]


def test_other_drivers_take_part_in_a_state_dict_and_get_none() -> None:
    driven = Driven()
    assert driven.session.state_dict(driven.run.module, here=False) == {}
    assert driven.notes == ["interrupt", "check", "broadcast_buffers"]


def test_loaded_weights_go_to_the_workers() -> None:
    driven = Driven()
    with driven.session.loading(driven.run.module):
        driven.notes.append("load")
    assert driven.notes == ["bring", "suspended", "load", "end of suspended", "scatter"]


@pytest.mark.parametrize(
    ("status", "phase", "fitting", "changed", "gathers"),
    [
        (TrainerStatus.RUNNING, Phase.RUNNING, True, False, True),
        (TrainerStatus.RUNNING, Phase.RUNNING, False, False, False),
        (TrainerStatus.RUNNING, Phase.RUNNING, False, True, True),
        (TrainerStatus.INTERRUPTED, Phase.RUNNING, True, False, False),
        (TrainerStatus.RUNNING, Phase.FAILED, True, False, False),
    ],
)
def test_weights_come_back_after_a_run_that_went_well_and_may_have_changed_them(
    status: TrainerStatus, phase: Phase, fitting: bool, changed: bool, gathers: bool
) -> None:
    driven = Driven(make_run(fitting=fitting))
    driven.driver.weights.changed = changed
    driven.run.trainer.state.status, driven.run.world.phase = status, phase
    driven.session.close()
    assert ("bring_all" in driven.notes) is gathers
    assert ("check" in driven.notes) is (gathers and fitting)  # which all drivers do together
    assert driven.notes[-2:] == ["close", "leave_inference"]


def test_what_was_put_into_lightning_is_taken_out_again() -> None:
    run = make_run()
    before = set(vars(run.precision))
    driven = Driven(run)
    run.precision.clip_grad_by_norm(None, 1.0)
    assert driven.notes == ["clip_norm"]
    driven.session.close()
    assert set(vars(run.precision)) == before


@pytest.mark.parametrize(
    ("error", "fitting", "salvages"),
    [
        (ValueError("mine"), True, True),
        (ValueError("mine"), False, False),
        (ConnectionLost("rank 1 is gone"), True, False),
        (KeyboardInterrupt(), True, True),
        (SystemExit(1), True, False),
    ],
)
def test_what_was_trained_is_saved_where_workers_can_answer(
    error: BaseException, fitting: bool, salvages: bool
) -> None:
    driven = Driven(make_run(fitting=fitting))
    driven.notes.clear()
    told: list[Failure] = []
    driven.driver.abort = told.append
    driven.session.fail(FAILURE, error)
    driven.session.abort()
    driven.session.abort()
    assert driven.notes == ["salvage"] * salvages
    assert told == [FAILURE] * 2


def test_workers_hear_of_a_failure_before_the_session_is_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_such_name(*_: Any) -> None:
        raise HybridError("no module is named 'nowhere'")

    driver = Notes([])
    monkeypatch.setattr(sessions, "Driver", lambda *_, **__: driver)
    monkeypatch.setattr(sessions, "Discovery", no_such_name)
    monkeypatch.setattr(sessions, "broadcast_object", lambda _, value: value)
    with pytest.raises(HybridError, match="nowhere"):
        DriverSession(make_run(), None)
    assert driver.notes == ["abort", "close"]


class Noting(Part):
    """A part that notes its hooks, among what the session asks of its driver."""

    def __init__(self, notes: list[Any], name: str = "part") -> None:
        self.notes, self.name = notes, name

    def note(self, hook: str) -> None:
        self.notes.append(f"{self.name}.{hook}")

    def train_loader(self, loader: Any) -> Any:
        return f"{self.name}({loader})"

    def move_batch(self, batch: Any, move: Callable[[Any], Any]) -> Any:
        return f"{self.name}({move(batch)})"

    def new_plans(self) -> dict[str, Plan]:
        self.note("new_plans")
        return {}

    def batch_starts(self, batch: Any) -> None:
        self.note("batch_starts")

    @contextmanager
    def step(self) -> Iterator[None]:
        self.note("step")
        yield
        self.note("end of step")

    def weigh_loss(self, loss: Tensor) -> Tensor:
        return 2 * loss

    def backward_is_over(self) -> None:
        self.note("backward_is_over")

    def gradients_are_averaged(self) -> None:
        self.note("gradients_are_averaged")

    def fence(self) -> None:
        self.note("fence")

    def pause(self) -> None:
        self.note("pause")

    def resume(self) -> None:
        self.note("resume")

    def last_batch_is_over(self) -> None:
        self.note("last_batch_is_over")

    def training_ends(self) -> None:
        self.note("training_ends")

    def close(self) -> None:
        self.note("close")


@pytest.fixture(name="noted")
def _noted(monkeypatch: pytest.MonkeyPatch) -> tuple[Driven, list[Any]]:
    """The driver of a second replica with a part, and what is noted of both and of signals."""
    part = Noting([])
    driven = Driven(make_run(Coordinates(1, 2, 1)), [part])
    part.notes = driven.notes
    monkeypatch.setattr(sessions, "run_pending", lambda *, hold: driven.notes.append("signals"))
    return driven, driven.notes


def test_hooks_around_a_batch_come_in_the_order_of_the_protocol(
    noted: tuple[Driven, list[Any]],
) -> None:
    driven, notes = noted
    driven.session.batch_starts(None)
    assert notes == ["signals", "part.new_plans", "part.batch_starts"]
    notes.clear()
    driven.session.step(lambda: notes.append("user"))
    assert notes == [
        *("begin_step", "part.step", "statistics", "user", "end of statistics"),
        "part.end of step",
    ]


def test_hooks_around_a_backward_come_in_the_order_of_the_protocol(
    noted: tuple[Driven, list[Any]],
) -> None:
    driven, notes = noted
    assert driven.session.weighted(torch.tensor(1.5)) == 3
    driven.session.backward(lambda: notes.append("autograd"))
    assert notes == [
        *("before_backward", "statistics", "autograd", "end of statistics"),
        *("part.backward_is_over", "after_backward", "part.gradients_are_averaged", "signals"),
    ]


def test_hooks_around_a_validation_and_at_the_end_come_in_the_order_of_the_protocol(
    noted: tuple[Driven, list[Any]],
) -> None:
    driven, notes = noted
    driven.session.evaluation_starts(between=True)
    driven.session.validation_ends()
    assert notes == ["interrupt", "broadcast_buffers", "part.pause", "part.resume"]
    notes.clear()
    driven.session.training_ends()
    assert notes == [
        *("part.fence", "part.last_batch_is_over", "signals", "interrupt", "part.training_ends"),
    ]
    driven.session.close()
    assert notes[-3:] == ["close", "leave_inference", "part.close"]
    notes.clear()
    driven.run.world.phase = Phase.FAILED
    driven.session.fence()
    assert notes == []


def test_replicas_that_agree_to_end_handle_signals_only_before_a_batch(
    noted: tuple[Driven, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, notes = noted
    monkeypatch.setattr(Noting, "agrees_to_end", True)
    for replica in range(2):
        driven = Driven(make_run(Coordinates(replica, 2, 1)), [Noting([])])
        monkeypatch.setattr(sessions, "run_pending", lambda *, hold: notes.append("signals"))
        driven.session.batch_starts(None)
        driven.session.backward(lambda: None)
    assert notes == ["signals", "signals"]


def test_only_in_training_parts_have_a_say_in_loaders_and_batches() -> None:
    driven = Driven(parts=[Noting([], "first"), Noting([], "second")])
    loaded = driven.session.train_loader("loader"), driven.session.move_batch(1, str)
    assert loaded == ("loader", "1")
    driven.run.trainer.training = True
    loaded = driven.session.train_loader("loader"), driven.session.move_batch(1, str)
    assert loaded == ("second(first(loader))", "second(first(1))")


@pytest.mark.parametrize("reason", ["", "'net.0' has another hook"])
def test_parts_begin_again_where_stages_are_cut_anew(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Any] = []
    other = replace(PLAN, cuts=("c",))

    class CutsAnew(Part):
        def begin(self, driver: Any) -> None:
            heard.append("begin")

        def new_plans(self) -> dict[str, Plan]:
            return {"net": other}

        def cuts_decided(self, plans: Any, reason: str) -> None:
            heard.append((dict(plans), reason, driven.run.plans["net"].cuts))

    driven = Driven(parts=[CutsAnew()])
    assert heard == ["begin"]
    for name in ("Driver", "Discovery"):
        monkeypatch.setattr(sessions, name, lambda *_, **__: driven.driver)
    monkeypatch.setattr(sessions, "gather_objects", lambda *_: ["", reason])
    monkeypatch.setattr(sessions, "bring_here", lambda _: None)
    networks: Any = driven.session._networks
    networks.changed = driven.driver.lacking = lambda: ""
    driven.session.batch_starts(None)
    # what is said names the cuts that were in force
    assert heard[1] == ({"net": other}, reason, ("b",))
    assert heard[2:] == ([] if reason else ["begin"])
    assert driven.run.plans["net"] is (PLAN if reason else other)


def test_between_runs_a_module_is_whole_on_the_rank_that_saves() -> None:
    module = Net()
    between = BetweenRuns(NoWorld(), Building())
    torch.testing.assert_close(between.state_dict(module, here=True), module.state_dict())
    assert between.state_dict(module, here=False) == {}
    optimizer = SGD(module.parameters(), lr=0.1)
    state = between.optimizer_state(module, optimizer, here=True)
    assert state == optimizer.state_dict()
    assert between.optimizer_state(module, optimizer, here=False) == {}


def test_a_failure_before_the_run_is_told_to_workers_that_serve_already() -> None:
    told: list[Any] = []
    ranks = World.__new__(World)
    ranks.take_coordinates(
        cast(Any, SimpleNamespace(mesh=SimpleNamespace(say_goodbye=told.append)))
    )
    failure = Failure("rank 0 failed")
    BetweenRuns(ranks, Building()).fail(failure, ValueError())
    assert told == [failure]
    BetweenRuns(NoWorld(), Building()).fail(failure, ValueError())  # nobody is known


def test_what_needs_a_run_says_so_outside_of_it() -> None:
    strategy = HybridGabraStrategy()
    Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)
    with pytest.raises(HybridError, match="is in no run"):
        strategy.training_step()
    with pytest.raises(HybridError, match="has not met the other ranks"):
        strategy.on_train_start()
    with pytest.raises(HybridError, match="lightning_module is not set"):
        strategy.full_state_dict()
    assert strategy.broadcast("alone") == "alone"
    strategy.barrier()
