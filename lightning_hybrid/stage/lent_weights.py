"""Sends weights that a worker owns and the driver uses too, and their gradients, between the two.

They are the tied weights of a language model (its embedding and its last layer), or those of a
whole stage that the driver has a copy of. They are sent in each step, from device to device.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

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
        self._mesh, self._owner = mesh, owner
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


class LentWeights:
    """Weights that a worker owns and its driver uses too.

    The worker and the driver have one each, and both call together: `lend`, and then `give_back`
    on the driver with `take_back` on the worker.

    Args:
        parameters: the same ones in the same order on both. (On the driver they are proxies; this
            class reads and writes their memory.)
        line: between the two.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], line: LendingLine) -> None:
        self._parameters, self._line = list(parameters), line
        # both ranks must agree on them: user code may change the driver's (`parameter.data = ...`)
        self._types = [parameter.dtype for parameter in self._parameters]

    def lend(self) -> None:
        """Send the driver the values that the owner has now.

        (Their versions stay: the values may be the same as before. On the owner, which a step
        writes to, autograd refuses an older graph.)
        """
        with as_they_are():
            memory = [parameter.data for parameter in self._parameters]
            sent = [
                value if value.dtype == kind else torch.empty_like(value, dtype=kind)
                for value, kind in zip(memory, self._types)
            ]
            self._line.to_driver(sent)
            for value, other in zip(memory, sent):
                if other is not value:
                    value.copy_(other)

    def give_back(self, gradients: Sequence[Tensor]) -> None:
        """On the driver: send the owner the gradients that a backward has left here.

        Args:
            gradients: of all parameters, dense ones.
        """
        with as_they_are():
            # (those that another worker has sent are on the CPU)
            device = self._parameters[0].device
            self._line.to_owner([g.to(device, kind) for g, kind in zip(gradients, self._types)])

    def take_back(self) -> None:
        """On the owner: add the driver's gradients to those that are here."""
        with torch.no_grad():
            gradients = [torch.empty_like(parameter) for parameter in self._parameters]
            self._line.to_owner(gradients)
            for parameter, gradient in zip(self._parameters, gradients):
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad += gradient


def lent_weights(network: nn.Module, names: Iterable[str], line: LendingLine) -> LentWeights | None:
    """The `LentWeights` of a worker and the driver; ``None`` if there are no such parameters.

    Args:
        network: the network that the parameters are of.
        names: names of the parameters in it.
        line: between the two ranks.
    """
    named: Mapping[str, nn.Parameter] = dict(network.named_parameters())
    parameters = [named[name] for name in sorted(names)]
    return LentWeights(parameters, line) if parameters else None
