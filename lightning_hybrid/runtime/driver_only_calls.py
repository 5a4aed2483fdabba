"""Calls that are no calls of a network: on other weights, inside of a transform or of a mode.

`torch.func.functional_call(net, weights, x)` runs the code of ``net`` on tensors of the caller: an
average, a step of an inner optimizer, what a hypernetwork has made. Their gradients go to where
the caller has made them from, not to the network's own weights, and no stage has them. Inside of
`torch.func.vmap`, ``grad``, ``jvp`` and the like, and between dual numbers, a call computes with
tensors that cannot travel. A mode around a call (`torch.utils.flop_counter.FlopCounterMode`, a
``TorchDispatchMode`` or ``TorchFunctionMode`` of the user's) sees each operation, and may change
it, but on this rank only. Such a call runs on the driver as it would on one device: its own
weights, where it uses them, are fetched, and get their gradients.
"""

from torch import nn

from lightning_hybrid._torch.autograd import dual_level, functorch_level
from lightning_hybrid._torch.modules import in_functional_call, tables
from lightning_hybrid._torch.tensors import users_mode


class DriverOnlyCalls:
    """Tells such calls from those of a network.

    Args:
        module: the LightningModule, with its own weights.
    """

    def __init__(self, module: nn.Module) -> None:
        self._own = {part: dict(tables(part)[0]) for part in module.modules()}

    def reason(self, module: nn.Module) -> str | None:
        """Why a call of a module is no call of a network, said of the module; ``None``: it is."""
        if functorch_level() or dual_level() >= 0:
            return "is called inside of a transform of functions (torch.func.vmap, grad, jvp, ...)"
        mode = users_mode()
        if mode is not None:
            return f"is called inside of a mode that sees each operation ({type(mode).__name__})"
        if in_functional_call() and self._has_others(module):
            return "is called on other weights than its own (torch.func.functional_call)"
        return None

    def _has_others(self, module: nn.Module) -> bool:
        return any(
            self._own.get(part, {}).get(name) is not value
            for part in module.modules()
            for name, value in tables(part)[0].items()
        )
