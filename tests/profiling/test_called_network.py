"""From a captured network to a plan: what is chosen where memory binds."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hybrid.asking.partition_costs import capture_call
from lightning_hybrid.errors import PlanError
from lightning_hybrid.graph import network_partitions
from lightning_hybrid.planning import run_cluster
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.planning.planner import Site, make_plan, plan_again
from lightning_hybrid.planning.run_cluster import Device, Rates, make_cluster
from lightning_hybrid.planning.search import PlanSettings
from lightning_hybrid.profiling.called_network import CalledNetwork
from lightning_hybrid.profiling.network_table import count

MICROBATCHES = 8


@pytest.fixture(autouse=True)
def _no_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices have what these tests say."""
    monkeypatch.setattr(run_cluster, "COMMUNICATOR_BYTES", 0)


@cache
def network() -> CalledNetwork:
    """Its activations need more memory than its weights; it is captured and measured once.

    Its layers are alike, and are told to take as long as each other: measured times vary.
    """
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())]
    graph, leaves = capture_call(nn.Sequential(*layers), (torch.randn(512, 16),), {})
    parts = network_partitions(graph)
    called = CalledNetwork(name="net", graph=graph, partitions=parts, leaves=leaves)
    table = called.profile(torch.device("cpu"))
    equal = [1e-4] * len(table.forward_s)
    return replace(called, known=replace(table, forward_s=equal, backward_s=equal))


def planned(
    recompute: Any = "auto",
    *,
    memory: int | None = None,
    trains: bool = True,
    replicas: int = 1,
    rates: Rates | None = None,
    beside: Sequence[Plan] = (),
    **settings: Any,
) -> Plan:
    """Two stages of the network."""
    device = Device(host="a", name="gpu", memory_bytes=memory, units_per_s=1, units_per_own_s=1)
    asked = replace(PlanSettings(allocation="exact", recompute=recompute), **settings)
    sgd = torch.optim.SGD(network().graph.network.parameters(), lr=0.1)
    return make_plan(
        network().costs(asked, replicas, torch.device("cpu"), [sgd] if trains else None),
        MICROBATCHES,
        settings=asked,
        site=Site(
            replicas=replicas,
            stages=2,
            backend="gloo",
            on_cpu=True,
            cluster=replace(
                make_cluster([device] * 2 * replicas, replicas, 2, [1.0, 1.0] * replicas),
                rates=rates,
            ),
            beside=beside,
        ),
    )


def most(plan: Plan) -> int:
    return max(row.memory_bytes or 0 for row in plan.rows)


