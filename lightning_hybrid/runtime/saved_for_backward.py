"""What a call of the network saves for its backward, as code around the call sees it.

A call keeps in the stages what its backward needs, so autograd saves nothing for it. Activation
checkpointing around it (`torch.utils.checkpoint` with ``use_reentrant=False``) hears of saved
tensors: when the first of them is needed, it runs its region again, and with it the network, whose
running statistics are then written for a second time, as on one device.
"""

from typing import Any

import torch

from lightning_hybrid._torch.autograd import Hooks, pass_number


class SavedForBackward:
    """One tensor that a call saves, in the way of the code around it.

    Args:
        hooks: those of the code around it.
    """

    def __init__(self, hooks: Hooks) -> None:
        self._pack, self._unpack = hooks
        self._wanted = self._saved = False
        self._held: Any = None
        self._asked = -1

    def want(self) -> None:
        """The call has a backward."""
        self._wanted = True

    def save(self) -> None:
        """The call is over; what runs a region again may end it here, by an exception."""
        if self._wanted:
            self._held = self._pack(torch.zeros(()))
            self._saved = True

    def ask(self) -> None:
        """The backward of the call begins; of several in one pass the first one asks."""
        number = pass_number()
        if self._saved and self._asked != number:
            self._asked = number
            self._unpack(self._held)
