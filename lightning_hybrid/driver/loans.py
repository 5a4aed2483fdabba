"""Fetches weights that workers own and the driver uses too, and returns their gradients.

They are sent from device to device (:mod:`lightning_hybrid.stage.lent_weights`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hybrid.comm import signals_deferred
from lightning_hybrid.comm.protocol import LendWeights, TakeLentGradients
from lightning_hybrid.driver.commands import Workers
from lightning_hybrid.stage import LentWeights


@dataclass(frozen=True)
class Loan:
    """Weights of one network that one worker owns and the driver's stages use too.

    Attributes:
        network: number of the network.
        owner: ``pp_rank`` of the worker.
        names: names of the weights in the LightningModule.
        weights: sends their values and gradients between the two ranks.
    """

    network: int
    owner: int
    names: Sequence[str]
    weights: LentWeights


class Loans:
    """All weights that the workers of a replica lend its driver.

    Args:
        workers: the channels to the workers.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._all: list[Loan] = []

    def __bool__(self) -> bool:
        return bool(self._all)

    @property
    def names(self) -> set[str]:
        """Names in the LightningModule of the lent weights."""
        return {name for loan in self._all for name in loan.names}

    def add(self, loan: Loan) -> None:
        """Register weights of a network that was cut, which a worker lends this driver."""
        self._all.append(loan)

    @signals_deferred
    def bring(self) -> None:
        """Fetch the present values of all lent weights from their owners."""
        for loan in self._all:
            self._workers.send(loan.owner, LendWeights(loan.network))
            with self._workers.joined():
                loan.weights.lend()

    @signals_deferred
    def give_back(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add gradients of lent weights, found by a backward here, to the owners' gradients.

        Args:
            gradients: gradients by name of the parameter in the LightningModule.

        Returns:
            The gradients that were not sent: those of other parameters, and those of a loan of
            which a weight has none here, or a sparse one.
        """
        rest = dict(gradients)
        for loan in self._all:
            found = [rest[name] for name in loan.names if name in rest]
            if len(found) < len(loan.names) or not all(map(_is_dense, found)):
                continue
            self._workers.send(loan.owner, TakeLentGradients(loan.network))
            with self._workers.joined():
                loan.weights.give_back(found)
            for name in loan.names:
                del rest[name]
        return rest


def _is_dense(gradient: Tensor) -> bool:
    return gradient.layout is torch.strided
