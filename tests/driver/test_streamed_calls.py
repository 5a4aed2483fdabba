"""Streamed schedules train as their formulas say: real stages, compared with serial models."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from driven import Model, Replica, let_go, loss_of
from orders import Part
from orders import streamed as orders_of
from planned import planned
from serial_schedules import in_stages, train_serially
from torch import Tensor, nn

from lightning_hybrid.comm.connections import ConnectionLost
from lightning_hybrid.comm.protocol import GiveFailure
from lightning_hybrid.comm.travelling_errors import Failure
from lightning_hybrid.driver.streamed_calls import Batches
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.schedules import STREAMED
from lightning_hybrid.stage import backward_pass, forward_pass
from lightning_hybrid.stage.backward_pass import BackwardPass
from lightning_hybrid.stage.forward_pass import ForwardPass
from lightning_hybrid.stage.random_numbers import generators_of_microbatch
from lightning_hybrid.stage.rank_stages import StageOptions

slow = pytest.mark.conformance
STEPS = 30
DEVICES = {2: (1, 0), 3: (1, 2, 0), 4: (1, 2, 3, 0)}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
}


@dataclass(eq=False)
class One:
    """A batch of one tensor."""

    tensors: Sequence[Tensor]


class Coming(Batches):
    """Batches that are all known, between two barriers."""

    def __init__(self, values: Sequence[Tensor], epoch: int) -> None:
        self.batches, self.epoch = [One([value]) for value in values], epoch
        self.now: int | None = None

    def ahead(self, count: int) -> One | None:
        if self.now is None:
            return None
        number = self.now + count
        within = number // self.epoch == self.now // self.epoch
        return self.batches[number] if within and number < len(self.batches) else None


def model() -> Model:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(3, 3), nn.Tanh())]
    return Model(nn.Sequential(*layers)).double()


def values(count: int = STEPS, size: int = 4) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.randn(count, size, 3, dtype=torch.float64))


Streamed = Callable[..., tuple[Replica, Coming]]


@pytest.fixture
def streamed() -> Iterator[Streamed]:
    """Makes replicas under a streamed schedule."""
    made: list[Replica] = []

    def make(
        module: Model,
        schedule: str,
        stages: int,
        inputs: Sequence[Tensor],
        epoch: int = STEPS,
        ends: Sequence[int] = (),
        timeout_s: float = 60.0,
        **options: Any,
    ) -> tuple[Replica, Coming]:
        coming = Coming(inputs, epoch)
        made.append(
            Replica(
                module,
                inputs[0],
                DEVICES[stages],
                parts=1,
                timeout_s=timeout_s,
                schedule=schedule,
                ends=ends,
                batches=coming,
                options=StageOptions(**options),
            )
        )
        return made[-1], coming

    yield make
    for replica in made:
        let_go(replica)


def train(
    replica: Replica,
    coming: Coming,
    optimizer: torch.optim.Optimizer,
    *,
    window: int = 1,
    after: Callable[[int], object] = lambda _: None,
) -> None:
    driver = replica.driver
    driver.optimizers.connect([optimizer])
    for number, batch in enumerate(coming.batches):
        coming.now = number
        driver.begin_step(number)
        driver.gradients.synchronize = (number + 1) % window == 0
        loss = loss_of(replica.model, replica(batch.tensors[0]))
        coming.now = None
        if number % window == 0:
            optimizer.zero_grad()
        driver.gradients.before_backward()
        loss.backward()
        driver.gradients.after_backward()
        if (number + 1) % window == 0:
            optimizer.step()
        after(number)
    driver.interrupt()


def square_gradient(output: Tensor) -> Tensor:
    return 2 * output / output.numel()


def compare(found: Model, expected: Model) -> None:
    for name, value in expected.net.state_dict().items():
        torch.testing.assert_close(found.net.state_dict()[name], value, rtol=0, atol=1e-9)


def frozen_scale(module: Model) -> Model:
    module.scale.requires_grad_(False)  # the serial models know the network alone
    return module


@pytest.mark.parametrize("stages", [3, *(pytest.param(number, marks=slow) for number in (2, 4))])
@pytest.mark.parametrize("weights", ["stash", "recompute", "current"])
@pytest.mark.parametrize(
    "name", ["fdg", *(pytest.param(name, marks=slow) for name in ("pipedream", "ddg", "akintoye"))]
)
def test_a_delayed_schedule_trains_as_its_serial_model(
    streamed: Streamed, name: str, weights: Any, stages: int
) -> None:
    kinds = {"plain": partial(torch.optim.SGD, lr=0.05)} if name == "akintoye" else OPTIMIZERS
    for make in kinds.values():
        module, reference = frozen_scale(model()), model()
        train_serially(
            in_stages(reference.net, stages),
            make(reference.net.parameters()),
            values(),
            square_gradient,
            STREAMED[name].look_aheads(stages),
            weights,
        )
        replica, coming = streamed(module, name, stages, values(), delayed_weights=weights)
        train(replica, coming, make(module.parameters()))
        replica.end()
        compare(module, reference)


@pytest.mark.parametrize("name", ["pipedream", "fdg"])
def test_a_delayed_schedule_accumulates_windows_with_rates_that_change(
    streamed: Streamed, name: str
) -> None:
    """Two batches to a step; every step has its own learning rate."""
    module, reference = frozen_scale(model()), model()
    make, rates = OPTIMIZERS["momentum"], [0.05 / (1 + batch // 2) for batch in range(STEPS)]
    train_serially(
        in_stages(reference.net, 3),
        make(reference.net.parameters()),
        values(),
        square_gradient,
        STREAMED[name].look_aheads(3),
        window=2,
        rates=rates,
    )
    optimizer = make(module.parameters())

    def next_rate(number: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rates[min(number + 1, STEPS - 1)]

    next_rate(-1)
    replica, coming = streamed(module, name, 3, values())
    train(replica, coming, optimizer, window=2, after=next_rate)
    replica.end()
    compare(module, reference)


def test_gradient_shrinking_multiplies_at_every_cut(streamed: Streamed) -> None:
    module, reference = frozen_scale(model()), model()
    make = OPTIMIZERS["momentum"]
    ahead = STREAMED["fdg"].look_aheads(3)
    stages, optimizer = in_stages(reference.net, 3), make(reference.net.parameters())
    train_serially(stages, optimizer, values(), square_gradient, ahead, shrink=0.5)
    replica, coming = streamed(module, "fdg", 3, values(), shrink=0.5)
    train(replica, coming, make(module.parameters()))
    replica.end()
    compare(module, reference)


def test_paper_two_is_fdg_that_recomputes_on_merged_partitions(
    streamed: Streamed,
) -> None:
    """The reading of Akintoye et al. 2023 that is built here."""
    plan = planned(
        names=[f"{2 * k}" for k in range(4)],
        forward_s=[1.0] * 4,
        backward_s=[2.0] * 4,
        cut_bytes=[1.0, 9.0, 1.0],  # the middle cut is closed
        parameters=[1] * 4,
        layers=[2] * 4,
        replicas=1,
        stages=3,
        microbatches=1,
        schedule="fdg",
        allocation="merging",
        bandwidth_bytes_per_s=1.0,
    )
    assert plan.cuts == ("2", "6")
    assert plan.delays == (3, 1, 0)
    module, reference = frozen_scale(model()), model()
    make = OPTIMIZERS["momentum"]
    train_serially(
        [reference.net[0:2], reference.net[2:6], reference.net[6:8]],
        make(reference.net.parameters()),
        values(),
        square_gradient,
        plan.delays,
        "recompute",
    )
    replica, coming = streamed(
        module, "fdg", 3, values(), ends=(1, 3, 4), delayed_weights="recompute"
    )
    train(replica, coming, make(module.parameters()))
    replica.end()
    compare(module, reference)


@pytest.mark.parametrize("name", ["pipedream", "fdg"])
def test_epochs_evaluations_and_interruptions_begin_the_stream_anew(
    streamed: Streamed, name: str
) -> None:
    """Nothing is under way at the end of an epoch, in an evaluation, or where weights are saved."""
    module, reference = frozen_scale(model()), model()
    make = OPTIMIZERS["AdamW"]
    replica, coming = streamed(module, name, 3, values(), epoch=12)
    # captured now: while the driver captures, an AdamW in another thread of its process takes its
    # corrections for tensors in float32
    with torch.no_grad():
        replica(values()[0])
    seen: dict[int, Tensor] = {}

    def after(number: int) -> None:
        if number == 5:
            replica.driver.interrupt()
        if number in (7, 20):
            with torch.no_grad():
                seen[number] = replica(values()[0])
        if number == 15:  # by hand
            with torch.no_grad():
                module.net[0].weight.mul_(1.5)

    train(replica, coming, make(module.parameters()), after=after)
    optimizer = make(reference.net.parameters())
    step, calls = optimizer.step, []

    def step_and_change() -> None:
        step()
        calls.append(None)
        if len(calls) == 16:
            with torch.no_grad():
                reference.net[0].weight.mul_(1.5)
        if len(calls) - 1 in seen:
            with torch.no_grad():
                expected = reference.net(values()[0])
            torch.testing.assert_close(seen[len(calls) - 1], expected, rtol=0, atol=1e-9)

    optimizer.step = step_and_change
    ahead = STREAMED[name].look_aheads(3)
    restarts = (6, 8, 12, 16, 21, 24)
    train_serially(
        in_stages(reference.net, 3), optimizer, values(), square_gradient, ahead, restarts=restarts
    )
    replica.end()
    compare(module, reference)


@pytest.mark.parametrize("stages", [2, 3])
def test_1f1b_is_accumulation_on_one_device_bit_for_bit(streamed: Streamed, stages: int) -> None:
    window, inputs = 4, values(24)
    module = model()
    reference = deepcopy(module)
    optimizer = OPTIMIZERS["AdamW"](reference.parameters())
    for number, value in enumerate(inputs):
        if number % window == 0:
            optimizer.zero_grad()
        loss_of(reference, reference.net(value)).backward()
        if (number + 1) % window == 0:
            optimizer.step()
    replica, coming = streamed(module, "1f1b_stream", stages, inputs, epoch=window)
    train(replica, coming, OPTIMIZERS["AdamW"](module.parameters()), window=window)
    replica.end()
    for name, value in reference.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name


def test_1f1b_that_steps_in_the_middle_of_a_window_begins_it_anew(streamed: Streamed) -> None:
    """As `trainer.accumulate_grad_batches` that a callback makes smaller does."""
    module, inputs = frozen_scale(model()), values(8)
    module.net[0].requires_grad_(False)  # torch does not see that its stage has run ahead
    reference = deepcopy(module)
    optimizer = OPTIMIZERS["momentum"](p for p in reference.parameters() if p.requires_grad)
    for value in inputs:
        optimizer.zero_grad()
        loss_of(reference, reference.net(value)).backward()
        optimizer.step()
    replica, coming = streamed(module, "1f1b_stream", 3, inputs, epoch=4)
    trained = (p for p in module.parameters() if p.requires_grad)
    train(replica, coming, OPTIMIZERS["momentum"](trained), window=1)
    replica.end()
    compare(module, reference)


def test_forwards_of_1f1b_begin_before_the_backwards_of_earlier_batches(
    streamed: Streamed,
) -> None:
    replica, coming = streamed(model(), "1f1b_stream", 3, values(4), epoch=4)
    ran: list[str] = []
    worker = replica.workers[1]
    for command in ("_forward", "_backward"):
        carry_out, kind = getattr(worker, command), command[1].upper()

        def noted(order: Any, carry_out: Any = carry_out, kind: str = kind) -> None:
            ran.append(f"{kind}{len([r for r in ran if r[0] == kind])}")
            carry_out(order)

        for known in worker._handlers:
            if worker._handlers[known] == carry_out:
                worker._handlers[known] = noted
    train(replica, coming, torch.optim.SGD(replica.model.parameters(), lr=0.1), window=4)
    replica.end()
    order = orders_of(STREAMED["1f1b_stream"], 3, 4)[0]
    assert ran == [("F" if w.part is Part.FORWARD else "B") + str(w.microbatch) for w in order]


class Normalised(nn.Module):
    """Batch statistics and random numbers in each stage."""

    captured_once = True

    def __init__(self, *, random: bool) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for _ in range(4):
            parts += [nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh()]
            parts += [nn.Dropout(0.3)] if random else []
        self.parts = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)


def normalised(*, random: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(Normalised(random=random)).double()


@pytest.mark.parametrize(("name", "weights"), [("1f1b_stream", "stash"), ("fdg", "recompute")])
def test_batch_statistics_are_those_of_the_batches_that_had_their_turn(
    streamed: Streamed, name: str, weights: Any
) -> None:
    """At a learning rate of 0 each forward is the same on one device."""
    module, inputs = normalised(), values(8)
    reference = deepcopy(module)
    replica, coming = streamed(module, name, 3, inputs, epoch=8, delayed_weights=weights)
    reference.net(inputs[0])  # the capture has called it, too
    buffer = "parts.1.running_mean"
    seen: list[Tensor] = []

    def after(number: int) -> None:
        seen.append(module.net.get_buffer(buffer).clone())

    optimizer, window = (
        torch.optim.SGD(module.parameters(), lr=0.0),
        8 if name == "1f1b_stream" else 1,
    )
    train(replica, coming, optimizer, window=window, after=after)
    replica.end()
    for value, found in zip(inputs, seen):
        reference.net(value)
        torch.testing.assert_close(found, reference.net.get_buffer(buffer), rtol=0, atol=1e-12)
    for key, value in reference.net.state_dict().items():
        torch.testing.assert_close(module.net.state_dict()[key], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("weights", ["stash", "recompute"])
def test_a_step_that_is_skipped_has_had_its_forward_and_no_more(
    streamed: Streamed, weights: Any
) -> None:
    module, inputs = normalised(), values(8)
    reference = deepcopy(module)
    replica, coming = streamed(module, "fdg", 3, inputs, epoch=8, delayed_weights=weights)
    for value in (inputs[0], *inputs):  # the capture has called it, too
        reference.net(value)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    replica.driver.optimizers.connect([optimizer])
    for number, batch in enumerate(coming.batches):
        coming.now = number
        replica.driver.begin_step(number)
        output = replica(batch.tensors[0])
        coming.now = None
        if number not in (3, 7):  # one in the middle, and the last one
            loss_of(module, output).backward()
            replica.driver.gradients.after_backward()
            optimizer.step()
        del output
    replica.driver.interrupt()
    replica.end()
    for key, value in reference.net.state_dict().items():
        torch.testing.assert_close(module.net.state_dict()[key], value, rtol=0, atol=1e-12)
    # the next call would free what was kept for the last one
    assert len(replica.network.calls) == len(replica.workers[1]._networks[0].calls) == 1


@pytest.mark.parametrize("weights", ["stash", "recompute", "current"])
def test_random_layers_draw_what_their_batch_draws(
    streamed: Streamed, weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a learning rate of 0 gradients are those of fill-drain, which draws by batch."""
    alone = threading.Lock()  # these ranks are threads, which share the generators of a process

    @contextmanager
    def one_at_a_time(*arguments: Any) -> Iterator[None]:
        with alone, generators_of_microbatch(*arguments):
            yield

    for part in (forward_pass, backward_pass):
        monkeypatch.setattr(part, "generators_of_microbatch", one_at_a_time)
    inputs, found = values(8), []
    for schedule in ("gpipe", "fdg"):
        module = normalised(random=True)
        replica, coming = streamed(module, schedule, 3, inputs, epoch=8, delayed_weights=weights)
        gradients: list[Tensor] = []

        def after(_: int, module: Model = module, gradients: list[Tensor] = gradients) -> None:
            gradients.append(module.net.parts[0].weight.grad.clone())

        train(replica, coming, torch.optim.SGD(module.parameters(), lr=0.0), after=after)
        replica.end()
        found.append((gradients, module.state_dict()))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def test_batches_of_other_sizes_run_ahead_too(streamed: Streamed) -> None:
    inputs = [value[: 2 + number % 3] for number, value in enumerate(values())]
    module, reference = frozen_scale(model()), model()
    make = OPTIMIZERS["momentum"]
    ahead = STREAMED["fdg"].look_aheads(3)
    stages, optimizer = in_stages(reference.net, 3), make(reference.net.parameters())
    train_serially(stages, optimizer, inputs, square_gradient, ahead, restarts=(10,))
    replica, coming = streamed(module, "fdg", 3, inputs, epoch=10_000)
    # sizes that nobody has seen before may be interrupted, too
    stop = {9: replica.driver.interrupt}
    train(replica, coming, make(module.parameters()), after=lambda n: stop.get(n, int)())
    replica.end()
    compare(module, reference)


