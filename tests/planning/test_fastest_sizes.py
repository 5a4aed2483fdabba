"""Which sizes have the shortest predicted time of a batch, on machines given by numbers."""

from dataclasses import replace
from typing import Any

import pytest

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning import run_cluster
from lightning_hybrid.planning.arrangements import Arrangement
from lightning_hybrid.planning.fastest_sizes import ChosenSizes, Machine, fastest_sizes
from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.planning.run_cluster import Device, Rates
from lightning_hybrid.planning.search import PlanSettings
from lightning_hybrid.planning.shapes import Shape, ShapeRequest, Sizes

MS, MB = 1e-3, 1e6


def choose(
    machine: Machine, networks: Any, *, batch: int, present_bytes: int = 0, **asked: Any
) -> ChosenSizes:
    return fastest_sizes(machine, networks, batch, ShapeRequest(**asked), present_bytes)


@pytest.fixture(autouse=True)
def _no_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices have what these tests say."""
    monkeypatch.setattr(run_cluster, "COMMUNICATOR_BYTES", 0)


def machine(devices: int = 2, **changes: Any) -> Machine:
    """CPU processes of one host, about as the project's own machine has them."""
    device = Device(host="a", name="cpu", memory_bytes=None, units_per_s=1.0, units_per_own_s=1.0)
    usual = Rates(
        message_s=0.3 * MS,
        reduce_bytes_per_s=1e9,
        reduce_s=0.1 * MS,
        ranks=devices,
        update_s_per_byte=8e-10,
        overlaps=False,
    )
    return Machine(
        devices=(device,) * devices,
        capacity=None,
        bandwidth_bytes_per_s=1e9,
        rates=replace(usual, **changes),
    )


def layers(count: int, forward_s: float, weights: float, activation: float) -> PartitionTable:
    """Equal ones; the times are those of a whole batch."""
    return PartitionTable(
        names=tuple(f"layers.{i}" for i in range(count)),
        forward_s=(forward_s,) * count,
        backward_s=(2 * forward_s,) * count,
        cut_bytes=(activation,) * (count - 1),
        parameters=(round(weights / 4),) * count,
        gradient_bytes=(weights,) * count,
        kept_bytes=(4 * weights,) * count,
        activation_bytes=(activation,) * count,
        layers=(2,) * count,
    )


WIDE = layers(20, 1.5 * MS, 4.2 * MB, 0.1 * MB)
"""20 linear layers of 1024 on 32 samples: a gradient weighs more than what it is made of."""
TINY = layers(20, 0.03 * MS, 4e3, 4e3)
CONVOLUTIONS = layers(18, 25 * MS, 0.5 * MB, 8 * MB)


class Network:
    """Its times are proportional to the samples, and it notes what was measured."""

    def __init__(self, parts: PartitionTable, slower: float = 1.0) -> None:
        self.parts, self.slower, self.asked = parts, slower, []

    def __call__(self, microbatches: int) -> PartitionTable:
        self.asked.append(microbatches)
        share = (1.0 if microbatches == 1 else self.slower) / microbatches
        return self.parts.scaled(share)


def test_where_gradients_bind_a_chain_is_chosen() -> None:
    best = choose(machine(), [Network(WIDE)], batch=32).best.sizes
    assert (best.replicas, best.stages) == (1, 2)
    assert best.microbatches > 1


@pytest.mark.parametrize("parts", [TINY, CONVOLUTIONS])
@pytest.mark.parametrize("devices", [2, 6])
def test_where_computing_or_messages_bind_replicas_are_chosen(
    parts: PartitionTable, devices: int
) -> None:
    best = choose(machine(devices), [Network(parts)], batch=6).best.sizes
    assert best == Sizes(replicas=devices, stages=1, microbatches=1)


def test_a_step_of_replicas_is_compute_allreduce_and_update() -> None:
    choice = choose(machine(), [Network(TINY)], batch=6)
    nbytes, computed = 20 * 4e3, 20 * 3 * 0.03 * MS
    expected = computed + 0.1 * MS + nbytes / 1e9 + 8e-10 * nbytes
    assert choice.best.step_s == pytest.approx(expected)
    assert choice.best.batch_s == pytest.approx(expected / 2)
    assert choice.alone_s == pytest.approx(computed + 8e-10 * nbytes)


