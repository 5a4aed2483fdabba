"""Divide the samples of a global batch over replicas by their speed (`BySpeed`)."""

import heapq
from collections.abc import Sequence


def share_samples(samples: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Give each replica whole samples about in proportion to its speed.

    Each replica gets at least one sample; each further sample goes to the replica that would finish
    it first. If the number of samples falls, no replica's share grows.

    Args:
        samples: number of samples of the global batch, at least one per replica.
        speeds: (R,) relative speeds of the replicas.

    Returns:
        (R,) number of samples of each replica.
    """
    # a start that the rule below reaches in any case: the whole part of each replica's quota
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
    """List the sizes of the global batches of an epoch, in order.

    Each batch has at least one sample per replica.
    If fewer samples than replicas are left for the last batch, it takes as many as it lacks from
    the batch before.

    Args:
        samples: number of samples of the epoch, at least one per replica.
        batch: size of a global batch, at least two samples per replica.
        replicas: number of replicas.
        drop_last: whether samples that do not fill the last batch are left out.
    """
    whole, left = divmod(samples, batch)
    sizes = [batch] * whole
    if left and not drop_last:
        sizes.append(left)
        if left < replicas:
            sizes[-2:] = [batch + left - replicas, replicas]
    return sizes
