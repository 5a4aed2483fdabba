"""What the user has asked for, checked: the arguments of the strategy as one record."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast, get_args

from lightning_hybrid.contradicting_options import check_pairs, check_plan
from lightning_hybrid.errors import PlanError
from lightning_hybrid.options import (
    Asynchronous,
    BySpeed,
    Delayed,
    DelayedName,
    Equal,
    Replicas,
    Search,
    Sharded,
)
from lightning_hybrid.planning import AUTO, Plan, PlanSettings, Sizes, given_speeds
from lightning_hybrid.schedules import INSIDE, SCHEDULES, STREAMED, LookAhead

Count = int | Literal["auto"]
StageCounts = Count | tuple[int, ...]
Checkpoint = Literal["full"] | Sharded
ScheduleName = Literal["auto", "gpipe", "looped", "zero_bubble", "1f1b", "1f1b_stream"]
RngScope = Literal["microbatch", "device"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """The arguments of :class:`HybridGabraStrategy` that are not Lightning's, checked.

    The strategy documents the arguments. They are checked against each other as far as that can be
    done without knowing the devices. The properties follow from the arguments; where one is
    ``None``, the user has left the choice to this package (``"auto"``).

    Attributes:
        data_parallel_size: number of replicas.
        pipeline_parallel_size: number of devices of a replica; a tuple: for each of its stages the
            number of copies, each on a device of its own.
        num_microbatches: into how many slices a batch is split.
        schedule: the order of forwards and backwards.
        network: dotted names of the modules to cut.
        plan: the user's plan; ``None``: one is made. If ``recompute`` is given too, the plan gets
            its value.
        cuts: the user's cut points, given as the argument ``plan``; ``None``: there are none.
        search: how cuts are searched.
        replicas: how replicas share batches, states and updates.
        recompute: whether stages keep no activations, and run their forward again.
        compile_stages: run each stage through ``torch.compile``.
        checkpoint: whether a checkpoint is a file, or a folder to which each rank writes its part.
        verify: which calls of a network are compared with what its own Python gives.
        rng: whose random numbers networks draw.
        log_performance: whether the loggers get step times and the plan.
        seed: seed of the search.
        sizes: numbers of replicas, stages and micro-batches that this package has chosen, where the
            user has given none; ``None``: none were chosen.

    Raises:
        PlanError: the arguments contradict each other or the plan.
    """

    data_parallel_size: Count = "auto"
    pipeline_parallel_size: StageCounts = "auto"
    num_microbatches: Count = "auto"
    schedule: ScheduleName | Delayed = "auto"
    network: str | list[str] | None = None
    plan: Plan | None = None
    cuts: tuple[str, ...] | None = None
    search: Search = field(default_factory=Search)
    replicas: Replicas = field(default_factory=Equal)
    recompute: bool | Literal["auto"] = "auto"
    compile_stages: bool = False
    checkpoint: Checkpoint = "full"
    verify: int | Literal["auto", False] = "auto"
    rng: RngScope = "microbatch"
    log_performance: bool = False
    seed: int = 0
    sizes: Sizes | None = None

    def __post_init__(self) -> None:
        # shapes come first: what follows is read from them
        _check_shape(self.data_parallel_size, self.pipeline_parallel_size, self.plan)
        count = self.num_microbatches
        if count != "auto" and count < 1:
            raise PlanError(f"num_microbatches={count} must be at least 1 or 'auto'.")
        self._check_kinds()
        self._check_schedule()
        check_plan(self.shown_schedule, self._scheduled, self.plan)
        check_pairs(self._asked(), self._asked_stages)
        # the run reads this here and in the plan: what is said in one of them holds for both
        if self.plan is not None and self.recompute != "auto":
            object.__setattr__(self, "plan", replace(self.plan, recompute=self.recompute))

    @property
    def copies(self) -> tuple[int, ...]:
        """Number of copies of each stage of a replica; empty: no stage has more than one."""
        copies: tuple[int, ...] = ()
        if not isinstance(self.pipeline_parallel_size, int | str):
            copies = tuple(self.pipeline_parallel_size)
        elif self.plan is not None:
            copies = self.plan.copies
        return copies if max(copies, default=1) > 1 else ()

    @property
    def replica_count(self) -> int | None:
        """Number of replicas, as given or chosen; ``None``: left open, devices / stages."""
        given = self.sizes or self.plan
        if given is not None:
            return given.replicas
        return None if self.data_parallel_size == "auto" else self.data_parallel_size

    @property
    def stages(self) -> int | None:
        """Devices of a replica, as given or chosen; ``None``: left open, devices / replicas."""
        if self.sizes is not None:
            return self.sizes.stages
        # each replica steps whenever it likes, so nothing of it may be on another rank
        if self.staleness is not None:
            return 1
        return self._asked_stages

    @property
    def _asked_stages(self) -> int | None:
        if self.plan is not None:
            return self.plan.devices_per_replica
        shape = self.pipeline_parallel_size
        if shape == "auto":
            return None
        return shape if isinstance(shape, int) else sum(shape)

    @property
    def microbatches(self) -> int | None:
        """Into how many slices a batch is split; ``None``: chosen by the size of the batch."""
        if self.num_microbatches != "auto":
            return self.num_microbatches
        if self._scheduled in STREAMED:
            return 1  # its micro-batches are the batches
        # one stage has nobody to overlap its micro-batches with
        chosen = self.sizes is not None and self.sizes.stages > 1
        return self.sizes.microbatches if self.sizes is not None and chosen else None

    @property
    def names(self) -> tuple[str, ...] | None:
        """Dotted names of the modules to cut; ``None``: they are found by their first calls."""
        if self.network is None:
            return None
        return (self.network,) if isinstance(self.network, str) else tuple(self.network)

    @property
    def capacity(self) -> tuple[float, ...] | None:
        """Relative speeds of the devices by global rank, from the user; ``None``: measured."""
        speeds = self.search.capacity
        return None if isinstance(speeds, str) else tuple(speeds)

    @property
    def by_speed(self) -> bool:
        """Whether replicas take parts of a batch by speed: `BySpeed`, or a plan with shares."""
        dealt = self.plan is not None and bool(self.plan.shares)
        return dealt or isinstance(self.replicas, BySpeed)

    @property
    def staleness(self) -> int | None:
        """Largest age, in updates, of weights to compute with; ``None``: not `Asynchronous`."""
        return self.replicas.staleness if isinstance(self.replicas, Asynchronous) else None

    @property
    def goes_on(self) -> bool:
        """Whether the other replicas are to go on when one is lost (``on_loss="continue"``)."""
        return isinstance(self.replicas, BySpeed) and self.replicas.on_loss == "continue"

    @property
    def shards_states(self) -> bool:
        """Whether the replicas of a stage divide its optimizer states."""
        return not isinstance(self.replicas, Asynchronous) and self.replicas.shard_states

    @property
    def replans_shares(self) -> bool:
        """Whether each epoch the replicas' shares of a batch follow speeds measured in training."""
        return isinstance(self.replicas, BySpeed) and self.replicas.replan == "epoch"

    @property
    def replans_cuts(self) -> bool:
        """Whether stages are cut anew at an epoch if a device has been slower than planned."""
        return self.search.replan == "epoch"

    @property
    def saves_beside(self) -> bool:
        """Whether checkpoints are written while training goes on."""
        return self.checkpoint != "full" and self.checkpoint.asynchronous

    @property
    def _scheduled(self) -> str:
        """Name of the schedule: of the argument, or if that is ``"auto"`` of the user's plan."""
        if self.schedule == AUTO and self.plan is not None:
            return self.plan.schedule
        return self.schedule.name if isinstance(self.schedule, Delayed) else self.schedule

    @property
    def shown_schedule(self) -> str:
        """The schedule as an argument in messages, such as ``schedule='gpipe'``."""
        given = self.schedule if isinstance(self.schedule, Delayed) else self._scheduled
        return f"schedule={given!r}"

    @property
    def _delayed(self) -> Delayed | None:
        return self.schedule if isinstance(self.schedule, Delayed) else None

    @property
    def gradient_shrinking(self) -> float:
        """Factor by which gradients are multiplied at every cut that they cross; 1: no change."""
        return self._delayed.shrink if self._delayed is not None else 1.0

    @cached_property
    def settings(self) -> PlanSettings:
        """The options by which the planner makes a plan."""
        return PlanSettings(
            schedule=self._scheduled,
            allocation=self.search.method if self.cuts is None else self.cuts,
            objective=self.search.objective,
            seed=self.seed,
            contiguous=self.search.contiguous,
            recompute=False if self._scheduled in STREAMED else self.recompute,
            compiled=self.compile_stages,
            delayed_weights=self._delayed.weights if self._delayed is not None else "stash",
            shards_states=self.shards_states,
            copies=self.copies,
            may_go_inside=not (self.copies or self.goes_on),
        )

    @property
    def runs_inside(self) -> bool:
        """Whether the schedule has backwards run inside of the network's calls (``"1f1b"``)."""
        return self.settings.schedule == INSIDE

    @property
    def may_run_inside(self) -> bool:
        """Whether backwards may run inside of the network's calls: asked for, or up to the planner.

        Then a loss that a network computes itself is looked for, since they begin there.
        """
        is_open = self.settings.schedule == AUTO and not self.cuts_given
        return self.runs_inside or (is_open and self.settings.may_go_inside)

    @property
    def streamed(self) -> LookAhead | None:
        """How far stages look ahead, if the schedule begins later batches early; else ``None``."""
        return STREAMED.get(self.settings.schedule)

    def shape(self, nodes: int, devices_per_node: int) -> tuple[int, int]:
        """Compute the numbers of replicas and stages; sizes that are open take all devices.

        Args:
            nodes: number of hosts.
            devices_per_node: number of devices of each host.

        Returns:
            The number of replicas, and the number of devices of a replica.

        Raises:
            PlanError: the product of the sizes is not the number of devices.
        """
        devices = nodes * devices_per_node
        replicas, stages = self.replica_count, self.stages
        if stages is None:
            stages = devices // (replicas or 1)
        # what is left open takes all the devices that there are
        if replicas is None:
            replicas = devices // max(stages, 1)
        if replicas * stages != devices:
            raise PlanError(
                f"data_parallel_size({replicas}) x pipeline_parallel_size({stages}) = "
                f"{replicas * stages} != {devices} devices"
                f"{f' ({nodes} nodes)' if nodes > 1 else ''}: the number of "
                f"devices must be divisible by the number of stages. Set devices=... to a "
                f"multiple of {self.stages or self.replica_count}, or change the sizes."
            )
        return replicas, stages

    def leaves_sizes_open(self, devices: int) -> bool:
        """Whether this package is to choose both sizes, which it does once the network is known.

        Not if the user has given a size, a plan or cut points. (Cut points are taken to be for as
        many stages as there are devices.)

        Args:
            devices: number of all devices; with one there is nothing to choose.
        """
        asked = self.replica_count is not None or self.stages is not None or self.cuts_given
        return not asked and devices > 1

    @property
    def may_keep_whole(self) -> bool:
        """Whether a network that cannot be cut may run whole on the driver of each replica.

        It may if the user has given no number of stages.
        """
        return self.sizes is not None or self.stages is None

    def check_devices(self, nodes: int, devices_per_node: int) -> None:
        """Check that sizes and capacities suit the devices.

        Args:
            nodes: number of hosts.
            devices_per_node: number of devices of each host.

        Raises:
            PlanError: the product of the sizes is not the number of devices, or ``capacity`` is not
                one positive number per device.
        """
        self.shape(nodes, devices_per_node)
        if self.capacity is not None:
            given_speeds(self.capacity, nodes * devices_per_node)

    @property
    def several_stages_per_device(self) -> bool:
        """Whether the stage of a rank cannot be told from its place in the replica alone.

        So it is if devices have several stages, or stages several devices, or if a plan puts the
        stages on the devices in another order than the usual one.
        """
        # a loop has several stages on a device, copies have several devices for a stage: no plan is
        # needed to tell
        if self.settings.schedule == "looped" or self.copies:
            return True
        if self.plan is not None:
            return self.plan.devices != (*range(1, self.plan.stages), 0)
        return not self.settings.contiguous

    @property
    def cuts_given(self) -> bool:
        """Whether the user says where stages are cut, by a plan or by cut points."""
        return self.plan is not None or self.cuts is not None

    def needs_survey(self, replicas: int, stages: int) -> bool:
        """Whether the devices must be surveyed before the run, since something is decided by them.

        That is the replicas' shares of a batch, or where stages are cut and placed.

        Args:
            replicas: number of replicas.
            stages: number of devices of a replica.
        """
        # shares come from speeds, unless a plan brings them
        if self.by_speed and replicas > 1 and not (self.plan and self.plan.shares):
            return True
        return stages > 1 and (self.capacity is not None or not self.cuts_given)

    # ------------------------------------------------------------ what was asked for, checked

    def _check_schedule(self) -> None:
        """Raise a PlanError if the schedule, or that of the plan, is unknown."""
        name, plan = self._scheduled, self.plan
        # a plan may have any schedule
        if self.schedule in get_args(DelayedName):
            raise PlanError(
                f"schedule={name!r} computes with weights that are some steps old: write "
                f"schedule=Delayed({name!r})."
            )
        if not isinstance(self.schedule, Delayed):
            _check_kind("schedule", self.schedule, get_args(ScheduleName))
        if plan is not None:
            _check_kind("the plan's schedule", plan.schedule, tuple(SCHEDULES))

    def _asked(self) -> dict[str, str]:
        """Return the options that the user has asked for: by name, the argument as text.

        The texts are for messages. For example ``{"recompute": "recompute=True"}``; the names are
        those of :data:`~lightning_hybrid.contradicting_options.PAIRS`.
        """
        name = self._scheduled
        stages = self._asked_stages
        copies = self.copies
        schedule, search = self.shown_schedule, f"search={self.search!r}"
        replicas, checkpoint = f"replicas={self.replicas!r}", f"checkpoint={self.checkpoint!r}"
        shares = replicas if isinstance(self.replicas, BySpeed) else "a plan with shares"
        given = {
            "one stage": ("pipeline_parallel_size=1", stages == 1),
            "stages": (f"pipeline_parallel_size={copies or stages}", stages not in (None, 1)),
            "copies": (f"pipeline_parallel_size={copies}", bool(copies)),
            "copies of the last": (f"pipeline_parallel_size={copies}", copies[-1:] > (1,)),
            "plan": ("plan=...", self.plan is not None),
            "cuts": (f"plan={[*(self.cuts or ())]}", self.cuts is not None),
            "free": (search, not self.search.contiguous),
            "new cuts": (search, self.replans_cuts),
            "streamed": (schedule, name in STREAMED),
            "looped": (schedule, name == "looped"),
            "zero_bubble": (schedule, name == "zero_bubble"),
            "inside": (schedule, name == INSIDE),
            "compiled": ("compile_stages=True", self.compile_stages),
            "recompute": ("recompute=True", self.recompute is True),
            "device": ("rng='device'", self.rng == "device"),
            "divided": (replicas, self.shards_states),
            "speed": (shares, self.by_speed),
            "asgd": (replicas, self.staleness is not None),
            "continue": (replicas, self.goes_on),
            "sharded": (checkpoint, self.checkpoint != "full"),
            "sharded_async": (checkpoint, self.saves_beside),
        }
        return {option: words for option, (words, asked) in given.items() if asked}

    def _check_kinds(self) -> None:
        """Raise a PlanError if an argument has a value or type that is not allowed."""
        verify = self.verify
        # True is an int, and would be taken for "the first call alone"
        named = verify is False or verify == "auto"
        if not named and (verify is True or not isinstance(verify, int) or verify < 1):
            raise PlanError(
                f"verify={verify!r} is none of 'auto' (calls 1, 2, 4, 8, ...), False and a number "
                "of calls of at least 1."
            )
        _check_kind("rng", self.rng, get_args(RngScope))
        _check_record("checkpoint", self.checkpoint, Sharded, ("full",))
        _check_record("search", self.search, Search)
        _check_record("replicas", self.replicas, Replicas)