def test_an_accelerator_reduces_beside_its_backward() -> None:
    hidden = choose(machine(overlaps=True, reduce_s=0.0), [Network(CONVOLUTIONS)], batch=6)
    assert hidden.best.step_s == pytest.approx(18 * 75 * MS + 8e-10 * 18 * 0.5 * MB)


def test_a_stream_of_batches_has_no_bubble() -> None:
    streamed = PlanSettings(schedule="pipedream", recompute=False)
    at = machine(reduce_s=0.0, reduce_bytes_per_s=4e9)
    for settings, stages in ((PlanSettings(), 1), (streamed, 2)):
        best = choose(at, [Network(WIDE)], batch=32, settings=settings, microbatches=1).best
        assert best.sizes.stages == stages


def test_what_cannot_win_is_not_measured() -> None:
    network = Network(CONVOLUTIONS)
    choose(machine(), [network], batch=6)
    assert network.asked == [1]


def test_what_a_smaller_slice_really_takes_decides() -> None:
    fast = choose(machine(), [Network(WIDE)], batch=32).best.sizes
    slow = choose(machine(), [Network(WIDE, slower=2.5)], batch=32).best.sizes
    assert fast.microbatches > 1
    assert slow.microbatches == 1


def test_a_network_that_fits_nowhere_whole_is_cut() -> None:
    devices = tuple(replace(d, memory_bytes=300 * 10**6) for d in machine(4).devices)
    best = choose(machine(devices=4, reduce_s=0.0), [Network(CONVOLUTIONS)], batch=8).best
    assert best.sizes.stages == 1
    small = replace(machine(4), devices=devices)
    held = layers(18, 25 * MS, 6 * MB, 1 * MB)  # 450 MB with gradients and optimizer
    assert choose(small, [Network(held)], batch=8).best.sizes.stages > 1


def test_replicas_that_divide_states_need_no_stages_where_others_do() -> None:
    # with copies of its gradients a replica takes 189 MB, and 180 with half of the states
    devices = tuple(replace(d, memory_bytes=205 * 10**6) for d in machine().devices)
    small = replace(machine(), devices=devices)
    dividing = replace(CONVOLUTIONS, state_bytes=(1 * MB,) * 18)
    for parts, stages in ((CONVOLUTIONS, 2), (dividing, 1)):
        assert choose(small, [Network(parts)], batch=8).best.sizes.stages == stages


def test_what_no_devices_hold_is_an_error() -> None:
    devices = tuple(replace(d, memory_bytes=10**6) for d in machine().devices)
    with pytest.raises(PlanError, match="memory"):
        choose(replace(machine(), devices=devices), [Network(WIDE)], batch=32)


def test_only_numbers_of_micro_batches_that_a_network_takes_are_looked_at() -> None:
    asked: list[int] = []

    def splits(microbatches: int) -> bool:
        asked.append(microbatches)
        return microbatches == 4

    network = Network(WIDE)
    choose(machine(), [network], batch=4096, splits=splits)
    assert set(asked) == {2, 4, 8}  # and not every number up to the batch
    assert set(network.asked) <= {1, 4}


def test_batches_that_must_stay_whole_stay_whole() -> None:
    choice = choose(machine(), [Network(WIDE)], batch=32, splits=lambda microbatches: False)
    assert all(c.sizes.microbatches == 1 for c in (choice.best, *choice.others))


def test_given_micro_batches_are_taken_wherever_there_are_stages() -> None:
    choice = choose(machine(), [Network(WIDE)], batch=32, microbatches=3)
    taken = {c.sizes.stages > 1: c.sizes.microbatches for c in (choice.best, *choice.others)}
    assert taken == {True: 3, False: 1}


def test_sizes_that_are_not_allowed_are_not_taken() -> None:
    best = choose(machine(), [Network(TINY)], batch=6, allowed=lambda r, s: r == 1).best.sizes
    assert best.replicas == 1
    with pytest.raises(PlanError, match="2 devices"):
        choose(machine(), [Network(TINY)], batch=6, allowed=lambda r, s: False)


def test_two_networks_are_two_times_and_a_small_one_stays_on_the_driver() -> None:
    one = choose(machine(), [Network(WIDE)], batch=32).best
    single = replace(layers(1, 0.1 * MS, 10.0, 10.0), cut_bytes=())
    two = choose(machine(), [Network(WIDE), Network(single)], batch=32).best
    assert two.sizes == one.sizes
    assert two.step_s > one.step_s


