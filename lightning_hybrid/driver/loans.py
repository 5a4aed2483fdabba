"""Weights that workers lend the driver, and gradients that it gives back for them."""

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
        network: its number.
        owner: ``pp_rank`` of the worker.
        names: of the weights in the LightningModule.
        weights: they travel by this.
    """

    network: int
    owner: int
    names: Sequence[str]
    weights: LentWeights


class Loans:
    """All loans of one driver.

    Args:
        workers: of its replica.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._all: list[Loan] = []

    def __bool__(self) -> bool:
        return bool(self._all)

    @property
    def names(self) -> set[str]:
        """Names in the LightningModule of what is lent."""
        return {name for loan in self._all for name in loan.names}

    def add(self, loan: Loan) -> None:
        """A network was cut, and a worker lends this driver some of its weights."""
        self._all.append(loan)

    @signals_deferred
    def bring(self) -> None:
        """Have the values here that the owners have now."""
        for loan in self._all:
            self._workers.send(loan.owner, LendWeights(loan.network))
            loan.weights.lend()

    @signals_deferred
    def give_back(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add to the owners' gradients what has arisen here, from device to device.

        Args:
            gradients: by name in the LightningModule.

        Returns:
            Those that are not of lent weights, or that messages must bring: of some weights of a
            loan only, or sparse.
        """
        rest = dict(gradients)
        for loan in self._all:
            found = [rest[name] for name in loan.names if name in rest]
            if len(found) < len(loan.names) or not all(map(_is_dense, found)):
                continue
            self._workers.send(loan.owner, TakeLentGradients(loan.network))
            loan.weights.give_back(found)
            for name in loan.names:
                del rest[name]
        return rest


def _is_dense(gradient: Tensor) -> bool:
    return gradient.layout is torch.strided
