"""Speed-up, as Akintoye et al. 2022 measure it (Eqs. 13 and 14)."""

from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training to a declared target, such as a validation accuracy.

    Attributes:
        step_s: T: mean seconds of a step.
        steps_per_epoch: TS, which the paper does not define: the product of Eq. 13 is a time only
            with this.
        epochs: E: epochs to the target.
    """

    step_s: float
    steps_per_epoch: float
    epochs: float

    @property
    def total_s(self) -> float:
        """Seconds to the target."""
        return self.step_s * self.steps_per_epoch * self.epochs


def speedup_to_target(one: Training, many: Training) -> float:
    """ST_m = (T_1 / T_m) (TS_1 / TS_m) (E_1 / E_m) (Eq. 13): the whole training on m devices.

    Raises:
        PlanError: see `speedup`.
    """
    return speedup(one.total_s, many.total_s)