def first_step(replica: Replica, coming: Coming, call: Callable[[Tensor], Tensor]) -> None:
    for number in (0, 1):
        coming.now = number
        replica.driver.begin_step(number)
        call(coming.batches[number].tensors[0]).sum().backward()
        coming.now = None


def test_an_input_that_is_not_of_the_batch_is_refused(streamed: Streamed) -> None:
    """Under a delayed schedule: an input of the network that is no part of the batch."""
    replica, coming = streamed(model(), "fdg", 2, values(4))
    with pytest.raises(NetworkError, match=r"'fdg'.*no tensor of the batch.*dataset"):
        first_step(replica, coming, lambda x: replica(x + 1))


def test_an_input_that_is_changed_in_place_is_refused(streamed: Streamed) -> None:
    """Under a delayed schedule: an input of the network that is changed in place."""
    replica, coming = streamed(model(), "fdg", 2, values(4))
    with pytest.raises(NetworkError, match="is not what was sent of its batch"):
        first_step(replica, coming, lambda x: replica(x.add_(1)))


def test_an_input_that_is_computed_in_later_steps_only_is_refused(streamed: Streamed) -> None:
    """Under a delayed schedule: an input of the network that is computed in later steps only."""
    replica, coming = streamed(model(), "fdg", 2, values(4))
    with pytest.raises(NetworkError, match="is not what was sent of its batch"):
        first_step(replica, coming, lambda x: replica(x + 1 if coming.now else x))


