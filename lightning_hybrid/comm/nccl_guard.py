"""A lost rank is noticed by one whose host waits on its device.

Who waits for a peer over gloo hears at once that it is gone. Over NCCL the device waits, and in the
next ``loss.item()`` the host with it; no error reaches either before the time-out, when torch's
watchdog ends the process. So a thread on each rank of a replica listens over gloo to the next one.
Where that is lost or has failed it aborts what is under way on the device, and tells the rank
before, which does the same.
"""

from contextlib import suppress

import torch

from lightning_hybrid.comm.connections import ConnectionLost, Transfer
from lightning_hybrid.comm.mesh import Mesh
from lightning_hybrid.comm.threads import BackgroundThread

_TAG = 2**12 - 1  # of no word and of no placement


class Guard:
    """Listens to the next rank of a replica for one run.

    Args:
        mesh: the groups of this rank.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, here = mesh, mesh.coordinates
        ranks = here.ranks_per_replica
        self._after = mesh.wire((here.pp_rank + 1) % ranks, _TAG)
        self._before = mesh.wire((here.pp_rank - 1) % ranks, _TAG)
        self._said: Transfer | None = None  # one that is dropped would not arrive
        BackgroundThread(self._listen, "hybrid-guard", awaited=True).start()

    @classmethod
    def where_needed(cls, mesh: Mesh) -> "Guard | None":
        """One for a mesh whose devices wait by themselves; ``None``: gloo tells the host."""
        alone = mesh.coordinates.ranks_per_replica == 1
        return None if alone or mesh.backend == "gloo" else cls(mesh)

    def close(self, *, failed: bool = False) -> None:
        """The run is over on this rank, for good or ill: the rank before hears it."""
        if self._said is None:
            with suppress(RuntimeError):  # ConnectionLost, or that of a group that is given up
                self._said = self._before.send(torch.tensor([failed]))

    def _listen(self) -> None:
        failed = torch.tensor([False])
        try:
            self._after.receive(failed).wait()
            lost = ConnectionLost(f"Lost {self._after.peer}. It has failed")
        except ConnectionLost as error:
            failed[0], lost = True, error
        except RuntimeError:  # this rank has given up the group by itself
            return
        # a rank that has ended well shuts its groups down together with the others
        if failed:
            self._mesh.abort(lost)
            self.close(failed=True)
