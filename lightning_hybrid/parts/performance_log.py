"""Log the performance of a run (``HybridGabraStrategy(log_performance=True)``).

Every ``Trainer(log_every_n_steps)`` optimizer steps the driver of replica 0 gives its loggers the
means over the steps since the last time. Validation is left out, and so is all up to the end of the
first step, in which networks are captured, measured and cut.

===========================  ======================================================================
``hybrid/step_s``            seconds of one optimizer step: from the start of one training batch to
                             that of the batch after the step; with loading, hooks and logging
``hybrid/samples_per_s``     samples of all replicas in that time (first size of the batch's first
                             tensor, times the replicas)
``hybrid/bubble``            share of the time of a replica's stages in which they run neither
                             forward nor backward: waiting, but also loading, losses, optimizers
``hybrid/speedup``           Eq. 14, :func:`lightning_hybrid.planning.speedup`, with T_s of
                             :func:`lightning_hybrid.stage.trace.serial_s`
===========================  ======================================================================

The last two need several stages. ``hybrid/start/…_s`` are the seconds of each piece of work before
the first step: capturing, planning, checking the stages. The plan is logged to the same loggers as
hyper-parameters.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_hybrid._lightning import TensorBoardLogger
from lightning_hybrid.parts.device_times import StepWatcher, Window
from lightning_hybrid.parts.run_table import add_run
from lightning_hybrid.planning import Plan, speedup
from lightning_hybrid.run import Run
from lightning_hybrid.stage import bubble, serial_s


class PerformanceLog(StepWatcher):
    """The part of a run that logs each plan once, and its performance every so many steps.

    The steps between two values are those of ``Trainer(log_every_n_steps)``.

    Args:
        run: the run, which is about to begin; its Trainer has the loggers.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._replicas = run.world.coordinates.replicas
        self._known: set[str] = set()  # names of the networks whose plans are logged

    def begin_anew(self) -> None:
        """Forget what was measured so far, and leave out the next step, which captures networks."""
        self._first_step: int | None = None
        self._window = None
        self._begun = self._samples = 0  # first step of the window, samples in it
        # of all windows
        self._all_steps = 0
        self._all_samples = 0
        self._all_s = 0.0

    def batch_starts(self, batch: Any) -> None:
        """Log new plans, and the performance if enough steps are over; count the samples."""
        self._log_plans()
        step = self._trainer.global_step
        every: int = self._trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self._window is not None and step - self._begun >= every:
            self._log(self._window, step)
        # a checkpoint that is loaded meanwhile may set the number of the step back
        if self._first_step is None or step < self._first_step:
            self.begin_anew()
            self._first_step = step
        # not in the first step, in which networks are captured and measured
        if self._window is None and step > self._first_step:
            self._log_start(step)
            self._window = Window(self.busy_s)
            self._begun = step
            self._samples = 0
        if self._window is not None:
            self._samples += first_size(batch) or 0

    def training_ends(self) -> None:
        """Log the performance of the last steps, and add a line to the table of runs."""
        self._log_plans()
        step = self._trainer.global_step
        if self._window is not None and step > self._begun:
            self._log(self._window, step)
        if count := self._all_steps:
            means = {"batch_samples": self._all_samples / count, "step_s": self._all_s / count}
            add_run(self._run, means)
        self.begin_anew()

    def _log(self, window: Window, step: int) -> None:
        window.pause()
        self._window, steps = None, step - self._begun
        wall_s, busy_s = window.wall_s, window.busy_s
        self._all_steps += steps
        self._all_samples += self._samples
        self._all_s += wall_s
        values = {
            "hybrid/step_s": wall_s / steps,
            "hybrid/samples_per_s": self._samples * self._replicas / wall_s,
        }
        # a single device waits for no other one
        if len(busy_s) > 1:
            values["hybrid/bubble"] = bubble(busy_s, wall_s)
            if any(busy_s):  # else no computation of a device has ended since the last value
                values["hybrid/speedup"] = speedup(serial_s(busy_s, self._replicas), wall_s)
        for logger in self._trainer.loggers:
            logger.log_metrics(values, step=step - 1)  # with the number of the window's last step

    def _log_start(self, step: int) -> None:
        """Log the seconds of the work done since this was last called, and forget them.

        That is what networks take before their first steps, such as captures.
        """
        spent = self._run.progress.seconds
        # (a description ends with the name of the network)
        values = {f"hybrid/start/{'_'.join(what.split()[:-1])}_s": s for what, s in spent.items()}
        for logger in self._trainer.loggers if values else ():
            logger.log_metrics(values, step=step - 1)
        spent.clear()

    def _log_plans(self) -> None:
        """Log the plans that are new, as hyper-parameters."""
        new = {name: plan for name, plan in self._run.plans.items() if name not in self._known}
        self._known |= new.keys()
        for name, plan in new.items():
            # if there are several plans, further ones are logged with the network's name
            prefix = "hybrid/" if len(self._known) == 1 or not name else f"hybrid/{name}/"
            values = {f"{prefix}{key}": value for key, value in _flat(plan).items()}
            for logger in self._trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    # as a text too: TensorBoard's table has the values known when the run began
                    logger.log_hyperparams(values, metrics={})
                    logger.experiment.add_text(f"{prefix}plan", f"```\n{plan.describe()}\n```")
                else:
                    logger.log_hyperparams(values)


def _flat(plan: Plan) -> dict[str, str | int | float]:
    values: dict[str, str | int | float] = {
        "replicas": plan.replicas,
        "stages": plan.stages,
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "allocation": plan.allocation,
        "objective": plan.objective,
        "cuts": ", ".join(plan.cuts),
        "devices": ", ".join(map(str, plan.devices)),
    }
    if any(plan.delays):
        values["delays"] = ", ".join(map(str, plan.delays))
    if plan.predicted_step_s is not None:
        values["predicted_step_s"] = plan.predicted_step_s
    return values


def first_size(batch: Any) -> int | None:
    """Return the first size of the first tensor in a batch, which is its number of samples.

    Tensors without dimensions are passed over. ``None``: there is no other tensor in it; only
    mappings and sequences are searched.
    """
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else None
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    # not into a text, which is a sequence of texts without end
    if isinstance(batch, str) or not isinstance(batch, Sequence):
        return None
    return next((size for size in map(first_size, batch) if size is not None), None)
