"""Modes of torch, entered by code around a call, that see or change every operation in it."""

from lightning_hybrid._torch.private_names import find
from lightning_hybrid._torch.tensors import TorchDispatchMode

_function_modes = find("torch.overrides:_get_current_function_mode_stack")
_dispatch_modes = find("torch.utils._python_dispatch:_get_current_dispatch_mode_stack")
without_dispatch_modes = find("torch.utils._python_dispatch:_disable_current_modes")
_DeviceContext = find("torch.utils._device:DeviceContext")
_OURS = __name__.partition(".")[0] + "."


def users_mode() -> object | None:
    """The innermost mode that is neither torch's own nor ours; ``None``: there is none.

    `torch.utils.flop_counter.FlopCounterMode` is such a one, and every subclass of
    ``TorchDispatchMode`` and ``TorchFunctionMode`` of the user's. A device as a context only says
    where tensors are made, which a network that is captured does as well.
    """
    seeing = [m for m in _dispatch_modes() if not _is_infrastructure(m)]
    seeing += [m for m in _function_modes() if not isinstance(m, _DeviceContext)]
    return next((m for m in reversed(seeing) if not type(m).__module__.startswith(_OURS)), None)


def _is_infrastructure(mode: object) -> bool:
    return not isinstance(mode, TorchDispatchMode) or mode.is_infra_mode()