class Scaled(nn.Module):
    """Multiplies by a number that is none of the batch's."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
        self.by = torch.tensor(1.0, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x) * self.by


def scaled() -> Model:
    torch.manual_seed(0)
    return frozen_scale(Model(Scaled()).double())


def test_1f1b_computes_with_a_number_that_changes_between_steps(streamed: Streamed) -> None:
    module, inputs = scaled(), values(12)
    reference: Any = deepcopy(module)
    optimizer = OPTIMIZERS["momentum"](reference.net.parameters())
    for number, value in enumerate(inputs):
        loss_of(reference, reference.net(value)).backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        reference.net.by = reference.net.by + (number in {3, 7})

    replica, coming = streamed(module, "1f1b_stream", 3, inputs, epoch=4)

    def change(number: int) -> None:
        module.net.by = module.net.by + (number in {3, 7})

    train(replica, coming, OPTIMIZERS["momentum"](module.net.parameters()), window=4, after=change)
    replica.end()
    compare(module, reference)


def test_1f1b_refuses_a_number_that_changes_between_batches_of_a_step(streamed: Streamed) -> None:
    module = scaled()
    replica, coming = streamed(module, "1f1b_stream", 3, values(4), epoch=4)

    def change(number: int) -> None:
        module.net.by = module.net.by + number

    optimizer = OPTIMIZERS["momentum"](module.net.parameters())
    with pytest.raises(NetworkError, match=r"is a number that may be another one from batch to"):
        train(replica, coming, optimizer, window=4, after=change)


def test_a_delayed_schedule_refuses_a_number_before_the_first_step(streamed: Streamed) -> None:
    replica, coming = streamed(scaled(), "fdg", 2, values(4))
    with pytest.raises(NetworkError, match=r"is a number that may be another one from batch to"):
        first_step(replica, coming, replica)


def test_a_second_call_in_a_step_is_refused(streamed: Streamed) -> None:
    """Under a delayed schedule: a second call of the network in a step."""
    replica, coming = streamed(model(), "1f1b_stream", 2, values(4))
    with pytest.raises(NetworkError, match="more than once"):
        first_step(replica, coming, lambda x: replica(x) + replica(x))


def test_an_input_that_wants_a_gradient_is_refused(streamed: Streamed) -> None:
    """Under a delayed schedule: an input of the network that wants a gradient."""
    replica, coming = streamed(model(), "1f1b_stream", 2, values(4))
    with pytest.raises(NetworkError, match="wants a gradient"):
        first_step(replica, coming, lambda x: replica(x.requires_grad_()))


def test_a_batch_that_cannot_be_loaded_leaves_those_before_it_under_way(streamed: Streamed) -> None:
    """The run can still be ended, and what comes next be called."""
    module = model()
    replica, coming = streamed(module, "fdg", 3, values(4))
    expected = module.net(values(4)[3])
    found = coming.ahead

    def ahead(count: int) -> One | None:
        if count == 2:
            raise ValueError("batch 2 is broken")
        return found(count)

    coming.ahead = ahead  # type: ignore[method-assign]
    coming.now = 0
    replica.driver.begin_step(0)
    with pytest.raises(ValueError, match="batch 2 is broken"):
        replica(coming.batches[0].tensors[0])
    coming.now = None
    replica.driver.interrupt()
    torch.testing.assert_close(replica(values(4)[3]), expected, rtol=0, atol=1e-12)
    replica.end()


def test_an_error_in_a_forward_that_ran_ahead_is_raised_in_the_turn_of_its_batch(
    streamed: Streamed,
) -> None:
    replica, coming = streamed(model(), "fdg", 3, values(8))
    done: list[int] = []
    optimizer = torch.optim.SGD(replica.model.parameters(), lr=0.1)

    def after(number: int) -> None:
        done.append(number)
        if number == 0:  # from now on the first stage fails
            replica.driver.commands.ask(GiveFailure())  # batches 1, 2 and 3 have run
            own = replica.workers[1]._networks[0].engine.owned[0]
            run, counted = own.specializations[0].run_with, []

            def fails(*arguments: Any) -> Any:
                counted.append(None)
                if len(counted) == 2:
                    raise ValueError("on purpose")
                return run(*arguments)

            own.specializations[0].run_with = fails  # type: ignore[method-assign]

    with pytest.raises(ValueError, match="on purpose"):
        train(replica, coming, optimizer, after=after)
    assert done == [0, 1, 2, 3, 4]  # after 4 the next one is 5


Stop = Callable[[], None]
NO_END_S = 3600.0
"""Who waits for the time-out hangs, as far as the test can see (`Ranks.close`)."""


@contextmanager
def stopped(stage: int, part: str, batch: int, stop: Stop) -> Iterator[None]:
    """Inside, a stage stops in its forward or its backward of a batch."""
    which: Any = ForwardPass if part == "forward" else BackwardPass
    method = "_compute" if part == "forward" else "_run"
    compute, numbers = getattr(which, method), count()

    def stopping(self: Any, *arguments: Any) -> Any:
        if self.own.number == stage and next(numbers) == batch:
            stop()
        return compute(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(which, method, stopping)
        yield


FAST = ("1f1b_stream-1-forward", "fdg-0-backward")
POINTS = [
    pytest.param(name, window, stage, part, id=point, marks=() if point in FAST else slow)
    for name, window in (("1f1b_stream", 4), ("fdg", 1))
    for stage in range(3)
    for part in ("forward", "backward")
    for point in [f"{name}-{stage}-{part}"]
]


def trained_until_the_end(replica: Replica, coming: Coming, window: int) -> None:
    train(replica, coming, torch.optim.SGD(replica.model.parameters(), lr=0.1), window=window)
    replica.driver.commands.ask(GiveFailure())


@pytest.mark.parametrize(("name", "window", "stage", "part"), POINTS)
def test_an_error_of_a_stage_at_any_point_of_two_windows_ends_all_ranks(
    streamed: Streamed, name: str, window: int, stage: int, part: str
) -> None:
    def fail() -> None:
        raise ValueError("on purpose")

    for batch in (0, 1, 2, 5):
        replica, coming = streamed(model(), name, 3, values(8), epoch=4, timeout_s=NO_END_S)
        failing = stopped(stage, part, batch, fail)
        with failing, pytest.raises(ValueError, match="on purpose") as found:
            trained_until_the_end(replica, coming, window)
        replica.driver.abort(Failure.of(found.value, "rank 0"))
        replica.close()  # nobody hangs
        # (one that waits for another worker may see that leave before it hears of the error)
        assert all(isinstance(e, ValueError | ConnectionLost) for e in replica.errors.values())


OF_WORKERS = [point for point in POINTS if DEVICES[3][point.values[2]]]


@pytest.mark.parametrize(("name", "window", "stage", "part"), OF_WORKERS)
def test_a_worker_that_is_lost_at_any_point_of_two_windows_ends_all_ranks(
    streamed: Streamed, name: str, window: int, stage: int, part: str
) -> None:
    for batch in (0, 1, 2, 5):
        replica, coming = streamed(model(), name, 3, values(8), epoch=4, timeout_s=NO_END_S)
        losing = stopped(stage, part, batch, partial(replica.ranks.kill, DEVICES[3][stage]))
        with losing, pytest.raises(ConnectionLost) as found:
            trained_until_the_end(replica, coming, window)
        replica.driver.abort(Failure.of(found.value, "rank 0"))
        replica.close()
        assert all(isinstance(error, Exception) for error in replica.errors.values())
