"""Records of options that belong together, which arguments of the strategies take as values.

A record with options that contradict each other is refused when it is made. A record that
contradicts another argument is refused in :mod:`lightning_hybrid.config`.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, fields
from typing import Literal, get_args

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning import Method, PlanObjective
from lightning_hybrid.schedules import STREAMED, DelayedWeights

DelayedName = Literal["pipedream", "ddg", "fdg", "akintoye"]
Replan = Literal["never", "epoch"]
OnLoss = Literal["end", "continue"]


class _Record:
    """Base class of the records; its ``repr`` shows a record as a user writes it.

    For example ``BySpeed(on_loss='continue')``: fields with their default values are left out.
    """

    def __repr__(self) -> str:
        shown = []
        for field in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = getattr(self, field.name)
            if field.default is MISSING or value != field.default:
                shown.append(f"{field.name}={value!r}" if field.kw_only else repr(value))
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Delayed(_Record):
    """``schedule=Delayed("fdg")``: no device waits, and stages compute with older weights.

    The numbers are not those of one device; ``docs/schedules.md`` says what each schedule computes.

    Args:
        name: ``"pipedream"``, ``"ddg"``, ``"fdg"`` or ``"akintoye"``.
        weights: which weights and activations a backward uses. ``"stash"``: those of its forward.
            ``"recompute"``: the current weights; the forward runs again on the same inputs.
            ``"current"``: the current weights, with the activations of the forward.
        shrink: factor by which gradients are multiplied at every cut that they cross, above 0 and
            at most 1; for ``"fdg"`` alone.

    Raises:
        PlanError: an argument has a value that is not named here, or ``shrink`` is not 1 for a
            schedule other than ``"fdg"``.
    """

    name: DelayedName
    _: KW_ONLY
    weights: DelayedWeights = "stash"
    shrink: float = 1.0

    def __post_init__(self) -> None:
        _check_kind(self, "name", get_args(DelayedName))
        _check_kind(self, "weights", get_args(DelayedWeights))
        if not 0 < self.shrink <= 1:
            raise PlanError(f"{self} must have shrink above 0 and at most 1.")
        # other schedules train the model of one device, which shrinking would change
        if self.shrink != 1 and not STREAMED[self.name].shrinks:
            raise PlanError(f"{self}: shrink is part of 'fdg', not of {self.name!r}. Leave it out.")


@dataclass(frozen=True, kw_only=True, repr=False)
class Search(_Record):
    """``search=Search(objective="makespan")``: how the cuts and their devices are searched.

    Args:
        method: ``"gabra"``: a dynamic programme, or the genetic algorithm GABRA if ``contiguous``
            is false. ``"exact"``: the dynamic programme alone. ``"merging"``: partitions are joined
            at the most expensive cuts, for equal devices.
        objective: ``"step"``, the predicted time of a step; ``"makespan"``, the slowest device's
            time; or ``"profit"``, Eq. 5 of Akintoye et al. 2022 (constant on equal devices; kept
            for comparison).
        contiguous: whether each device gets one stage. ``False``: GABRA may give it several.
        capacity: relative speeds of the devices, one per rank; ``"auto"``: measured on all ranks
            at the start of a run (a third of a second), if there is something to decide.
        replan: ``"epoch"``: when an epoch begins, stages are cut at other places, if a device has
            stayed slower than planned and the predicted step becomes clearly shorter; on CPUs.
            Numbers stay those of one device. ``docs/unlike_devices.md`` says when cuts are kept.
            ``"never"``: cuts stay for the whole run.

    Raises:
        PlanError: an argument has a value that is not named here, or ``replan="epoch"`` is combined
            with ``contiguous=False``.
    """

    method: Method = "gabra"
    objective: PlanObjective = "step"
    contiguous: bool = True
    capacity: Literal["auto"] | Sequence[float] = "auto"
    replan: Replan = "never"

    def __post_init__(self) -> None:
        _check_kind(self, "method", get_args(Method))
        _check_kind(self, "objective", get_args(PlanObjective))
        _check_kind(self, "replan", get_args(Replan))
        if self.replan == "epoch" and not self.contiguous:
            raise PlanError(f"{self}: replan moves the cuts of contiguous stages. Leave one out.")


@dataclass(frozen=True, kw_only=True, repr=False)
class Equal(_Record):
    """``replicas=Equal()``, the default: all replicas take equally many samples, as under ``ddp``.

    Args:
        shard_states: whether the replicas of a stage divide its optimizer states, as
            ``ZeroRedundancyOptimizer`` does. Each rank keeps the states of some whole parameters
            (about 1/R of the bytes with R replicas), steps these parameters, and gets the new
            weights of the other ones. Numbers and ordinary checkpoints do not change. An optimizer
            that must step as a whole keeps all states on each replica, and a line says so.
    """

    shard_states: bool = False


@dataclass(frozen=True, kw_only=True, repr=False)
class BySpeed(_Record):
    """``replicas=BySpeed()``: each replica takes samples by the measured speed of its devices.

    The global batch is that of ``ddp``: the loader's batch size times the number of replicas. Every
    sample is in one batch of an epoch. Gradients are weighted by numbers of samples, which gives
    the gradient of one device with the whole batch. If the loss is no mean over samples, define
    ``hybrid_weight(batch) -> float`` in the LightningModule: the weight of a batch. See
    ``docs/unlike_devices.md``.

    Args:
        replan: ``"epoch"``: speeds measured in an epoch decide how many samples each replica takes
            in the next one. The global batch of a step has the same samples as before.
            ``"never"``: the speeds known at the start of the run hold for all of it.
        on_loss: ``"continue"``: if a process of a replica is killed while gradients are averaged,
            the other replicas continue with all samples that are left. ``"end"``: the run ends.
        shard_states: see :class:`Equal`.

    Raises:
        PlanError: an argument has a value that is not named here, or ``on_loss="continue"`` is
            combined with ``replan="epoch"`` or ``shard_states``.
    """

    replan: Replan = "never"
    on_loss: OnLoss = "end"
    shard_states: bool = False

    def __post_init__(self) -> None:
        _check_kind(self, "replan", get_args(Replan))
        _check_kind(self, "on_loss", get_args(OnLoss))
        if self.on_loss == "continue" and (self.replan != "never" or self.shard_states):
            raise PlanError(
                f"{self}: replicas that go on without a lost one keep states whole, and deal "
                "samples anew when one is lost. Use on_loss='continue' alone."
            )


@dataclass(frozen=True, kw_only=True, repr=False)
class Asynchronous(_Record):
    """``replicas=Asynchronous(staleness=4)``: replicas of one stage do not wait for each other.

    Asynchronous SGD; see ``docs/unlike_devices.md``.

    Args:
        staleness: largest age of the weights that a replica computes with, in updates. With 0 the
            steps are those of synchronous training.

    Raises:
        PlanError: ``staleness`` is no whole number, or is negative.
    """

    staleness: int = 0

    def __post_init__(self) -> None:
        staleness = self.staleness
        if isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0:
            raise PlanError(f"{self}: staleness is a whole number of updates, 0 or more.")


@dataclass(frozen=True, kw_only=True, repr=False)
class Sharded(_Record):
    """``checkpoint=Sharded()``: a checkpoint is a folder to which each rank writes what it owns.

    It is like a sharded checkpoint of Lightning's ``FSDPStrategy``, in the format of
    `torch.distributed.checkpoint`. A run with any number of replicas and stages can go on with it,
    and `lightning-hybrid consolidate` makes an ordinary checkpoint file of it.

    Args:
        asynchronous: whether each rank first copies what it owns, and writes the copy while
            training goes on. ``False``: training waits until all is written.
    """

    asynchronous: bool = False


Replicas = Equal | BySpeed | Asynchronous


def _check_kind(record: _Record, name: str, kinds: tuple[str, ...]) -> None:
    """Check that a field of a record has one of the allowed values.

    Args:
        record: the record.
        name: name of the field.
        kinds: the allowed values.

    Raises:
        PlanError: it has another value.
    """
    value = getattr(record, name)
    if value not in kinds:
        raise PlanError(
            f"{type(record).__name__}: {name}={value!r} is none of {', '.join(map(repr, kinds))}."
        )
