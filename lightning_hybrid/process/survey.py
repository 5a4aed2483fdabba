"""All ranks look at their devices at the same time, and hear what the others have seen."""

from collections.abc import Sequence
from dataclasses import replace
from math import log2
from time import perf_counter

import torch

from lightning_hybrid.comm.collectives import gather_objects, meet
from lightning_hybrid.comm.links import link_stages
from lightning_hybrid.comm.mesh import Mesh
from lightning_hybrid.comm.specs import TensorSpec
from lightning_hybrid.comm.transport import Group
from lightning_hybrid.planning.cluster import Cluster, make_cluster
from lightning_hybrid.planning.speed import look_at, measure_speed

LINK_BYTES = 4 * 2**20
"""What is sent to see how fast a link is."""
LINK_REPEATS = 4


def survey(
    world: Group,
    device: torch.device,
    replicas: int,
    stages: int,
    given: Sequence[float] | None,
) -> Cluster:
    """Look at the devices of all ranks; every rank calls this together.

    Args:
        world: group of all ranks.
        device: of this rank.
        replicas: number of replicas.
        stages: number of stages.
        given: relative speeds of the ranks; None: measure them.
    """
    speed = (0.0, 0.0)
    if given is None:
        meet(world)  # those on one host must feel each other
        speed = measure_speed(device)
    devices = gather_objects(world, look_at(device, speed))
    return make_cluster(devices, replicas, stages, given)


def measure_links(mesh: Mesh, cluster: Cluster, device: torch.device) -> Cluster:
    """Note what the slowest link carries when all are in use; all ranks together.

    The best of a few times counts, since a busy machine only ever makes one longer, and a power
    of two at that, so that a plan does not change from run to run. Over gloo only: NCCL makes a
    communicator at the first use of a link, in an order that all neighbours must agree on.
    """
    if mesh.coordinates.ranks_per_replica == 1 or mesh.backend != "gloo":
        return cluster
    [links] = link_stages(mesh, mesh.coordinates.chain, device).values()
    load = torch.zeros(LINK_BYTES, dtype=torch.uint8, device=device)
    best_s = float("inf")
    for _ in range(LINK_REPEATS):
        arrival = links.previous.post([TensorSpec.of(load)])
        meet(mesh.world)
        start_s = perf_counter()
        links.next.send([load])
        arrival.wait()
        links.next.flush()
        best_s = min(best_s, perf_counter() - start_s)
    slowest = min(gather_objects(mesh.world, LINK_BYTES / best_s))
    return replace(cluster, bandwidth_bytes_per_s=2.0 ** round(log2(slowest)))
