"""Write a table of run times, a line for each run, for ``lightning-hybrid fit-model``.

With ``HybridGabraStrategy(log_performance=True)`` the driver of replica 0 adds a line to
``hybrid_runs.csv`` in ``default_root_dir`` at the end of a fit. Its times begin after the first
step, in which networks are captured and cut, and validation is left out.
"""

import csv
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from lightning_hybrid._lightning import Trainer, rank_zero_info
from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning import Plan

FILE_NAME = "hybrid_runs.csv"


@dataclass(frozen=True, kw_only=True)
class TimedRun:
    """A line of the table; the columns are these fields, in this order.

    Attributes:
        replicas: number of replicas.
        stages: number of stages of a replica.
        stages_per_device: stages / devices of a replica.
        microbatches: number of micro-batches of a replica's batch.
        devices: number of devices of all replicas.
        batch_samples: mean number of samples of a replica in an optimizer step.
        parameters: number of parameter elements of the LightningModule.
        step_s: mean seconds of an optimizer step.
        predicted_s: predicted seconds of an optimizer step; None: not predicted.
    """

    replicas: int
    stages: int
    stages_per_device: float
    microbatches: int
    devices: int
    batch_samples: float
    parameters: int
    step_s: float
    predicted_s: float | None

    def append_to(self, path: Path) -> None:
        """Add the line to a table; make the table if it does not exist.

        Raises:
            PlanError: the file has other columns.
            OSError: it cannot be written.
        """
        columns = [field.name for field in fields(self)]
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+", newline="", encoding="utf-8") as file:
            # read the head; mode "a" writes at the end in any case
            file.seek(0)
            head = file.readline().strip()
            if head and head != ",".join(columns):
                raise PlanError(
                    f"it has the columns {head}, and not {','.join(columns)}: move it away"
                )
            table = csv.writer(file, lineterminator="\n")
            if not head:
                table.writerow(columns)
            table.writerow(astuple(self))  # (None is an empty cell)


class RunTable:
    """Adds up what the steps of a fit take, and adds a line to the table at its end.

    Args:
        trainer: the Trainer.
        plans: the current plans by name of the network; networks that are cut add theirs.
        replicas: number of replicas.
        devices: number of devices of all replicas.
    """

    def __init__(
        self, trainer: Trainer, plans: Mapping[str, Plan], replicas: int, devices: int
    ) -> None:
        self._trainer = trainer
        self._plans, self._replicas, self._devices = plans, replicas, devices
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the steps before."""
        self._steps = self._samples = 0
        self._wall_s = 0.0

    def add(self, steps: int, samples: int, wall_s: float) -> None:
        """So many steps were measured, with so many samples of a replica, in so many seconds."""
        self._steps += steps
        self._samples += samples
        self._wall_s += wall_s

    def write(self) -> None:
        """Add the line of the fit to the table; if it cannot be written, that is only logged."""
        folder = self._trainer.default_root_dir
        trial: int = self._trainer.fast_dev_run  # type: ignore[attr-defined]
        # remote file systems do not support appending
        if self._steps and not trial and "://" not in folder:
            path = Path(folder) / FILE_NAME
            try:
                self._timed_run().append_to(path)
            except (OSError, PlanError) as error:
                rank_zero_info(f"{path} gets no line of this run: {error}")

    def _timed_run(self) -> TimedRun:
        """Make the line; with several networks, of the largest numbers and summed predictions."""
        plans = list(self._plans.values())
        predicted = [plan.predicted_step_s for plan in plans if plan.predicted_step_s is not None]
        return TimedRun(
            replicas=self._replicas,
            stages=max((plan.stages for plan in plans), default=1),
            stages_per_device=max((p.stages / len(set(p.devices)) for p in plans), default=1),
            microbatches=max((plan.microbatches for plan in plans), default=1),
            devices=self._devices,
            batch_samples=self._samples / self._steps,
            parameters=sum(p.numel() for p in self._trainer.lightning_module.parameters()),
            step_s=self._wall_s / self._steps,
            predicted_s=sum(predicted) if plans and len(predicted) == len(plans) else None,
        )
