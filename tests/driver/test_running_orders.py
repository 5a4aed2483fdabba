"""What ranks that run do, and in which order, is what the schedules say."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from driven import Model, Replica, let_go
from planned import simulate
from test_streamed_calls import Coming, frozen_scale, model, train, values
from torch import nn

from lightning_hybrid.comm.protocol import StepOptimizer
from lightning_hybrid.schedules import make_schedule
from lightning_hybrid.stage.rank_stages import StageOptions

Made = Callable[..., Replica]


def devices_of(stages: int, rounds: int = 1) -> tuple[int, ...]:
    return (*range(1, stages), 0) * rounds


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Makes replicas that keep traces."""
    monkeypatch.setenv("LIGHTNING_HYBRID_TRACE", str(tmp_path))
    made: list[Replica] = []

    def make(*arguments: Any, **options: Any) -> Replica:
        made.append(Replica(*arguments, **options))
        return made[-1]

    yield make
    for replica in made:
        let_go(replica)


def engines(replica: Replica) -> list[Any]:
    """Of the ranks, the driver's last."""
    workers = [replica.workers[rank]._networks[0].engine for rank in sorted(replica.workers)]
    return [*workers, replica.network.engine]


def spans(engine: Any) -> list[str]:
    """What a rank has computed, in order."""
    return [event["name"] for event in engine.trace._events if event["tid"] == "compute"]


def simulated(schedule: str, stages: int, rounds: int, microbatches: int) -> list[list[str]]:
    """What each device computes in a step, by the simulator's clocks."""
    devices, ones = [*range(stages)] * rounds, [1.0] * stages * rounds
    plan = make_schedule(schedule, stages * rounds, microbatches)
    events = sorted(simulate(plan, ones, ones, devices=devices).events, key=lambda e: e.start_s)
    label = (lambda stage: f"stage {stage} ") if rounds > 1 else lambda _: ""
    return [
        [
            f"{label(event.stage)}{event.instruction.kind} {event.instruction.microbatch}"
            for event in events
            if devices[event.stage] == device and event.instruction.kind.computes
        ]
        for device in range(stages)
    ]


@pytest.mark.parametrize(("schedule", "rounds"), [("gpipe", 1), ("looped", 2)])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (3, 4)])
def test_a_step_has_the_order_of_the_simulator(
    traced: Made, schedule: str, rounds: int, stages: int, microbatches: int
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(3, 3) for _ in range(stages * rounds)]).double()
    [value] = values(1, 2 * microbatches)
    replica = traced(Model(net), value, devices_of(stages, rounds), microbatches, schedule=schedule)
    replica.driver.begin_step(0)
    replica(value).sum().backward()
    replica.driver.gradients.after_backward()
    replica.end()
    assert [*map(spans, engines(replica))] == simulated(schedule, stages, rounds, microbatches)


def train_noting_steps(replica: Replica, coming: Coming, window: int = 1) -> list[list[str]]:
    """What each rank has done, in order: forwards, backwards, and steps, each by its number."""
    optimizer = torch.optim.SGD(replica.model.parameters(), lr=0.01)
    ranks = engines(replica)

    def note(number: int) -> None:
        with ranks[number].trace.span("step 0"):
            pass

    for number, worker in replica.workers.items():
        step = worker._handlers[StepOptimizer]

        def noted(command: StepOptimizer, step: Any = step, number: int = number - 1) -> Any:
            note(number)
            return step(command)

        worker._handlers[StepOptimizer] = noted
    optimizer.register_step_post_hook(lambda *_: note(-1))
    train(replica, coming, optimizer, window=window)
    replica.end()
    found = []
    for engine in ranks:
        done: dict[str, int] = {}
        found.append([])
        for kind in (span.split()[0][0].upper() for span in spans(engine)):
            found[-1].append(f"{kind}{done.setdefault(kind, 0)}")
            done[kind] += 1
    return found


# batches by which stages k = 1, 2, 3 of K = 3 are ahead: DDG's K - k; FDG's 2 (K - k) - 1, and 0
AHEAD = {"pipedream": (2, 1, 0), "ddg": (2, 1, 0), "fdg": (3, 1, 0), "akintoye": (3, 1, 0)}


@pytest.mark.parametrize(
    ("name", "weights"), [*((name, "stash") for name in AHEAD), ("fdg", "recompute")]
)
def test_ranks_of_a_delayed_run_have_the_order_of_its_formula(
    traced: Made, name: str, weights: Any
) -> None:
    """In iteration t: forwards up to batch t + a, backward and step of batch t, up to the end."""
    batches = 7
    coming = Coming(values(batches), batches)
    options = StageOptions(delayed_weights=weights)
    module = frozen_scale(model())
    first = coming.batches[0].tensors[0]
    replica = traced(
        module, first, devices_of(3), 1, schedule=name, batches=coming, options=options
    )
    expected: list[list[str]] = [[], [], []]
    for order, ahead in zip(expected, AHEAD[name]):
        for t in range(batches):
            begun = t + ahead if t else 0
            order += [f"F{n}" for n in range(begun, min(t + ahead + 1, batches))]
            order += [f"B{t}", f"S{t}"]
    assert train_noting_steps(replica, coming) == expected


def counted(network: Any, most: list[int]) -> None:
    """Note after each forward how many calls of a rank wait with what their backward needs."""
    forward = network.engine.forward

    def noted(*arguments: Any) -> Any:
        found = forward(*arguments)
        most.append(sum(any(call.saved) for call in network.calls.values()))
        return found

    network.engine.forward = noted


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("window", [2, 9])
def test_a_running_stage_of_1f1b_holds_as_many_batches_as_there_are_stages_from_it_on(
    traced: Made, stages: int, window: int
) -> None:
    batches = 2 * window
    coming = Coming(values(batches), window)
    first = coming.batches[0].tensors[0]
    replica = traced(
        frozen_scale(model()), first, devices_of(stages), 1, schedule="1f1b_stream", batches=coming
    )
    networks = [replica.workers[rank]._networks[0] for rank in sorted(replica.workers)]
    held: list[list[int]] = [[] for _ in range(stages)]
    for network, most in zip([*networks, replica.network], held):
        counted(network, most)
    train_noting_steps(replica, coming, window)
    assert [len(most) for most in held] == [batches] * stages
    assert [max(most) for most in held] == [min(stages - s, window) for s in range(stages)]