def test_several_networks_share_the_memory_of_the_devices() -> None:
    # 80 MB of weights, gradients and optimizer, and 20 MB to average gradients of replicas
    one = layers(4, 25 * MS, 5 * MB, 0.1 * MB)
    devices = tuple(replace(d, memory_bytes=120 * 10**6) for d in machine().devices)
    small = replace(machine(), devices=devices)
    assert choose(small, [Network(one)], batch=8).best.sizes.stages == 1
    assert choose(small, [Network(one)] * 2, batch=8).best.sizes.stages == 2
    with pytest.raises(PlanError, match="memory"):
        choose(small, [Network(one)] * 4, batch=8)


def limited(limit: float, devices: int = 4, **shared: Any) -> Machine:
    """Each process has a limit of its own."""
    usual = machine(devices, **shared)
    limits = [((f"process {i}", round(limit)),) for i in range(devices)]
    ranks = zip(usual.devices, limits)
    return replace(usual, devices=tuple(replace(d, threads=1, memory_limits=m) for d, m in ranks))


@pytest.mark.parametrize(("limit", "stages"), [(1000, 1), (112, 1), (110, 2), (57, 2), (55, 4)])
def test_a_limit_of_the_processes_changes_the_sizes(limit: float, stages: int) -> None:
    # 80 MB of weights, gradients and optimizer, and 20 to average the gradients of replicas
    network = layers(4, 25 * MS, 5 * MB, 0.1 * MB)
    best = choose(limited(limit * MB), [Network(network)], batch=8).best
    assert (best.sizes.stages, best.sizes.replicas) == (stages, 4 // stages)
    assert not best.arrangement.recompute


def test_where_nothing_else_fits_no_memory_is_spared() -> None:
    network = layers(4, 25 * MS, 5 * MB, 0.1 * MB)
    assert choose(limited(21 * MB), [Network(network)], batch=8).best.sizes.stages == 4


def test_what_a_network_holds_before_the_cut_is_room_for_its_stages() -> None:
    network = layers(4, 25 * MS, 5 * MB, 0.1 * MB)
    best = choose(limited(95 * MB), [Network(network)], batch=8, present_bytes=20 * 10**6).best
    assert best.sizes.stages == 1


def test_micro_batches_are_as_small_as_the_room_wants() -> None:
    # each of the activations of a batch is as large as what is kept
    network = layers(8, 25 * MS, 1 * MB, 16 * MB)

    def slow_if_small(microbatches: int) -> PartitionTable:
        parts = network.scaled(1 / microbatches)
        times = tuple(t * (1 + microbatches) for t in parts.forward_s)
        return replace(parts, forward_s=times, backward_s=times)

    roomy, tight = (
        choose(
            limited(limit * MB, 2),
            [slow_if_small],
            batch=16,
            allowed=lambda replicas, stages: stages == 2,
        ).best
        for limit in (200, 60)
    )
    assert not roomy.arrangement.recompute
    assert tight.arrangement.recompute
    assert tight.sizes.microbatches > roomy.sizes.microbatches


def test_where_nothing_fits_the_error_has_the_numbers_of_what_would() -> None:
    big = layers(6, 25 * MS, 10 * MB, 1 * MB)  # of 41 MB each
    devices = tuple(replace(d, memory_bytes=100 * 10**6) for d in machine().devices)
    with pytest.raises(PlanError) as caught:
        choose(
            replace(machine(), devices=devices),
            [Network(big)],
            batch=8,
            settings=PlanSettings(recompute=False),
        )
    text = str(caught.value)
    assert (
        "with 1 stage, 1 micro-batch, device 0 lacks 0.206 GB (it has 0.1 GB)" in text
    )  # 2 replicas
    assert "device 0 lacks 0.023 GB (it has 0.1 GB), device 1 lacks 0.023 GB" in text
    assert "3 stages, 1 micro-batch (each on a device with 0.1 GB free)" in text
    assert "on 2 devices with 0.123 GB free" in text


def test_the_choice_is_told_with_what_comes_next() -> None:
    text = choose(machine(), [Network(TINY)], batch=6).describe()
    first, second, *more = text.splitlines()
    assert first.startswith("Chosen for 2 devices: 2 replicas x 1 stage, 1 micro-batch. Predicted")
    assert "for 2 batches" in first
    assert second.startswith("Next: 1 replica x 2 stages, ")
    assert not more


@pytest.mark.parametrize(("stages_s", "told"), [(0.97, True), (1.03, False)])
def test_stages_that_save_too_little_are_told_so(stages_s: float, told: bool) -> None:
    def of(replicas: int, stages: int, step_s: float) -> Shape:
        genes = Arrangement((0, 1), replicas, (1,) * stages, 1, stages, False, (1,))
        return Shape(arrangement=genes, step_s=step_s, samples=1, bubble=0.0, search="")

    replicas, stages = of(2, 1, 2.0), of(1, 2, stages_s)
    text = ChosenSizes(best=replicas, others=(stages,), alone_s=1.5).describe()
    assert ("Stages are taken where they save 5% or more." in text) is told


def test_one_device_that_is_faster_is_named() -> None:
    slow = machine(reduce_s=20 * MS, message_s=20 * MS)
    *_, last = choose(slow, [Network(TINY)], batch=6).describe().splitlines()
    assert "Trainer(devices=1)" in last


def test_what_fits_only_with_activations_computed_again_is_told_so() -> None:
    wide = layers(4, 25 * MS, 1 * MB, 100 * MB)  # 416 MB of which 400 grow with the batch
    parts = replace(wide, cut_bytes=(10 * MB,) * 3)
    devices = tuple(replace(d, memory_bytes=150 * 10**6) for d in machine().devices)
    small = replace(machine(), devices=devices)
    assert not choose(machine(), [Network(parts)], batch=8).best.arrangement.recompute
    choice = choose(small, [Network(parts)], batch=8)
    assert choice.best.arrangement.recompute
    assert choice.best.sizes.microbatches > 1
    assert "computed again" in choice.describe()
    with pytest.raises(PlanError, match="memory"):
        choose(small, [Network(parts)], batch=8, settings=PlanSettings(recompute=False))
    with pytest.raises(PlanError, match="memory"):  # 158 MB with the inputs that are kept
        choose(small, [Network(wide)], batch=8)


@pytest.mark.parametrize(
    ("schedule", "inside", "runs"),
    [
        *(("auto", (True,), "1f1b"), ("auto", (False,), "gpipe"), ("auto", (), "gpipe")),
        *(("1f1b", (True,), "1f1b"), ("1f1b", (False,), "gpipe"), ("gpipe", (True,), "gpipe")),
    ],
)
def test_backwards_inside_of_calls_are_counted_where_the_network_allows_them(
    schedule: str, inside: tuple[bool, ...], runs: str
) -> None:
    deep = layers(16, 10 * MS, 1 * MB, 50 * MB)  # 400 MB of activations for each of two devices
    settings = PlanSettings(schedule=schedule)
    choice = choose(
        limited(250 * MB, 2), [Network(deep)], batch=32, settings=settings, inside=inside
    )
    assert [plan.schedule for plan in choice.best.plans] == [runs]
    assert choice.best.arrangement.recompute is (runs == "gpipe")
    assert choice.best.sizes.microbatches == 8  # of which two are alive, or all computed again
    assert ("backwards inside of calls" in choice.describe()) is (runs == "1f1b")


def test_replicas_that_take_samples_by_their_speed_are_rated_so() -> None:
    unlike = replace(machine(2), capacity=(1.0, 0.4))
    network = Network(CONVOLUTIONS)
    equal, dealt = (
        choose(unlike, [network], batch=28, allowed=lambda r, s: s == 1, by_speed=by_speed).best
        for by_speed in (False, True)
    )
    after_s = equal.step_s - 18 * 75 * MS / 0.4
    assert dealt.shares == (40, 16)
    assert equal.shares == ()
    # 40 of 28 samples on the first, 16 of 28 on the second at 0.4: equally long
    assert dealt.step_s == pytest.approx(18 * 75 * MS * 40 / 28 + after_s)
    choice = choose(unlike, [network], batch=28, by_speed=True)
    assert (
        "2 replicas with 40, 16 samples x 1 stage, 1 micro-batch. Predicted step"
        in choice.describe()
    )
