"""What operations take for themselves while they run, such as the columns of a convolution.

No tensor of a graph shows it: kernels allocate it and give it back before they return.
"""

import ctypes
from contextlib import suppress
from pathlib import Path

import torch

LITTLE_BYTES = 8 * 2**20
"""What a process may take with anything that it does first."""
_PROCESS = Path("/proc/self")


class PeakMemory:
    """The most that a device, or on Linux this process, has taken since this was made.

    Args:
        device: where something follows.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._known = device, True
        try:
            self._reset()
        except (OSError, RuntimeError):  # no Linux; an allocator that does not count
            self._known = False
        self._before = self._most()

    def _reset(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self._device)
            return
        # memory that was freed, and not given back, would be taken again unseen
        with suppress(AttributeError, OSError):  # of glibc
            ctypes.CDLL(None).malloc_trim(0)
        (_PROCESS / "clear_refs").write_text("5")  # the most is what there is now

    def taken(self) -> int:
        """Bytes beyond what there was at the beginning; 0 where the system does not say."""
        return max(0, self._most() - self._before)

    def _most(self) -> int:
        if not self._known:
            return 0
        if self._device.type != "cpu":
            return torch.accelerator.max_memory_allocated(self._device)
        lines = (_PROCESS / "status").read_text().splitlines()
        fields = (line.split() for line in lines if line.startswith("VmHWM:"))
        return next((int(size) * 1024 for _, size, _ in fields), 0)
