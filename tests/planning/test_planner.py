"""From a captured network to a plan: what is chosen where memory binds."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_hybrid.errors import PlanError
from lightning_hybrid.network import network_partitions
from lightning_hybrid.planning.cluster import Device, make_cluster
from lightning_hybrid.planning.partition_costs import capture_call
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.planning.planner import PlanSettings, make_plan

MICROBATCHES = 8


def planned(recompute: Any = "auto", *, memory: int | None = None, trains: bool = True) -> Plan:
    """Two stages of a network whose activations need more memory than its weights."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())]
    network = nn.Sequential(*layers)
    graph, leaves = capture_call(network, (torch.randn(512, 16),), {})
    device = Device(host="a", name="gpu", memory_bytes=memory, units_per_s=1, units_per_own_s=1)
    return make_plan(
        "net",
        graph,
        network_partitions(graph),
        leaves,
        MICROBATCHES,
        settings=PlanSettings("gpipe", "exact", "step", 0, recompute=recompute),
        replicas=1,
        stages=2,
        backend="gloo",
        device=torch.device("cpu"),
        cluster=make_cluster([device] * 2, 1, 2, [1.0, 1.0]),
        optimizers=[torch.optim.SGD(network.parameters(), lr=0.1)] if trains else None,
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
    assert not planned(memory=most(without) + 2**18).recompute


def test_what_was_asked_for_is_kept() -> None:
    limit = (most(planned(recompute=True)) + most(planned(recompute=False))) // 2
    with pytest.raises(PlanError, match="recompute=True holds"):
        planned(recompute=False, memory=limit // 2)
    with pytest.raises(PlanError, match=r"with recompute=True, .* free beside the inputs"):
        planned(memory=2**12)


def test_a_run_that_does_not_train_computes_nothing_again() -> None:
    assert not planned(recompute=True, trains=False).recompute
