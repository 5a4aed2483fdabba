from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.planning import plan_stages
from lightning_hybrid.planning.polish import polish


def test_a_cut_is_moved_to_where_the_step_is_shorter() -> None:
    assert polish([2, 9], lambda ends: abs(ends[0] - 7)) == ([7, 9], 0)


def test_two_cuts_move_together_where_one_alone_does_not_help() -> None:
    def length_s(ends: list[int]) -> float:
        return abs(ends[0] - 4) + 10 * (ends[1] - ends[0] != 3)

    assert polish([2, 5, 9], length_s) == ([4, 7, 9], 0)


@given(st.lists(st.floats(0.1, 1), min_size=4, max_size=12), st.integers(1, 4))
def test_polished_ends_are_those_of_stages_and_no_worse(times: list[float], stages: int) -> None:
    def slowest(ends: list[int]) -> float:
        return max(sum(times[a:b]) for a, b in pairwise([0, *ends]))

    start = [*range(1, stages), len(times)]
    ends, value = polish(start, slowest)
    assert ends[-1] == len(times)
    assert all(a < b for a, b in pairwise([0, *ends]))
    assert value == slowest(ends) <= slowest(start)


def test_the_plan_cuts_where_no_near_cut_has_a_shorter_step() -> None:
    seconds = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    names = [f"layer{i}" for i in range(8)]

    def plan(cuts: list[str] | None) -> float:
        return plan_stages(
            names, seconds, seconds[::-1], [5e8] * 7, [1] * 8, [1] * 8, replicas=1, stages=2,
            microbatches=3, bandwidth_bytes_per_s=1e9, cut_points=cuts,
        ).predicted_step_s or 0.0  # fmt: skip

    assert plan(None) == min(plan([name]) for name in names[1:])
