"""Sends tensors between a worker and its driver, from device to device.

Such are the weights that a worker owns and the driver's stages use too, with their gradients: the
tied weights of a language model (its embedding and its last layer), or those of a whole stage that
the driver has a copy of. They are sent in each step; what code on the driver reads when it does.
"""

from collections.abc import Sequence

from torch import Tensor

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.comm import Mesh
from lightning_hybrid.stage.gradient_averaging import Broadcasts

_DRIVER = 0


class LendingLine:
    """Takes tensors from a worker to its driver and back, from device to device.

    Both ranks have one, and both call the same method together.

    Args:
        mesh: the mesh of this rank, which is that worker or the driver.
        owner: ``pp_rank`` of the worker.
    """

    def __init__(self, mesh: Mesh, owner: int) -> None:
        self._mesh = mesh
        self._owner = owner
        self._made: dict[tuple[int, int], Broadcasts] = {}

    def to_driver(self, tensors: Sequence[Tensor]) -> None:
        """Write what the worker's tensors have into those of the driver.

        The write does not raise the versions of the driver's tensors.

        Args:
            tensors: dense ones on the device of the rank, on both ranks of the same sizes and types
                and in the same order.
        """
        self._send((self._owner, _DRIVER), tensors)

    def to_owner(self, tensors: Sequence[Tensor]) -> None:
        """Write what the driver's tensors have into those of the worker; see :meth:`to_driver`."""
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
