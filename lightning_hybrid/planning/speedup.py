"""Speed-up, as Akintoye et al. 2022 measure it (Eq. 14)."""

from lightning_hybrid.errors import PlanError


def speedup(serial_s: float, parallel_s: float) -> float:
    """S = T_s / T_p (Eq. 14): how many times faster the same work is done.

    Raises:
        PlanError: a time is not positive.
    """
    for name, value in (("serial_s", serial_s), ("parallel_s", parallel_s)):
        if not value > 0:
            raise PlanError(f"{name} is {value}: a time of more than 0 s is needed")
    return serial_s / parallel_s
