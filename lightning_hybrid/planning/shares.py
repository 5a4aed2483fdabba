"""How many samples of a global batch each replica takes, by its speed."""

import heapq
from collections.abc import Sequence
from operator import truediv


def deal(samples: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Whole samples in proportion to speeds: each goes to the replica that would finish it first.

    Each replica gets one at least. With fewer samples in all, no replica gets more than before.

    Args:
        samples: in the global batch, as many as there are replicas or more.
        speeds: (R,) of the replicas, relative to each other.

    Returns:
        (R,) samples of each replica.
    """
    # nobody ends with less than the whole part of its quota of what is left after one sample each
    quota = max(0, samples - len(speeds)) / sum(speeds)
    shares = [max(1, int(quota * speed)) for speed in speeds]
    finish = [((n + 1) / speed, r) for r, (n, speed) in enumerate(zip(shares, speeds))]
    heapq.heapify(finish)
    for _ in range(samples - sum(shares)):
        _, replica = finish[0]
        shares[replica] += 1
        heapq.heapreplace(finish, ((shares[replica] + 1) / speeds[replica], replica))
    return tuple(shares)


def batch_sizes(samples: int, batch: int, replicas: int, *, drop_last: bool) -> list[int]:
    """Sizes of the global batches of an epoch, each of one sample per replica at least.

    Where the samples that are left are fewer than the replicas, the last batch takes as many of the
    one before as it lacks.

    Args:
        samples: of the epoch, as many as there are replicas or more.
        batch: size of a global batch: two samples per replica or more.
        replicas: number of replicas.
        drop_last: whether the samples that do not fill a batch are left out.
    """
    whole, left = divmod(samples, batch)
    sizes = [batch] * whole
    if left and not drop_last:
        sizes.append(left)
        if left < replicas:
            sizes[-2:] = [batch + left - replicas, replicas]
    return sizes


def without_the_slowest(batch: int, speeds: Sequence[float]) -> tuple[int, float]:
    """How many of the fastest replicas take the most samples a second, links left out.

    Args:
        batch: samples of a replica in a step, on average.
        speeds: (R,) of the replicas.

    Returns:
        Their number, and how many times as many samples a second they take as all replicas.
    """
    ranked = sorted(speeds, reverse=True)
    rates = [
        batch * count / max(map(truediv, deal(batch * count, ranked[:count]), ranked))
        for count in range(1, len(ranked) + 1)
    ]
    best = max(range(len(rates)), key=lambda index: (rates[index], index))
    return best + 1, rates[best] / rates[-1]
