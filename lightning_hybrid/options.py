"""Records that arguments of the strategies take: options that belong together, and say so.

What contradicts cannot be written in one of them, or is refused where the record is made. What a
record means beside other arguments is checked in :mod:`lightning_hybrid.config`.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, fields
from typing import Literal, get_args

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning import Method, Objective
from lightning_hybrid.schedules import STREAMED, DelayedWeights

DelayedName = Literal["pipedream", "ddg", "fdg", "akintoye"]
Replan = Literal["never", "epoch"]
OnLoss = Literal["end", "continue"]


class _Record:
    """Is shown as it is written: ``BySpeed(on_loss='continue')``, without defaults."""

    def __repr__(self) -> str:
        shown = []
        for field in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = getattr(self, field.name)
            if field.default is MISSING or value != field.default:
                shown.append(f"{field.name}={value!r}" if field.kw_only else repr(value))
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Delayed(_Record):
    """``schedule=Delayed("fdg")``: devices stay busy by computing with weights some steps old.

    The numbers are not those of one device; ``docs/schedules.md`` has what each schedule computes.

    Args:
        name: ``"pipedream"``, ``"ddg"``, ``"fdg"`` or ``"akintoye"``.
        weights: what the backward of a batch computes with: the weights of its forward
            (``"stash"``), those of now on its inputs, which run forward again (``"recompute"``), or
            those of now beside the activations of then (``"current"``).
        shrink: what gradients are multiplied with at every cut that they cross, above 0 and at
            most 1; for ``"fdg"``.

    Raises:
        PlanError: one of them has another value, or the schedule shrinks no gradients.
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
        method: ``"gabra"``, ``"exact"`` or ``"merging"`` (the most expensive cuts are closed first,
            for equal devices). For contiguous stages ``"gabra"`` and ``"exact"`` stand for a
            dynamic programme; the genetic algorithm GABRA searches with ``contiguous=False``, which
            the other two do not know.
        objective: ``"step"``, the predicted time of a step; ``"makespan"``, the slowest device's
            time; or ``"profit"``, Eq. 5 of Akintoye et al. 2022 (constant on equal devices; kept
            for comparison).
        contiguous: whether each device gets one run of the network. ``False``: GABRA may give a
            device several, each of which is a stage.
        capacity: relative speeds of the devices, one per rank; ``"auto"``: measured on all ranks
            at the start of a run (a third of a second), if there is something to decide.
        replan: ``"epoch"``: when an epoch begins, stages are cut at other places if a device has
            stayed slower than planned and other cuts make the predicted step clearly shorter; on
            CPUs. Numbers stay those of one device. ``docs/unlike_devices.md`` says where cuts stay.

    Raises:
        PlanError: one of them has another value, or cuts that are made anew are not contiguous.
    """

    method: Method = "gabra"
    objective: Objective = "step"
    contiguous: bool = True
    capacity: Literal["auto"] | Sequence[float] = "auto"
    replan: Replan = "never"

    def __post_init__(self) -> None:
        _check_kind(self, "method", get_args(Method))
        _check_kind(self, "objective", get_args(Objective))
        _check_kind(self, "replan", get_args(Replan))
        if self.replan == "epoch" and not self.contiguous:
            raise PlanError(f"{self}: replan moves the cuts of contiguous stages. Leave one out.")


@dataclass(frozen=True, kw_only=True, repr=False)
class Equal(_Record):
    """``replicas=Equal()``, the default: each replica takes as many samples, as under ``ddp``.

    Args:
        shard_states: whether the replicas of a stage divide its optimizer states among themselves,
            as ``ZeroRedundancyOptimizer`` does: each rank keeps those of some whole parameters (1/R
            of their bytes, as far as the sizes of parameters allow), steps these, and gets the new
            weights of the others. The numbers and the ordinary checkpoint are those without it. An
            optimizer that must step as a whole keeps all of its states on each replica, with a line
            that says so.
    """

    shard_states: bool = False


@dataclass(frozen=True, kw_only=True, repr=False)
class BySpeed(_Record):
    """``replicas=BySpeed()``: each replica takes samples by the measured speed of its devices.

    The global batch stays what it is under ``ddp``: the loader's batch size for each replica. Every
    sample is in one batch of an epoch, and gradients are weighted by the samples that they come
    from, so that they are those of one device with the whole batch. A loss that is no mean over
    samples says by ``hybrid_weight(batch) -> float`` in the LightningModule what a batch weighs.
    See ``docs/unlike_devices.md``.

    Args:
        replan: ``"epoch"``: what was measured in an epoch decides what each replica takes in the
            next one. Which samples a step has does not change.
        on_loss: ``"continue"``: if a process of a replica is killed while a step is averaged, the
            other replicas go on in place, with all samples that are left. ``"end"``: the run ends.
        shard_states: see :class:`Equal`.

    Raises:
        PlanError: one of them has another value, or ``on_loss="continue"`` has another beside it.
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
        staleness: by how many updates the weights that a replica computes with may be old. With 0
            the steps are the synchronous ones.

    Raises:
        PlanError: it is no whole number, 0 or more.
    """

    staleness: int = 0

    def __post_init__(self) -> None:
        staleness = self.staleness
        if isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0:
            raise PlanError(f"{self}: staleness is a whole number of updates, 0 or more.")


@dataclass(frozen=True, kw_only=True, repr=False)
class Sharded(_Record):
    """``checkpoint=Sharded()``: a checkpoint is a folder to which each rank writes what it owns.

    As of Lightning's ``FSDPStrategy``, in the format of `torch.distributed.checkpoint`; any number
    of replicas and stages goes on with it, and `lightning-hybrid consolidate` makes the ordinary
    file of it.

    Args:
        asynchronous: whether it is written from copies that each rank makes of what it owns, while
            training goes on.
    """

    asynchronous: bool = False


Replicas = Equal | BySpeed | Asynchronous


def _check_kind(record: _Record, name: str, kinds: tuple[str, ...]) -> None:
    """Complain about a value that is none of those that there are."""
    value = getattr(record, name)
    if value not in kinds:
        raise PlanError(
            f"{type(record).__name__}: {name}={value!r} is none of {', '.join(map(repr, kinds))}."
        )
