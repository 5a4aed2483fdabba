"""What follows a backward, from given times."""

from dataclasses import replace

import pytest

from lightning_hybrid.planning.run_cluster import Rates

RATES = Rates(
    message_s=3e-4,
    reduce_bytes_per_s=1e9,
    reduce_s=1e-3,
    ranks=2,
    update_s_per_byte=1e-9,
    overlaps=True,
)


def test_an_allreduce_is_a_ring_of_the_replicas() -> None:
    assert RATES.reduced_s(1e9, 1) == 0.0
    assert RATES.reduced_s(1e9, 2) == pytest.approx(1.001)
    # each of four sends 3/4 of it twice, each of two 1/2
    assert RATES.reduced_s(1e9, 4) == pytest.approx(0.001 + 1.5)


def test_an_allreduce_of_nothing_counts_once() -> None:
    reduced, updates = RATES.after_backward([1e6, 2e6, 0.0], 2)
    assert reduced == pytest.approx([1e-3, 2e-3, 1e-3])
    assert updates == pytest.approx([1e-3, 2e-3, 0.0])


def test_on_a_cpu_the_allreduce_is_added_to_the_optimizer_step() -> None:
    reduced, updates = replace(RATES, overlaps=False).after_backward([1e6, 2e6], 2)
    assert reduced == []
    assert updates == pytest.approx([2e-3, 5e-3])
