from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import planned, step_problem

from lightning_hybrid.allocation.black_box_gabra import Breeding, evolve
from lightning_hybrid.errors import AllocationError
from lightning_hybrid.planning.free_placements import FreePlacements, runs
from lightning_hybrid.planning.partition_table import TiedWeight
from lightning_hybrid.planning.step_problem import LinkCosts


def space(seed: int, n: int, m: int, room: float = 0.0) -> FreePlacements:
    rng = np.random.default_rng(seed)
    sizes = rng.uniform(0.1, 1.0, n)
    limits = [room * float(sizes.sum()) / m] * m if room else []
    problem = step_problem(
        forward_s=rng.uniform(0.1, 1, n).tolist(),
        backward_s=rng.uniform(0.1, 2, n).tolist(),
        cut_bytes=rng.uniform(0, 0.3, n - 1).tolist(),
        speeds=rng.uniform(0.5, 1, m).tolist(),
        links=LinkCosts.equal(m, 2.0, 0.01),
        microbatches=3,
        memory_bytes=sizes.tolist() if room else [],
        memory_limits=limits,
    )
    return FreePlacements(problem)


def valid(genes: tuple[int, ...], n: int, m: int) -> bool:
    return len(genes) == n and genes[-1] == 0 and set(genes) == set(range(m))


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(0, 10))
def test_all_operators_give_each_device_a_partition_and_the_driver_the_last(
    seed: int, m: int, more: int
) -> None:
    n, rng = m + more, np.random.default_rng(seed)
    placements = space(seed, n, m)
    left, right = placements.random(rng), placements.random(rng)
    children = [left, right, placements.cross(left, right, rng)]
    children += [placements.neighbour(left, rng) for _ in range(20)]
    assert all(valid(child, n, m) for child in children)


def test_runs_are_the_stretches_on_one_device() -> None:
    assert runs((1, 1, 0, 2, 2, 0)) == ([2, 3, 5, 6], [1, 0, 2, 0])
    assert runs((0,)) == ([1], [0])


def test_small_problems_are_solved_nearly_as_well_as_by_trying_all() -> None:
    for seed in range(3):
        placements = space(seed, 7, 2, room=1.3)
        every = [x for x in product(range(2), repeat=7) if valid(x, 7, 2)]
        best = min(map(placements.cost, every))
        genes, history = evolve(placements, seed, Breeding(evaluations=600))
        assert placements.cost(genes) == history[-1] <= 1.01 * best


def test_a_search_asks_as_often_as_it_may_and_never_gets_worse() -> None:
    history = evolve(space(0, 9, 3), 0, Breeding(evaluations=250))[1]
    assert len(history) == 250
    assert all(after <= before for before, after in pairwise(history))


def test_the_same_seed_gives_the_same_placement() -> None:
    few = Breeding(evaluations=200)
    assert evolve(space(1, 9, 3), 4, few) == evolve(space(1, 9, 3), 4, few)


def test_limits_that_no_placement_keeps_are_reported() -> None:
    with pytest.raises(AllocationError, match="none of 100 placements keeps every device"):
        evolve(space(0, 12, 3, room=0.5), 0, Breeding(evaluations=100))


def test_no_placement_is_simulated_twice_and_a_small_problem_ends() -> None:
    class Counted(FreePlacements):
        def cost(self, genes: tuple[int, ...]) -> float:
            asked.append(genes)
            return super().cost(genes)

    asked: list[tuple[int, ...]] = []
    history = evolve(Counted(space(0, 5, 2).problem), 0, Breeding(evaluations=100))[1]
    assert len(asked) == len(set(asked)) == len(history) <= 2**4 - 1


def test_a_tied_embedding_goes_to_the_driver_over_a_slow_link_and_not_over_a_fast_one() -> None:
    """The first partition, light, shares its weight with the last one, which is the driver's."""
    network = {
        "names": tuple("abcd"),
        "layers": [1] * 4,
        "parameters": [1] * 4,
        "forward_s": [0.1, 1.0, 1.0, 0.4],
        "backward_s": [0.2, 2.0, 2.0, 0.8],
        "cut_bytes": [0.3, 0.1, 0.1],
        "stages": 2,
        "microbatches": 4,
    }
    weight = TiedWeight(4.0, (0, 3))
    for tied, bandwidth, first in (([], 1.0, 1), ([weight], 1e3, 1), ([weight], 1.0, 0)):
        plan = planned(**network, tied=tied, bandwidth_bytes_per_s=bandwidth, contiguous=False)
        assert plan.devices[0] == first
        # a chain with its cuts sends the value and the gradient, 4 bytes each
        chains = [
            planned(**network, tied=weights, bandwidth_bytes_per_s=bandwidth, cut_points=["c"])
            for weights in (tied, [])
        ]
        later_s = chains[0].step_s - chains[1].step_s
        assert later_s == pytest.approx(2 * 4.0 / bandwidth if tied else 0.0)
