"""Predict the size of optimizer states, which do not exist before the first step."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

_TENSORS: dict[str, Callable[[dict[str, Any]], int]] = {
    "SGD": lambda o: int(o["momentum"] != 0),
    "Adam": lambda o: 2 + o["amsgrad"],  # also of AdamW, a subclass
    "Adamax": lambda o: 2,
    "NAdam": lambda o: 2,
    "RAdam": lambda o: 2,
    "Adadelta": lambda o: 2,
    "Adagrad": lambda o: 1,
    "Adafactor": lambda o: 0,  # it keeps a row and a column
    "ASGD": lambda o: 1,
    "RMSprop": lambda o: 1 + (o["momentum"] > 0) + o["centered"],
    "Rprop": lambda o: 2,
    "Muon": lambda o: 1,
}
"""By name of an optimizer of torch, a function from the options of a parameter group to the number
of tensors of a parameter's size that the optimizer keeps for each parameter."""
ASSUMED_TENSORS = 2
"""Number of such tensors that any other optimizer is taken to keep: that of Adam."""


def optimizer_bytes(
    network: nn.Module, optimizers: Iterable[Optimizer], sharers: int = 1
) -> dict[str, int]:
    """Predict the size of the optimizers' state, which does not exist before the first step.

    Args:
        network: network whose parameters the optimizers train.
        optimizers: the user's optimizers; parameters of other networks in them do not count.
        sharers: number of replicas that divide the state, in equal parts; 1: each keeps all of it.

    Returns:
        By name in `network` of each trained parameter, the bytes of its state on one replica.
    """
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    sizes: dict[str, int] = {}
    for optimizer in optimizers:
        # a subclass is taken to keep what its base class keeps
        kinds = [kind.__name__ for kind in type(optimizer).__mro__]
        known = next((_TENSORS[kind] for kind in kinds if kind in _TENSORS), None)
        for group in optimizer.param_groups:
            count = known(group) if known else ASSUMED_TENSORS
            for parameter in group["params"]:
                if id(parameter) in names and parameter.requires_grad:
                    sizes[names[id(parameter)]] = -(-count * parameter.nbytes // sharers)
    return sizes
