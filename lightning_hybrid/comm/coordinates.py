"""Coordinates of ranks in the mesh of replicas and stages.

::

                 pp_rank 0      pp_rank 1      pp_rank 2
                 driver         worker         worker
                 last stage     stage 0        stage 1
    dp_rank 0    rank 0         rank 1         rank 2
    dp_rank 1    rank 3         rank 4         rank 5

Here each rank has one stage; under a free placement a rank has several.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from lightning_hybrid.errors import PlanError


@dataclass(frozen=True)
class Coordinates:
    """Coordinates of a rank in the mesh of ``replicas`` x ``ranks_per_replica`` ranks.

    Attributes:
        rank: global rank: number of the process among all ranks.
        replicas: number of replicas.
        ranks_per_replica: number of ranks in a replica; a rank has one stage, or several under a
            free placement.
        order: for each index in the mesh, the global rank that has it; empty if each rank is its
            own index. See :mod:`lightning_hybrid.planning.run_cluster`.
        free: whether a rank may have several stages, so that ``pp_rank`` does not tell which stage
            it has.
    """

    rank: int
    replicas: int
    ranks_per_replica: int
    order: tuple[int, ...] = ()
    free: bool = False

    def __post_init__(self) -> None:
        size = self.replicas * self.ranks_per_replica
        if not 0 <= self.rank < size:
            raise PlanError(
                f"rank {self.rank} is outside of replicas({self.replicas}) x "
                f"stages({self.ranks_per_replica}) = {size} ranks."
            )

    @property
    def index(self) -> int:
        """Index of this rank in the mesh: ``dp_rank * ranks_per_replica + pp_rank``."""
        return self.order.index(self.rank) if self.order else self.rank

    @property
    def dp_rank(self) -> int:
        """Number of this rank's replica, from 0."""
        return self.index // self.ranks_per_replica

    @cached_property
    def pp_rank(self) -> int:
        """Index in the replica: 0 is the driver, k > 0 a worker (of stage k - 1 in a chain)."""
        return self.index % self.ranks_per_replica

    def at(self, pp_rank: int) -> "Coordinates":
        """Return the coordinates of the rank of this replica that has the given ``pp_rank``."""
        index = self.index - self.pp_rank + pp_rank
        return replace(self, rank=self.order[index] if self.order else index)

    @cached_property
    def is_driver(self) -> bool:
        """Whether this rank is the driver of its replica, which runs the user's code."""
        return self.pp_rank == 0

    @property
    def chain(self) -> tuple[int, ...]:
        """``pp_rank`` of each stage if every rank has one: workers in order, then the driver."""
        return (*range(1, self.ranks_per_replica), 0)

    @property
    def lightning_rank(self) -> int:
        """The rank that Lightning and scripts are told, ``trainer.global_rank``; not :attr:`rank`.

        With R replicas of S ranks, drivers have 0 .. R-1 by replica, and workers R .. R*S-1.
        """
        if self.is_driver:
            return self.dp_rank
        # workers come after all drivers: scripts divide data over ranks 0 .. R-1, a world of size R
        workers = self.ranks_per_replica - 1
        return self.replicas + self.dp_rank * workers + self.pp_rank - 1

    def __str__(self) -> str:
        role = "driver" if self.is_driver else "worker"
        stage = "" if self.free else f", stage {(self.pp_rank - 1) % self.ranks_per_replica}"
        return f"rank {self.rank} ({role}, replica {self.dp_rank}{stage})"