def test_activations_are_computed_again_only_where_nothing_else_fits() -> None:
    without, with_it = planned(recompute=False), planned(recompute=True)
    assert not planned().recompute
    assert most(with_it) < most(without)
    small = planned(memory=(most(with_it) + most(without)) // 2 + 2**18)
    assert small.recompute
    assert small.step_s > 0
    assert "computed again" in small.describe()
    assert not planned(memory=most(without) + 2**20).recompute


def test_what_was_asked_for_is_kept() -> None:
    limit = (most(planned(recompute=True)) + most(planned(recompute=False))) // 2
    with pytest.raises(PlanError, match="recompute=True holds"):
        planned(recompute=False, memory=limit // 2)
    with pytest.raises(PlanError, match=r"with recompute=True, .* free beside the inputs"):
        planned(memory=2**12)


def test_a_network_gets_what_those_before_it_have_left() -> None:
    limit = round(1.5 * most(planned(recompute=False)))
    first = planned(recompute=False, memory=limit)
    with pytest.raises(PlanError, match="devices of a replica have free together"):
        planned(recompute=False, memory=limit, beside=[first])
    second = planned(memory=2 * limit, beside=[first])
    held = [a.memory_bytes + b.memory_bytes for a, b in zip(first.rows, second.rows)]
    assert max(held) <= 2 * limit


def test_the_driver_has_a_smaller_share_where_the_batch_takes_its_room() -> None:
    roomy = planned(recompute=False)
    batch = MICROBATCHES * 3 * (roomy.rows[0].cut_bytes or 0)  # inputs, outputs, their gradients
    held = [row.memory_bytes or 0 for row in roomy.rows]
    assert held[0] == held[1]
    tight = planned(recompute=False, memory=4 * held[1] // 3 + 2**14)  # of three partitions four
    worker, driver = (row.memory_bytes or 0 for row in tight.rows)
    assert worker == 2 * driver
    assert driver + batch <= (tight.rows[1].limit_bytes or 0)


def test_a_delayed_schedule_holds_the_copies_of_weights_that_it_stashes() -> None:
    current, stash, again = (
        planned(recompute=False, schedule="fdg", delayed_weights=weights)
        for weights in ("current", "stash", "recompute")
    )
    assert current.cuts == stash.cuts
    for plain, row in zip(current.rows, stash.rows):
        assert row.memory_bytes == plain.memory_bytes + plain.gradient_bytes  # one batch ahead
    assert most(again) < most(current)
    accumulated = planned(recompute=False, schedule="1f1b_stream", delayed_weights="stash")
    assert most(accumulated) == most(current)  # its weights do not change on the way


def test_a_network_without_a_loss_is_planned_as_under_fill_drain() -> None:
    assert planned(recompute=False, schedule="1f1b").schedule == "gpipe"


def test_a_run_that_does_not_train_computes_nothing_again() -> None:
    assert not planned(recompute=True, trains=False).recompute


def test_a_run_that_does_not_train_is_refused_for_what_it_holds_alone() -> None:
    with pytest.raises(PlanError) as refused:
        planned(trains=False, memory=1500)
    weights = f"{6 * (16 * 16 + 16) * 4 / 1e9:.3g} GB"
    assert f"needs {weights} (parameters {weights}, gradients 0 GB, optimizer 0 GB" in str(
        refused.value
    )


RATES = Rates(
    message_s=2.0,
    reduce_bytes_per_s=1e3,
    reduce_s=3.0,
    ranks=2,
    update_s_per_byte=1e-3,
    overlaps=False,
)
GRADIENTS = 6 * (16 * 16 + 16) * 4


def test_a_step_has_messages_the_allreduce_and_the_optimizer_step() -> None:
    one, two = planned(rates=RATES), planned(rates=RATES, replicas=2)
    assert one.rows[0].latency_s == two.rows[0].latency_s == 2.0
    updates = [sum(row.step_s or 0.0 for row in plan.rows) for plan in (one, two)]
    assert updates[0] == pytest.approx(GRADIENTS / 1e3)
    assert updates[1] == pytest.approx(2 * GRADIENTS / 1e3 + 3.0)
    # the last stage waits for a message, and the first for one more
    first, last = (row.step_s or 0.0 for row in one.rows)
    assert one.step_s == pytest.approx(max(4.0 + first, 2.0 + last), rel=0.02)
    assert two.step_s > one.step_s + 3.0
    assert Plan.from_json(two.to_json()) == two


def test_without_training_nothing_follows_the_backward() -> None:
    plan = planned(rates=RATES, replicas=2, trains=False)
    assert not any(row.step_s or row.reduce_s for row in plan.rows)
    assert plan.rows[0].latency_s == 2.0


def test_a_plan_for_other_speeds_has_the_best_of_all_cuts() -> None:
    network = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())])
    graph, leaves = capture_call(network, (torch.randn(8, 16),), {})
    partitions = network_partitions(graph)
    # of seconds that are given: no cut is better for a moment's noise
    known = replace(
        count(graph, partitions),
        forward_s=[0.1] * 6,
        backward_s=[0.2] * 6,
        weight_part_s=[None] * 6,
        device="cpu",
    )
    called = CalledNetwork(
        name="net",
        graph=graph,
        partitions=partitions,
        leaves=[leaf.to("meta") for leaf in leaves],  # the call is over
        known=known,
    )
    device = Device(host="a", name="cpu", memory_bytes=None, units_per_s=1, units_per_own_s=1)
    site = Site(
        replicas=2,
        stages=2,
        backend="gloo",
        on_cpu=True,
        cluster=make_cluster([device] * 4, 2, 2, [1.0] * 4),
    )
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1)]
    costs = called.costs(PlanSettings(), 2, torch.device("cpu"), optimizers)
    again = partial(plan_again, costs, PlanSettings(), site)
    plans = {
        cut: replace(
            make_plan(costs, 4, settings=PlanSettings(), site=site),
            cuts=(cut,),
        )
        for cut in (partition.name for partition in partitions[1:])
    }
    found = {cut: again(plan, [1.0, 0.25])[0] for cut, plan in plans.items()}
    assert all(plan.cuts == (cut,) for cut, plan in found.items())
    now, best = again(plans["6"], [1.0, 0.25])
    # of six partitions the device with a quarter of the speed has one
    assert (now.cuts, best.cuts, best.capacities) == (("6",), ("2",), (1.0, 0.25))
    assert best.step_s == pytest.approx(min(plan.step_s for plan in found.values()))
    # a step of four micro-batches: the first two stages' work, and three times the slower one's
    assert now.step_s == pytest.approx(0.9 + 3.6 + 3 * 3.6, rel=1e-3)
    assert best.step_s == pytest.approx(1.2 + 1.5 + 3 * 1.5, rel=1e-3)
