"""What stages cannot do, tried in one set of processes: ``python refused_script.py FOLDER``.

Each error is caught, as in a notebook, and the next Trainer goes on in the same processes.
"""

import os
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from user_code_script import CASES, Case, Plain, fit

from lightning_hybrid import HybridGabraStrategy


class CallsNoModule(Case):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.net.first.weight.T)
        return nn.functional.cross_entropy(hidden @ self.net.third.weight.T, y)


class UsesLBFGS(Case):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class PenalisesGradients(Case):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        [gradient] = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return super().loss(x, y) + gradient.square().mean()


class CallsAPart(Case):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + self.net.first(x).square().mean()


# `precision="16-mixed"` alone becomes bfloat16 on CPUs
SCALER = torch.amp.GradScaler("cpu")
TRIED: dict[str, tuple[type[Case], dict[str, Any], dict[str, Any]]] = {
    # class, arguments of the strategy, arguments of the Trainer
    "unknown cut": (Plain, {"allocation": ["net.secnd"]}, {}),
    "too few cuts": (Plain, {"allocation": []}, {}),
    "unknown network": (Plain, {"network": "model"}, {}),
    "no call": (CallsNoModule, {}, {}),
    "part of a network": (CallsAPart, {}, {}),
    "LBFGS": (UsesLBFGS, {}, {}),
    "create_graph": (PenalisesGradients, {}, {}),
    "16-mixed": (Plain, {}, {"plugins": MixedPrecision("16-mixed", "cpu", SCALER)}),
    "sync_batchnorm": (Plain, {}, {"sync_batchnorm": True}),
    "nothing": (Plain, {}, {}),
}


def attempt(name: str, folder: Path) -> dict[str, Any]:
    """Returns the text of the error, empty without one, and whether any weight has changed."""
    case, arguments, options = TRIED[name]
    CASES[name] = case
    strategy = HybridGabraStrategy(1, 2, **{"allocation": ["net.second"], **arguments})
    made: list[tuple[Case, dict[str, Tensor]]] = []

    def keep(module: Case) -> None:
        made.append((module, deepcopy(module.state_dict())))

    try:
        fit(name, folder, keep, strategy=strategy, devices=2, **options)
        text = ""
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    [(module, before)] = made
    after = module.state_dict()
    return {"error": text, "trained": any(not before[n].equal(after[n]) for n in before)}


def main(folder: Path) -> None:
    seen = {name: attempt(name, folder) for name in TRIED}
    torch.save(seen, folder / f"rank{os.environ.get('LOCAL_RANK', '0')}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
