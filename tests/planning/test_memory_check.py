"""What devices lack for chains of given sizes, and what would fit."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from lightning_hybrid.planning.memory_check import (
    ChainSizes,
    MemoryFit,
    least_lacks,
    what_would_fit,
)
from lightning_hybrid.planning.partition_table import PartitionTable


@pytest.mark.parametrize("seed", range(20))
def test_the_least_that_lacks_is_that_of_the_best_of_all_cuts(seed: int) -> None:
    held = [float((7 * seed + 5 * k * k) % 11 + 1) for k in range(7)]
    limits, order = [3.0 + seed % 4, 5.0, 2.0], [1, 2, 0]

    def worst(cuts: tuple[int, ...]) -> float:
        runs = pairwise((0, *cuts, len(held)))
        return max(sum(held[a:b]) - limits[d] for (a, b), d in zip(runs, order))

    best = min(worst(cuts) for cuts in combinations(range(1, len(held)), 2))
    times = [1.0] * len(held)
    table = PartitionTable(
        forward_s=times, backward_s=times, cut_bytes=times[1:], memory_bytes=held
    )
    assert max(least_lacks(table, limits, order)) == pytest.approx(best, abs=1e-9)


def fit(limit: float, stages: int = 2, **how: bool) -> MemoryFit:
    """Six partitions of 1 GB, and 2 GB of activations each."""
    return MemoryFit(
        way=ChainSizes(stages=stages, microbatches=2, **how),
        limits=[limit] * stages,
        whole=PartitionTable(
            forward_s=[1.0] * 6,
            backward_s=[1.0] * 6,
            cut_bytes=[1e8] * 5,
            kept_bytes=[1e9] * 6,
            activation_bytes=[2e9] * 6,
        ),
        batch=8,
    )


def test_what_is_said_to_fit_does() -> None:
    assert not fit(5e9).fits
    assert max(fit(5e9).lacks) == pytest.approx(4e9)
    text = what_would_fit([fit(5e9)])
    # three partitions with a quarter of their activations, and the inputs: 4.6 GB
    assert "2 stages, 4 micro-batches and recompute=True" in text
    assert "6 stages, 2 micro-batches (each on a device with 5 GB free)" in text
    assert "2 stages, 2 micro-batches, on 2 devices with 9 GB free" in text
    assert fit(9e9).fits
    assert not fit(8.9e9).fits
    assert fit(5e9, stages=6).fits
    assert not fit(5e9, stages=5).fits


def test_backwards_inside_of_calls_are_named_where_they_would_fit() -> None:
    table = PartitionTable(
        forward_s=[1.0] * 2,
        backward_s=[1.0] * 2,
        cut_bytes=[1e8],
        kept_bytes=[1e9] * 2,
        gradient_bytes=[4e8] * 2,
        activation_bytes=[8e9] * 2,  # of eight micro-batches, of which two are kept
    )
    way = ChainSizes(stages=2, microbatches=8)
    for limit, fits in ((3.4e9, True), (3.3e9, False)):
        asked = MemoryFit(way=way, limits=[limit] * 2, whole=table, batch=8, may_go_inside=True)
        named = "2 stages, 8 micro-batches and schedule='1f1b', if the network returns its loss"
        assert (named in what_would_fit([asked])) is fits
        assert asked.on(replace(way, inside=True), [limit] * 2).fits is fits
        assert "1f1b" not in what_would_fit([replace(asked, may_go_inside=False)])


def test_where_one_partition_is_too_large_only_larger_devices_are_named() -> None:
    text = what_would_fit([fit(0.9e9)])
    assert text == "It would fit with 2 stages, 2 micro-batches, on 2 devices with 9 GB free."
