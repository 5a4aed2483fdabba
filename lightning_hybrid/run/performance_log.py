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

The last two need several stages. The plan is logged to the same loggers as hyper-parameters; with a
delayed schedule they always get the schedule, the delay of each stage, and the option
``delayed_weights``.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_hybrid._lightning import TensorBoardLogger, Trainer
from lightning_hybrid.planning import Plan, speedup
from lightning_hybrid.run.device_times import StepWatcher
from lightning_hybrid.stage import bubble, serial_s


class StepWindows(StepWatcher):
    """Measures windows of training steps, from the second step on.

    Args:
        trainer: the Trainer.
        read_busy_s: returns the seconds that each device has computed since the last call; waits
            until the workers have carried out all earlier commands.
    """

    def __init__(
        self, trainer: Trainer, read_busy_s: Callable[[], Sequence[float]] = tuple
    ) -> None:
        self._trainer, self._read_busy_s = trainer, read_busy_s
        self._first_step: int | None = None
        self._window: Window | None = None

    def batch_starts(self, batch: Any) -> None:
        """Begin a window if there is none, and count the samples of the batch."""
        step = self._trainer.global_step
        # a checkpoint that is loaded meanwhile may set the number of the step back
        if self._first_step is None or step < self._first_step:
            self._first_step, self._window = step, None
        # not in the first step, in which networks are captured and measured
        if self._window is None and step > self._first_step:
            self._read_busy_s()
            self._window = Window(step)
        if self._window is not None:
            self._window.samples += first_size(batch) or 0

    def pause(self) -> None:
        """Stop the clock of the window, for a validation."""
        if self._window is not None:
            self._window.pause(self._read_busy_s())

    def resume(self) -> None:
        """Start the clock of the window again."""
        if self._window is not None:
            self._read_busy_s()
            self._window.resume()


class PerformanceLog(StepWindows):
    """Logs the performance of each window of ``Trainer(log_every_n_steps)`` steps.

    Args:
        trainer: the Trainer, whose loggers get the values.
        replicas: number of replicas.
        read_busy_s: see :class:`StepWindows`.
    """

    def __init__(
        self, trainer: Trainer, replicas: int, read_busy_s: Callable[[], list[float]]
    ) -> None:
        super().__init__(trainer, read_busy_s)
        self._replicas = replicas

    def batch_starts(self, batch: Any) -> None:
        """Log the window and begin another one, if it has enough steps."""
        step = self._trainer.global_step
        if self._window is not None and step - self._window.step >= self._every:
            self._log(self._window, step)
            self._window = None
        super().batch_starts(batch)

    def end(self) -> None:
        """Log the last window, which may have fewer steps."""
        step = self._trainer.global_step
        if self._window is not None and step > self._window.step:
            self._log(self._window, step)
        self._window = None

    @property
    def _every(self) -> int:
        every: int = self._trainer.log_every_n_steps  # type: ignore[attr-defined]
        return every

    def _log(self, window: "Window", step: int) -> None:
        window.pause(self._read_busy_s())
        wall_s, busy_s = window.wall_s, window.busy_s
        values = {
            "hybrid/step_s": wall_s / (step - window.step),
            "hybrid/samples_per_s": window.samples * self._replicas / wall_s,
        }
        # a single device waits for no other one
        if len(busy_s) > 1:
            values["hybrid/bubble"] = bubble(busy_s, wall_s)
            if any(busy_s):  # else no computation of a device has ended since the last value
                values["hybrid/speedup"] = speedup(serial_s(busy_s, self._replicas), wall_s)
        for logger in self._trainer.loggers:
            logger.log_metrics(values, step=step - 1)  # with the number of the window's last step


class PlanLog(StepWatcher):
    """Logs each plan once, as hyper-parameters.

    Args:
        trainer: the Trainer, whose loggers get them.
        plans: the current plans by name of the network; networks that are cut add theirs.
        names: names of the values of a plan that are logged; None: all.
        options: further values that are logged with each plan.
    """

    def __init__(
        self,
        trainer: Trainer,
        plans: Mapping[str, Plan],
        names: Collection[str] | None = None,
        options: Mapping[str, str | float] | None = None,
    ) -> None:
        self._trainer, self._plans, self._names = trainer, plans, names
        self._options = dict(options or {})
        self._known: set[str] = set()

    def batch_starts(self, batch: Any) -> None:
        """Log the plans that are new."""
        self._log_plans()

    def end(self) -> None:
        """Log the plans that are new."""
        self._log_plans()

    def _log_plans(self) -> None:
        new = {name: plan for name, plan in self._plans.items() if name not in self._known}
        self._known |= new.keys()
        for name, plan in new.items():
            # if there are several plans, further ones are logged with the network's name
            prefix = "hybrid/" if len(self._known) == 1 or not name else f"hybrid/{name}/"
            flat = _flat(plan)
            chosen = {key: flat[key] for key in flat if self._names is None or key in self._names}
            values = {f"{prefix}{key}": value for key, value in (chosen | self._options).items()}
            for logger in self._trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    # as a text too: TensorBoard's table has the values known when the run began
                    logger.log_hyperparams(values, metrics={})
                    logger.experiment.add_text(f"{prefix}plan", f"```\n{plan.describe()}\n```")
                else:
                    logger.log_hyperparams(values)


class Window:
    """Measurements of consecutive training steps, without pauses.

    Args:
        step: number of the first step.

    Attributes:
        step: number of the first step.
        samples: number of samples of this replica in all steps.
        wall_s: wall-clock seconds of all steps, up to the last `pause`.
        busy_s: seconds that each device has computed in them, as passed to `pause`.
    """

    def __init__(self, step: int) -> None:
        self.step, self.samples = step, 0
        self.wall_s = 0.0
        self.busy_s: list[float] = []
        self._since: float | None = time.perf_counter()

    def pause(self, busy_s: Sequence[float] = ()) -> None:
        if self._since is not None:
            self.wall_s += time.perf_counter() - self._since
            before = self.busy_s or [0.0] * len(busy_s)
            self.busy_s = [old + new for old, new in zip(before, busy_s)]
        self._since = None

    def resume(self) -> None:
        self._since = time.perf_counter()


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
    """The first size of the first tensor in a batch, its number of samples; ``None``: no tensor."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else None
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    # not into a text, which is a sequence of texts without end
    if isinstance(batch, str) or not isinstance(batch, Sequence):
        return None
    return next((size for size in map(first_size, batch) if size is not None), None)
