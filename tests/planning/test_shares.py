"""Shares of a global batch: whole samples, as near to the speeds of the replicas as they can be."""

from itertools import product

import pytest

from lightning_hybrid.planning import Device, batch_sizes, share_samples
from lightning_hybrid.planning.run_cluster import make_cluster


@pytest.mark.parametrize("speeds", [(1.0, 0.43), (1.0, 0.43, 0.16), (0.2, 1.0, 1.0, 0.5), (1.0,)])
def test_no_other_shares_end_earlier(speeds: tuple[float, ...]) -> None:
    count = len(speeds)
    for samples in range(count, 14):
        shares = share_samples(samples, speeds)
        assert sum(shares) == samples
        assert min(shares) >= 1
        others = product(range(1, samples - count + 2), repeat=count)
        best = min(
            max(map(lambda n, speed: n / speed, other, speeds))
            for other in others
            if sum(other) == samples
        )
        assert max(map(lambda n, speed: n / speed, shares, speeds)) == pytest.approx(best)


def test_a_smaller_batch_gives_nobody_more() -> None:
    speeds = (1.0, 0.43, 0.16, 0.9)
    for samples in range(len(speeds), 60):
        smaller, larger = share_samples(samples, speeds), share_samples(samples + 1, speeds)
        assert all(a <= b for a, b in zip(smaller, larger))


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
@pytest.mark.parametrize("drop_last", [False, True])
def test_all_samples_are_in_batches_that_give_each_replica_one(
    replicas: int, drop_last: bool
) -> None:
    for batch in range(2 * replicas, 4 * replicas):
        for samples in range(replicas, 6 * batch):
            sizes = batch_sizes(samples, batch, replicas, drop_last=drop_last)
            left = samples % batch if drop_last else 0
            assert sum(sizes) == samples - left
            assert all(replicas <= size <= batch for size in sizes)
            assert len(sizes) == (samples // batch if drop_last else -(-samples // batch))


def test_a_replica_is_as_fast_as_the_device_with_the_least_to_spare() -> None:
    devices = [Device(host="host", name="cpu", memory_bytes=None)] * 4
    alone = make_cluster(devices, 4, 1, (1.0, 0.5, 2.0, 1.0))
    assert alone.replica_speeds == (2.0, 1.0, 4.0, 2.0)
    chains = make_cluster(devices, 2, 2, (1.0, 0.4, 0.8, 0.5))  # stages on 0, 2 and on 3, 1
    assert [tuple(chains.order[k : k + 2]) for k in (0, 2)] == [(0, 1), (2, 3)]
    assert chains.replica_speeds == pytest.approx((min(1 / 0.8, 1.0), min(1.0, 0.5 / 0.4)))
