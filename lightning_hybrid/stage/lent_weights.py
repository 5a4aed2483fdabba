"""Sends weights that a worker owns and the driver uses too, and their gradients, between the two.

They are the tied weights of a language model (its embedding and its last layer), or those of a
whole stage that the driver has a copy of. They are sent in each step, from device to device.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.comm import Group, Mesh
from lightning_hybrid.stage.gradient_averaging import Broadcasts

_DRIVER = 0


class LentWeights:
    """Weights that a worker owns and its driver uses too.

    The worker and the driver have one each, and both call together: `lend`, and then `give_back`
    on the driver with `take_back` on the worker.

    Args:
        parameters: the same ones in the same order on both. (On the driver they are proxies; this
            class reads and writes their memory.)
        to_driver: gives a group of the worker and the driver, in this order; both make it when it
            is first asked for.
        to_owner: gives another group, of the driver and the worker. (In one group of NCCL the two
            directions would wait for each other.)
        peer: the name of the other rank in an error.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        to_driver: Callable[[], Group],
        to_owner: Callable[[], Group],
        peer: str,
    ) -> None:
        self._parameters, self._peer = list(parameters), peer
        self._to_driver, self._to_owner = to_driver, to_owner
        self._values: Broadcasts | None = None
        self._gradients: Broadcasts | None = None

    def lend(self) -> None:
        """Send the driver the values that the owner has now.

        (The write does not raise the versions of the driver's tensors: their values may be the same
        as before. On the owner, which a step writes to, autograd refuses an older graph.)
        """
        self._values = self._values or Broadcasts(self._to_driver(), self._peer)
        with as_they_are():
            self._values.send(self._parameters)

    def give_back(self, gradients: Sequence[Tensor]) -> None:
        """On the driver: send the owner the gradients that a backward has left here.

        Args:
            gradients: of all parameters, dense, of their types and on their device.
        """
        self._gradients = self._gradients or Broadcasts(self._to_owner(), self._peer)
        self._gradients.send(gradients)

    def take_back(self) -> None:
        """On the owner: add the driver's gradients to those that are here."""
        with torch.no_grad():
            gradients = [torch.empty_like(parameter) for parameter in self._parameters]
            self.give_back(gradients)
            for parameter, gradient in zip(self._parameters, gradients):
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad += gradient


def lent_weights(
    network: nn.Module, names: Iterable[str], owner: int, mesh: Mesh
) -> LentWeights | None:
    """The `LentWeights` of a worker and the driver; ``None`` if there are no such parameters.

    Args:
        network: the network that the parameters are of.
        names: names of the parameters in it.
        owner: ``pp_rank`` of the worker.
        mesh: the mesh of this rank, which is that worker or the driver.
    """
    named: Mapping[str, nn.Parameter] = dict(network.named_parameters())
    parameters = [named[name] for name in sorted(names)]
    if not parameters:
        return None
    here = mesh.coordinates
    return LentWeights(
        parameters,
        lambda: mesh.siblings((owner, _DRIVER)),
        lambda: mesh.siblings((_DRIVER, owner)),
        str(here.at(owner if here.pp_rank == _DRIVER else _DRIVER)),
    )
