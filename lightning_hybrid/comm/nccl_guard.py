"""Detect a lost rank of a replica that communicates over NCCL.

A rank that waits for a peer over gloo gets an error at once when the peer is gone. Over NCCL the
device waits, and in the next ``loss.item()`` the host waits for the device; neither gets an error
before the time-out, when torch's watchdog ends the process. So a thread on each rank of a replica
listens over gloo to the next rank. If the next rank is lost or has failed, the thread aborts the
NCCL operations of its own rank and tells the previous rank, whose thread does the same.
"""

from contextlib import suppress

import torch

from lightning_hybrid.comm.connections import ConnectionLost, Transfer
from lightning_hybrid.comm.mesh import Mesh
from lightning_hybrid.comm.tags import ReservedTag
from lightning_hybrid.comm.threads import BackgroundThread


class NcclGuard:
    """A thread that listens to the next rank of the replica during one run; it starts at once.

    The next rank is that with the next ``pp_rank``; after the last rank comes the first one. Each
    rank of the replica must make a guard.

    Args:
        mesh: the process groups of this rank.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, here = mesh, mesh.coordinates
        ranks = here.ranks_per_replica
        self._after = mesh.wire((here.pp_rank + 1) % ranks, ReservedTag.GUARD)
        self._before = mesh.wire((here.pp_rank - 1) % ranks, ReservedTag.GUARD)
        self._said: Transfer | None = None  # kept, since a send that is dropped does not arrive
        BackgroundThread(self._listen, "hybrid-guard", awaited=True).start()

    @classmethod
    def where_needed(cls, mesh: Mesh) -> "NcclGuard | None":
        """Make a guard if this rank needs one.

        Returns:
            The guard; ``None``: the mesh uses gloo, which notices a lost rank itself, or the
            replica has no other rank.
        """
        alone = mesh.coordinates.ranks_per_replica == 1
        return None if alone or mesh.backend == "gloo" else cls(mesh)

    def close(self, *, failed: bool = False) -> None:
        """Tell the previous rank that the run is over here. Only the first call has an effect.

        Args:
            failed: whether this rank has failed; then the previous rank aborts its NCCL operations.
        """
        if self._said is None:
            with suppress(RuntimeError):  # ConnectionLost, or the error of a closed group
                self._said = self._before.send(torch.tensor([failed]))

    def _listen(self) -> None:
        failed = torch.tensor([False])
        try:
            self._after.receive(failed).wait()
            lost = ConnectionLost(f"Lost {self._after.peer}. It has failed")
        except ConnectionLost as error:
            failed[0], lost = True, error
        except RuntimeError:  # this rank has closed the group itself
            return
        # after a run that has ended well all ranks shut their groups down together
        if failed:
            self._mesh.abort(lost)
            self.close(failed=True)