def read_plan(
    plan: Plan | str | Path | Sequence[str] | None,
) -> tuple[Plan | None, tuple[str, ...] | None]:
    """Read the argument ``plan`` of a strategy, which is a plan or cut points.

    Args:
        plan: a plan, the path of a file with one, a list of cut points, or ``None``.

    Returns:
        The plan and the cut points; ``None`` in the place of what was not given. (A value of
        another type is returned as the plan, and refused by :class:`Config`.)
    """
    if isinstance(plan, str | Path):
        return Plan.load(plan), None
    if isinstance(plan, list | tuple):
        return None, tuple(plan)
    return cast(Plan | None, plan), None


def _check_record(name: str, value: object, kind: Any, words: tuple[str, ...] = ()) -> None:
    """Check that an argument is a record of a class, or one of some words.

    Args:
        name: name of the argument.
        value: its value.
        kind: the class, or a union of classes.
        words: the words that are allowed too.

    Raises:
        PlanError: it is neither.
    """
    if not isinstance(value, kind) and value not in words:
        kinds = [f"{each.__name__}(...)" for each in get_args(kind) or (kind,)]
        raise PlanError(f"{name}={value!r} is none of {', '.join([*map(repr, words), *kinds])}.")


def _check_kind(name: str, value: object, kinds: tuple[str, ...]) -> None:
    """Check that an argument has one of the allowed values.

    Args:
        name: name of the argument, as text for the error.
        value: its value.
        kinds: the allowed values.

    Raises:
        PlanError: it has another value.
    """
    if value not in kinds:
        raise PlanError(f"{name}={value!r} is none of {', '.join(map(repr, kinds))}.")


