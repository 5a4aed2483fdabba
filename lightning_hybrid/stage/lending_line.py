"""Sends tensors between a worker and its driver, from device to device.

The tensors are weights that a worker owns and the driver uses too, and the gradients of these
weights. Weights that the driver's stages use are sent in each step: tied weights of a language
model (its embedding and its last layer), and the weights of a stage that the driver has a copy of.
Weights that the user's code reads on the driver are sent when it reads them.
"""

from collections.abc import Sequence

from torch import Tensor

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.comm import Mesh
from lightning_hybrid.stage.gradient_averaging import Broadcasts

_DRIVER = 0


class LendingLine:
    """Takes tensors from a worker to its driver and back, from device to device.

    Worker and driver have a line each. Both ranks call the same method together, each with its own
    tensors: the method reads the tensors of one rank, and writes those of the other one.

    Args:
        mesh: the mesh of this rank, which is that worker or the driver.
        owner: ``pp_rank`` of the worker.
    """

    def __init__(self, mesh: Mesh, owner: int) -> None:
        self._mesh = mesh
        self._owner = owner
        self._made: dict[tuple[int, int], Broadcasts] = {}

    def to_driver(self, tensors: Sequence[Tensor]) -> None:
        """Copy the values of the worker's tensors into the driver's; both ranks call it together.

        Autograd does not notice the write: the versions of the driver's tensors stay the same.

        Args:
            tensors: this rank's tensors: dense, on its device; on both ranks of the same sizes and
                types, and in the same order.
        """
        self._send((self._owner, _DRIVER), tensors)

    def to_owner(self, tensors: Sequence[Tensor]) -> None:
        """Copy the values of the driver's tensors into the worker's; both ranks call it together.

        Args:
            tensors: as for :meth:`to_driver`.
        """
        self._send((_DRIVER, self._owner), tensors)

    def _send(self, ends: tuple[int, int], tensors: Sequence[Tensor]) -> None:
        # a group for each direction: in one group of NCCL they would wait for each other; both
        # ranks make it when it is first used
        if ends not in self._made:
            here = self._mesh.coordinates
            peer = self._owner if here.pp_rank == _DRIVER else _DRIVER
            self._made[ends] = Broadcasts(self._mesh.siblings(ends), str(here.at(peer)))
        with as_they_are():
            self._made[ends].send(tensors)
