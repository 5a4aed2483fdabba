"""What the user has asked for, checked: the arguments of the strategy as one record."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning import AUTO, Method, Plan, PlanSettings, Sizes, given_speeds
from lightning_hybrid.schedules import SCHEDULES, STREAMED, DelayedWeights, LookAhead

Count = int | Literal["auto"]
Shape = Count | tuple[int, ...]
Checkpoint = Literal["full", "sharded", "sharded_async"]
ScheduleName = Literal[
    "auto", "gpipe", "looped", "zero_bubble", "1f1b", "pipedream", "ddg", "fdg", "akintoye"
]

Rng = Literal["microbatch", "device"]
Balance = Literal["equal", "speed"]
Replan = Literal["never", "epoch"]
GradientSync = Literal["allreduce", "asgd"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """The arguments of :class:`HybridGabraStrategy` that are not Lightning's.

    What was left to us (``"auto"``) is ``None``. With a plan, the sizes are those of the plan.

    Attributes:
        replicas: number of replicas; ``None``: devices / stages.
        stages: number of devices of a replica; ``None``: devices / replicas.
        copies: of each stage of a replica; empty: each device has a stage of its own, or several.
        microbatches: into how many slices a batch is split; ``None``: by the size of the batch.
        names: dotted names of the modules to cut; ``None``: they are found.
        settings: what a plan is made by.
        capacity: relative speeds of the devices, one per rank; ``None``: measured.
        compile_stages: run each stage through ``torch.compile``.
        plan: the user's; ``None``: one is made.
        log_performance: whether the loggers get step times and the plan.
        gradient_shrinking: what gradients are multiplied with at every cut that they cross.
        verify: which calls of a network are compared with what its own Python gives.
        rng: whose random numbers networks draw.
        checkpoint: whether a checkpoint is a file, or a folder to which each rank writes its part.
        shard_optimizer_states: whether the replicas of a stage divide its optimizer states.
        balance: whether replicas take equal parts of each global batch, or parts by their speed.
        replan: when parts by speed follow what was measured in the training.
        gradient_sync: whether replicas wait for each other at each step.
        staleness: how many updates old weights may be under `asgd`.
        chosen: whether the sizes are ours, so that a network which does not suit them is no error.
    """

    replicas: int | None
    stages: int | None
    microbatches: int | None
    names: tuple[str, ...] | None
    settings: PlanSettings
    capacity: tuple[float, ...] | None
    compile_stages: bool
    plan: Plan | None
    log_performance: bool
    gradient_shrinking: float
    verify: int | Literal["auto", False]
    rng: Rng
    checkpoint: Checkpoint = "full"
    shard_optimizer_states: bool = False
    balance: Balance = "equal"
    replan: Replan = "never"
    gradient_sync: GradientSync = "allreduce"
    staleness: int = 0
    chosen: bool = False
    copies: tuple[int, ...] = ()

    @classmethod
    def resolve(
        cls,
        *,
        data_parallel_size: Count = "auto",
        pipeline_parallel_size: Shape = "auto",
        num_microbatches: Count = "auto",
        schedule: ScheduleName = "auto",
        delayed_weights: DelayedWeights = "stash",
        gradient_shrinking: float = 1.0,
        recompute: bool | Literal["auto"] = "auto",
        allocation: Method | list[str] = "gabra",
        objective: Literal["step", "makespan", "profit"] = "step",
        contiguous: bool = True,
        network: str | list[str] | None = None,
        device_capacity: Literal["auto"] | Sequence[float] = "auto",
        compile_stages: bool = False,
        plan: Plan | str | Path | None = None,
        log_performance: bool = False,
        verify: int | Literal["auto", False] = "auto",
        rng: Rng = "microbatch",
        checkpoint: Checkpoint = "full",
        shard_optimizer_states: bool = False,
        balance: Balance = "equal",
        replan: Replan = "never",
        gradient_sync: GradientSync = "allreduce",
        staleness: int = 0,
        seed: int = 0,
    ) -> "Config":
        """Check the arguments of the strategy, which documents them, and load the plan.

        Raises:
            PlanError: the sizes contradict each other or the plan, or the plan cannot be read.
        """
        loaded = Plan.load(plan) if isinstance(plan, str | Path) else plan
        copies = _copies(pipeline_parallel_size, loaded)
        replicas, stages = _sizes(data_parallel_size, pipeline_parallel_size, loaded)
        if num_microbatches != "auto" and num_microbatches < 1:
            raise PlanError(f"num_microbatches={num_microbatches} must be at least 1 or 'auto'.")
        _check_placement(schedule, contiguous, allocation)
        chosen: str = schedule
        if chosen == "auto":
            chosen = loaded.schedule if loaded else AUTO
        _check_schedule(chosen, loaded, delayed_weights, gradient_shrinking)
        if recompute is True:
            _check_recompute(chosen, stages)
        if chosen in STREAMED:
            recompute = False
        if loaded and recompute != "auto":
            loaded = replace(loaded, recompute=recompute)
        if num_microbatches == "auto" and chosen in STREAMED:
            num_microbatches = 1  # its micro-batches are the batches
        _check_verify(verify)
        _check_rng(rng, chosen)
        _check_kind("checkpoint", checkpoint, get_args(Checkpoint))
        _check_kind("balance", balance, get_args(Balance))
        if shard_optimizer_states and checkpoint == "sharded_async":
            raise PlanError(
                "checkpoint='sharded_async' makes copies on replica 0, and shard_optimizer_states="
                "True leaves it a part of the states. Use checkpoint='sharded' or 'full'."
            )
        if loaded and loaded.shares:
            balance = "speed"
        _check_kind("replan", replan, get_args(Replan))
        if replan == "epoch" and balance == "equal":
            raise PlanError(
                "replan='epoch' gives replicas other parts of a batch when they turn out faster or "
                "slower, and balance='equal' gives all the same. Use balance='speed'."
            )
        _check_copies(
            copies,
            schedule=("gpipe" if chosen == AUTO else chosen, "gpipe"),
            contiguous=(contiguous, True),
            balance=(balance, "equal"),
            shard_optimizer_states=(shard_optimizer_states, False),
            checkpoint=(checkpoint, "full"),
            rng=(rng, "microbatch"),
            # the driver's copy of the last stage borrows its weights
            **({"compile_stages": (compile_stages, False)} if copies and copies[-1] > 1 else {}),
        )
        _check_asynchronous(
            gradient_sync,
            staleness,
            {
                f"pipeline_parallel_size={copies or stages}": stages not in (None, 1),
                f"balance={balance!r}": balance != "equal",
                f"schedule={chosen!r}": chosen in STREAMED,
                f"shard_optimizer_states={shard_optimizer_states}": shard_optimizer_states,
                f"checkpoint={checkpoint!r}": checkpoint != "full",
            },
        )
        names = [network] if isinstance(network, str) else network
        return cls(
            replicas=replicas,
            stages=1 if gradient_sync == "asgd" else stages,
            microbatches=None if num_microbatches == "auto" else num_microbatches,
            names=None if names is None else tuple(names),
            settings=PlanSettings(
                schedule=chosen,
                allocation=allocation if isinstance(allocation, str) else tuple(allocation),
                objective=objective,
                seed=seed,
                contiguous=contiguous,
                recompute=recompute,
                compiled=compile_stages,
                delayed_weights=delayed_weights,
                shards_states=shard_optimizer_states,
                copies=copies,
            ),
            capacity=None if device_capacity == "auto" else tuple(device_capacity),
            compile_stages=compile_stages,
            plan=loaded,
            log_performance=log_performance,
            gradient_shrinking=float(gradient_shrinking),
            verify=verify,
            rng=rng,
            checkpoint=checkpoint,
            shard_optimizer_states=shard_optimizer_states,
            balance=balance,
            replan=replan,
            copies=copies,
            gradient_sync=gradient_sync,
            staleness=staleness,
        )

    @property
    def streamed(self) -> LookAhead | None:
        """The schedule, if forwards of later batches begin early under it."""
        return STREAMED.get(self.settings.schedule)

    def shape(self, nodes: int, devices_per_node: int) -> tuple[int, int]:
        """Replicas, and devices of each, for the devices that there are.

        Args:
            nodes: number of hosts.
            devices_per_node: number of devices of each.

        Raises:
            PlanError: the sizes do not use all devices.
        """
        devices = nodes * devices_per_node
        replicas, stages = self.replicas, self.stages
        if stages is None:
            stages = devices // (replicas or 1)
        if replicas is None:
            replicas = devices // max(stages, 1)
        if replicas * stages != devices:
            raise PlanError(
                f"data_parallel_size({replicas}) x pipeline_parallel_size({stages}) = "
                f"{replicas * stages} != {devices} devices"
                f"{f' ({nodes} nodes)' if nodes > 1 else ''}: the number of "
                f"devices must be divisible by the number of stages. Set Trainer(devices=...) to a "
                f"multiple of {self.stages or self.replicas}, or change the sizes."
            )
        return replicas, stages

    def leaves_sizes_open(self, devices: int) -> bool:
        """Whether there are sizes to choose, when the network is known.

        Cut points are for a number of stages that the user has in mind: all devices.
        """
        asked = self.replicas is not None or self.stages is not None or self.plan is not None
        return not asked and devices > 1 and isinstance(self.settings.allocation, str)

    def with_sizes(self, sizes: Sizes) -> "Config":
        """The same with the sizes that were chosen; micro-batches matter to several stages."""
        microbatches = self.microbatches
        if microbatches is None and sizes.stages > 1:
            microbatches = sizes.microbatches
        return replace(
            self,
            replicas=sizes.replicas,
            stages=sizes.stages,
            microbatches=microbatches,
            chosen=True,
        )

    @property
    def may_keep_whole(self) -> bool:
        """Whether a network that cannot be cut may run on the driver: no stages were asked for."""
        return self.chosen or self.stages is None

    def check_devices(self, nodes: int, devices_per_node: int) -> None:
        """Complain about devices that do not suit the sizes or the capacities.

        Raises:
            PlanError: see :meth:`shape`; or the capacities are not one positive number per device.
        """
        self.shape(nodes, devices_per_node)
        if self.capacity is not None:
            given_speeds(self.capacity, nodes * devices_per_node)

    @property
    def several_stages_per_device(self) -> bool:
        """Whether stages and devices are not the same number, so that a rank tells no stage."""
        if self.settings.schedule == "looped" or self.copies:
            return True
        if self.plan is not None:
            return self.plan.devices != (*range(1, self.plan.stages), 0)
        return not self.settings.contiguous

    def needs_survey(self, replicas: int, stages: int) -> bool:
        """Whether there is anything to decide for which the devices must be known.

        Args:
            replicas: their number, as :meth:`shape` gives it.
            stages: number of devices of each, likewise.
        """
        if self.balance == "speed" and replicas > 1 and not (self.plan and self.plan.shares):
            return True
        given = self.plan is not None or not isinstance(self.settings.allocation, str)
        return stages > 1 and (self.capacity is not None or not given)


def _check_kind(name: str, value: str, kinds: tuple[str, ...]) -> None:
    """Complain about a value that is none of those that there are."""
    if value not in kinds:
        raise PlanError(f"{name}={value!r} is none of {', '.join(map(repr, kinds))}.")


def _check_asynchronous(gradient_sync: str, staleness: int, others: dict[str, bool]) -> None:
    """Complain about a bound that is none, and what replicas do together at each step."""
    _check_kind("gradient_sync", gradient_sync, get_args(GradientSync))
    if isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0:
        raise PlanError(f"staleness={staleness!r} must be a whole number of updates, 0 or more.")
    if gradient_sync != "asgd":
        if staleness:
            raise PlanError(
                f"staleness={staleness} is for gradient_sync='asgd'. Give both, or leave it out."
            )
        return
    for other, given in others.items():
        if given:
            raise PlanError(
                f"gradient_sync='asgd' is for replicas of one stage that do not wait for each "
                f"other, and does not go together with {other}. Leave one of them out."
            )


def _check_placement(schedule: str, contiguous: bool, allocation: str | list[str]) -> None:
    """Complain about a request for several stages per device beside one for a single one."""
    if schedule == "zero_bubble" and not contiguous:
        raise PlanError(
            "schedule='zero_bubble' gives each device one stage, and contiguous=False lets "
            "GABRA give it several. Leave one of them out."
        )
    if not (contiguous or isinstance(allocation, str)):
        raise PlanError(
            f"allocation={allocation} are cut points, which give each device one stage, and "
            "contiguous=False lets GABRA give it several. Leave one of them out, or give "
            "plan=Plan(..., devices=...), which says where each stage goes."
        )


def _check_verify(verify: int | str) -> None:
    """Complain about a choice of calls that is none."""
    if verify is False or verify == "auto":
        return
    if verify is True or not isinstance(verify, int) or verify < 1:
        raise PlanError(
            f"verify={verify!r} is none of 'auto' (calls 1, 2, 4, 8, ...), False and a number of "
            "calls of at least 1."
        )


def _check_rng(rng: str, schedule: str) -> None:
    """Complain about random numbers that a schedule cannot draw."""
    _check_kind("rng", rng, get_args(Rng))
    if rng == "device" and schedule in STREAMED:
        raise PlanError(
            f"rng='device' draws in the order of one device, and schedule={schedule!r} begins with "
            "later batches early. Leave one of them out."
        )


def _check_recompute(name: str, stages: int | None) -> None:
    """Complain about recomputation where it does nothing."""
    if name in STREAMED:
        raise PlanError(
            f"recompute=True is for schedules that finish a batch before the next one, not for "
            f"{name!r}. Leave it out; the delayed schedules have delayed_weights='recompute'."
        )
    if stages == 1:
        raise PlanError(
            "recompute=True is done by stages, and pipeline_parallel_size=1 makes none. Leave "
            "it out, or call torch.utils.checkpoint in the network."
        )


def _check_schedule(name: str, plan: Plan | None, weights: str, shrink: float) -> None:
    """Complain about a schedule that is unknown, or about what it does not know."""
    _check_kind("schedule", name, (AUTO, *SCHEDULES))
    if plan is not None and plan.schedule != name:
        raise PlanError(
            f"schedule={name!r} contradicts the plan, whose schedule is {plan.schedule!r}. Leave "
            "one of them out."
        )
    _check_kind("delayed_weights", weights, get_args(DelayedWeights))
    streamed = STREAMED.get(name)
    if weights != "stash" and not (streamed and streamed.delayed):
        delayed = ", ".join(repr(each.name) for each in STREAMED.values() if each.delayed)
        raise PlanError(
            f"delayed_weights={weights!r} is for the delayed schedules ({delayed}); under "
            f"schedule={name!r} no step comes between a forward and its backward. Leave it out."
        )
    if shrink != 1 and not (streamed and streamed.shrinks):
        raise PlanError(
            f"gradient_shrinking={shrink} is part of schedule='fdg', not of {name!r}. Leave it out."
        )
    if not 0 < shrink <= 1:
        raise PlanError(f"gradient_shrinking={shrink} must be above 0 and at most 1.")


def _copies(shape: Shape, plan: Plan | None) -> tuple[int, ...]:
    """Of each stage; empty: all have one."""
    if isinstance(shape, int | str):
        given = plan.copies if plan is not None else ()
        return given if max(given, default=1) > 1 else ()
    copies = tuple(shape)
    if not copies or not all(isinstance(count, int) and count > 0 for count in copies):
        raise PlanError(
            f"pipeline_parallel_size={shape!r} must be a positive number, 'auto', or of each stage "
            "the number of its copies, as in (3, 1)."
        )
    if plan is not None and plan.copies != copies:
        raise PlanError(
            f"pipeline_parallel_size={copies} contradicts the plan, whose stages have {plan.copies}"
            " copies. Give one or the other."
        )
    return copies if max(copies) > 1 else ()


def _check_copies(copies: tuple[int, ...], **options: tuple[Any, Any]) -> None:
    """Complain about what does not go together with copies of a stage.

    Args:
        copies: of each stage.
        options: by name of an argument its value, and the one that does.

    Raises:
        PlanError: an argument has another value.
    """
    if not copies:
        return
    shape = f"pipeline_parallel_size={copies} gives stages copies"
    for name, (value, good) in options.items():
        if value != good:
            raise PlanError(
                f"{shape}, which does not go together with {name}={value!r}. Use {name}={good!r}, "
                f"or pipeline_parallel_size={sum(copies)}."
            )


def _sizes(replicas: Count, shape: Shape, plan: Plan | None) -> tuple[int | None, int | None]:
    """Number of replicas and of the devices of each; ``None``: by the number of devices."""
    stages = shape if isinstance(shape, int | str) else sum(shape)
    sizes = {"data_parallel_size": replicas, "pipeline_parallel_size": stages}
    for name, value in sizes.items():
        if value != "auto" and (not isinstance(value, int) or value < 1):
            raise PlanError(f"{name}={value!r} must be a positive number or 'auto'.")
    if plan is None:
        return None if replicas == "auto" else replicas, None if stages == "auto" else stages
    size = plan.devices_per_replica
    if replicas not in ("auto", plan.replicas) or stages not in ("auto", size):
        what = "stages" if size == plan.stages else f"devices with {plan.stages} stages"
        raise PlanError(
            f"data_parallel_size={replicas} x pipeline_parallel_size={stages} contradict the "
            f"plan: {plan.replicas} replicas x {size} {what}. Give one or the other."
        )
    return plan.replicas, size