def _check_shape(replicas: Count, shape: StageCounts, plan: Plan | None) -> None:
    """Check the type of the plan, and that the sizes are sizes and do not contradict the plan.

    Args:
        replicas: the argument ``data_parallel_size``.
        shape: the argument ``pipeline_parallel_size``.
        plan: the user's plan; ``None``: there is none.

    Raises:
        PlanError: the plan is no `Plan`, a size is not allowed, or a size contradicts the plan.
    """
    if plan is not None and not isinstance(plan, Plan):
        raise PlanError(
            f"plan={plan!r} must be a Plan, the path of one, or a list of cut points: the names of "
            "the first module of each later stage."
        )
    if not isinstance(shape, int | str):
        copies = tuple(shape)
        if not copies or not all(isinstance(count, int) and count > 0 for count in copies):
            raise PlanError(
                f"pipeline_parallel_size={shape!r} must be a positive number, 'auto', or of each "
                "stage the number of its copies, as in (3, 1)."
            )
        if plan is not None and plan.copies != copies:
            raise PlanError(
                f"pipeline_parallel_size={copies} contradicts the plan, whose stages have "
                f"{plan.copies} copies. Give one or the other."
            )
    stages = shape if isinstance(shape, int | str) else sum(shape)
    sizes = {"data_parallel_size": replicas, "pipeline_parallel_size": stages}
    for name, value in sizes.items():
        if value != "auto" and (not isinstance(value, int) or value < 1):
            raise PlanError(f"{name}={value!r} must be a positive number or 'auto'.")
    if plan is None:
        return
    size = plan.devices_per_replica
    if replicas not in ("auto", plan.replicas) or stages not in ("auto", size):
        # under a free placement a device has several stages, and sizes count devices
        what = "stages" if size == plan.stages else f"devices with {plan.stages} stages"
        raise PlanError(
            f"data_parallel_size={replicas} x pipeline_parallel_size={stages} contradict the "
            f"plan: {plan.replicas} replicas x {size} {what}. Give one or the other."
        )
