"""Write a table of run times, a line for each run, for ``lightning-hybrid fit-model``.

With ``HybridGabraStrategy(log_performance=True)`` the driver of replica 0 adds a line to
``hybrid_runs.csv`` in ``default_root_dir`` at the end of a fit. Its times begin after the first
step, in which networks are captured and cut, and validation is left out. With several networks the
numbers of their plans are the largest ones, and predictions are added up.

=====================  ============================================================================
``replicas``           number of replicas
``stages``             number of stages of a replica
``stages_per_device``  stages / devices of a replica
``microbatches``       number of micro-batches of a replica's batch
``devices``            number of devices of all replicas
``batch_samples``      mean number of samples of a replica in an optimizer step
``parameters``         number of parameter elements of the LightningModule
``step_s``             mean seconds of an optimizer step
``predicted_s``        predicted seconds of an optimizer step; empty: not predicted
=====================  ============================================================================
"""

import csv
from collections.abc import Mapping
from pathlib import Path

from lightning_hybrid._lightning import rank_zero_info
from lightning_hybrid.errors import PlanError
from lightning_hybrid.run import Run

FILE_NAME = "hybrid_runs.csv"


def add_run(run: Run, measured: Mapping[str, float]) -> None:
    """Add the line of a fit to ``hybrid_runs.csv``; if it cannot be written, print a message.

    Nothing is added in a trial (``fast_dev_run``), or if ``default_root_dir`` is a URL.

    Args:
        run: the fit.
        measured: values of the columns ``batch_samples`` and ``step_s``.
    """
    trainer = run.trainer
    plans = run.plans.values()
    here = run.world.coordinates
    folder = trainer.default_root_dir
    trial: int = trainer.fast_dev_run  # type: ignore[attr-defined]
    # remote file systems do not support appending
    if trial or "://" in folder:
        return
    predicted = [plan.predicted_step_s for plan in plans if plan.predicted_step_s is not None]
    line = {
        "replicas": here.replicas,
        "stages": max((plan.stages for plan in plans), default=1),
        "stages_per_device": max((p.stages / len(set(p.devices)) for p in plans), default=1),
        "microbatches": max((plan.microbatches for plan in plans), default=1),
        "devices": here.replicas * here.ranks_per_replica,
        "batch_samples": measured["batch_samples"],
        "parameters": sum(p.numel() for p in run.module.parameters()),
        "step_s": measured["step_s"],
        "predicted_s": sum(predicted) if plans and len(predicted) == len(plans) else None,
    }
    path = Path(folder) / FILE_NAME
    try:
        append_line(path, line)
    except (OSError, PlanError) as error:
        rank_zero_info(f"{path} gets no line of this run: {error}")


def append_line(path: Path, line: Mapping[str, float | None]) -> None:
    """Add a line to a CSV file; if it does not exist, make it, with a head of names.

    Args:
        path: the file.
        line: the values by name of their column; ``None`` is an empty cell.

    Raises:
        PlanError: the file has other columns.
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="", encoding="utf-8") as file:
        # read the head; mode "a" writes at the end in any case
        file.seek(0)
        head = file.readline().strip()
        if head and head != ",".join(line):
            raise PlanError(f"it has the columns {head}, and not {','.join(line)}: move it away")
        table = csv.writer(file, lineterminator="\n")
        if not head:
            table.writerow(line)
        table.writerow(line.values())  # (None is an empty cell)
