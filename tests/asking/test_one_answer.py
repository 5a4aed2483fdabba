"""What the command says the Trainer takes is what it takes: one search answers both."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lightning_hybrid.asking.study import Study
from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning import run_cluster
from lightning_hybrid.planning.fastest_sizes import Machine, fastest_sizes
from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.planning.run_cluster import Device, Rates
from lightning_hybrid.planning.search import AUTO, PlanSettings
from lightning_hybrid.planning.shapes import ShapeRequest, recommended

BATCH, MB = 12, 1e6


@pytest.fixture(autouse=True)
def _no_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices have what this test says."""
    monkeypatch.setattr(run_cluster, "COMMUNICATOR_BYTES", 0)


def network(
    work: list[float], weights: list[float], crossing: list[float], small_slices: float = 1.0
) -> Callable[[int], PartitionTable]:
    """Costs by samples: of each milliseconds of a forward and MB that cross, and MB of weights.

    A micro-batch of few samples takes `small_slices` as long for each of them.
    """

    def costs_of(samples: int) -> PartitionTable:
        each = samples * (small_slices if samples < BATCH else 1.0)
        forward_s = [1e-3 * each * ms for ms in work]
        sizes = [MB * size for size in weights]
        return PartitionTable(
            names=[f"layer{k}" for k in range(len(work))],
            layers=[1] * len(work),
            parameters=[round(size / 4) for size in sizes],
            forward_s=forward_s,
            backward_s=[2 * s for s in forward_s],
            input_part_s=forward_s,
            weight_part_s=forward_s,
            cut_bytes=[MB * samples * size for size in crossing[:-1]],
            gradient_bytes=sizes,
            kept_bytes=[4 * size for size in sizes],
            activation_bytes=[2 * MB * samples * size for size in crossing],
            working_bytes=[0.0] * len(work),
            batch=samples,
        )

    return costs_of


def drawn(seed: int) -> Callable[[int], PartitionTable]:
    rng = np.random.default_rng(seed)
    numbers = (rng.uniform(low, high, 6).tolist() for low, high in ((0.5, 4), (1, 40), (0.1, 4)))
    return network(*numbers)


NETWORKS = {
    "alike": network([1.0] * 6, [4.0] * 6, [0.5] * 6),
    "work in front, weights behind": network(
        [4, 3, 2, 1, 0.5, 0.5], [0.1, 0.2, 1, 4, 60, 60], [4, 2, 1, 0.5, 0.1, 0.1]
    ),
    "weights in front": network([0.2, 1, 1, 1, 1, 1], [80, 2, 2, 2, 2, 2], [0.2] * 6),
    "heavy weights": network([1.0] * 6, [50.0] * 6, [0.1] * 6),
    "wide cuts": network([1.0] * 6, [1.0] * 6, [30.0] * 6),
    "one heavy part": network([1, 1, 12, 1, 1, 1], [2.0] * 6, [1.0] * 6),
    "small slices are slow": network([1.0] * 6, [30.0] * 6, [0.1] * 6, small_slices=2.5),
    "two parts": network([2.0, 2.0], [10.0, 10.0], [0.5, 0.5]),
    **{f"drawn {seed}": drawn(seed) for seed in (0, 1)},
}


def machine(
    *speeds: float, memory: float | None = None, link: float = 2e9, **rates: Any
) -> Machine:
    usual = {
        "message_s": 1e-4,
        "reduce_bytes_per_s": 2e9,
        "reduce_s": 2e-4,
        "ranks": len(speeds),
        "update_s_per_byte": 2e-10,
        "overlaps": True,
    }
    device = Device(
        host="a",
        name="gpu",
        memory_bytes=None if memory is None else round(memory * MB),
        units_per_s=1.0,
        units_per_own_s=1.0,
    )
    return Machine(
        devices=(device,) * len(speeds),
        capacity=speeds,
        bandwidth_bytes_per_s=link,
        rates=Rates(**(usual | rates)),
    )


CLUSTERS = {
    "two alike": machine(1.0, 1.0),
    "four alike, slow links": machine(1.0, 1.0, 1.0, 1.0, link=1e8, reduce_bytes_per_s=1e8),
    "four alike, little memory": machine(1.0, 1.0, 1.0, 1.0, memory=450),
    "processors": machine(1.0, 1.0, reduce_bytes_per_s=5e8, overlaps=False),
    "three speeds": machine(1.0, 0.4, 0.7),
}


@pytest.mark.parametrize("at", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize("costs_of", NETWORKS.values(), ids=NETWORKS)
def test_the_trainer_takes_what_the_command_says(
    at: Machine, costs_of: Callable[[int], PartitionTable]
) -> None:
    asked = ShapeRequest(settings=PlanSettings(schedule=AUTO))
    target: Any = None  # of which shapes know nothing
    study = Study(target, at.described(), BATCH, lambda microbatches: True, costs_of, "")
    shapes = study.shapes(len(at.devices))
    plain = [shape for shape in shapes if shape.plain]
    if not any(shape.fits for shape in plain):
        with pytest.raises(PlanError, match="memory"):
            fastest_sizes(at, [lambda m: costs_of(-(-BATCH // m))], BATCH, asked)
        return
    said = recommended(plain)
    taken = fastest_sizes(at, [lambda m: costs_of(-(-BATCH // m))], BATCH, asked).best
    assert said.sizes == taken.sizes
    assert said.step_s == taken.step_s
    assert [plan.cuts for plan in said.plans] == [plan.cuts for plan in taken.plans]
    assert [plan.schedule for plan in said.plans] == [plan.schedule for plan in taken.plans]
    # and what it shows is no slower, but for the preference of one stage
    shown = recommended(shapes)
    assert shown.samples_per_s >= 0.95 * taken.samples_per_s
