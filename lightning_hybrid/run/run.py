"""The data of one run on a driver, from which its session and the order for servers are made."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_hybrid._lightning import (
    FabricMixedPrecision,
    MixedPrecision,
    Precision,
    Trainer,
    TrainerFn,
    rank_zero_info,
)
from lightning_hybrid._torch.tensors import is_composed
from lightning_hybrid.config import Config
from lightning_hybrid.driver import StartProgress, present_bytes
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.planning import Plan, Site, make_plan, plan_again
from lightning_hybrid.process import ServeOrder, World
from lightning_hybrid.profiling import CalledNetwork
from lightning_hybrid.run.building import Building
from lightning_hybrid.run.framework import Framework, TrainerFramework
from lightning_hybrid.stage import StageOptions, Stopwatch, broadcast_module
from lightning_hybrid.state import make_what_no_network_owns


@dataclass(frozen=True, kw_only=True)
class Run:
    """The data of one call of ``fit``, ``validate``, ``test``, ``predict`` or ``fabric.launch``.

    Attributes:
        config: options of the user.
        framework: the Trainer or Fabric.
        module: the LightningModule, or the module that was given to ``fabric.setup``.
        world: the ranks of the run.
        device: device of this rank.
        precision: Lightning's precision plugin.
        fitting: whether the run trains.
        synchronised: whether batch statistics are taken over the replicas.
        building: how the weights of the module were made: whole on each rank, or by their owners.
        stopwatch: adds up the times of forwards and backwards of this rank, for the log and for
            ``Search(replan="epoch")``; ``None``: nobody reads them.
        shared: names of the parameters and buffers that the module has on all drivers.
        plans: the plans in force by name of the network; a plan is added when its network is cut.
        progress: shows the work before the first step.
        again: by name of each network whose cuts may change, a function that plans it for other
            speeds of the devices, given the plan in force and the speeds; see
            :func:`lightning_hybrid.planning.plan_again`.
    """

    config: Config
    framework: Framework
    module: nn.Module
    world: World
    device: torch.device
    precision: Precision
    fitting: bool
    synchronised: bool
    building: Building
    stopwatch: Stopwatch | None
    shared: frozenset[str]
    plans: dict[str, Plan]
    progress: StartProgress
    again: dict[str, Callable[[Plan, Sequence[float]], tuple[Plan, Plan]]] = field(
        default_factory=dict
    )

    @classmethod
    def of(
        cls,
        trainer: Trainer,
        config: Config,
        world: World,
        building: Building,
        plans: dict[str, Plan],
        *,
        synchronise: bool,
    ) -> "Run":
        """Make the data of the run that a Trainer is about to begin (collective over the drivers).

        Args:
            trainer: the Trainer, which has set up the accelerator and the module.
            config: options of the user.
            world: the ranks of the run.
            building: how the weights of the module were made.
            plans: the plans in force, by name of the network; networks that are cut are added.
            synchronise: whether the user wants batch statistics over the replicas, which are taken
                if the run trains and there are several.
        """
        fitting = trainer.state.fn == TrainerFn.FITTING
        device = trainer.strategy.root_device
        is_zero = world.coordinates.lightning_rank == 0
        return cls(
            config=config,
            framework=TrainerFramework(trainer),
            module=trainer.lightning_module,
            world=world,
            device=device,
            precision=trainer.precision_plugin,
            fitting=fitting,
            synchronised=fitting and synchronise and world.coordinates.replicas > 1,
            building=building,
            stopwatch=Stopwatch(device)
            if config.log_performance or (fitting and config.replans_cuts)
            else None,
            shared=world.shared_names(trainer.lightning_module),
            plans=plans,
            progress=progress_beside(trainer) if is_zero else StartProgress(None),
        )

    @property
    def trainer(self) -> Trainer:
        """The Trainer of the run; must not be asked for under Fabric, which has none."""
        assert isinstance(self.framework, TrainerFramework)
        return self.framework.trainer

    @property
    def is_global_zero(self) -> bool:
        """Whether this rank is the driver of replica 0, which logs and saves."""
        return self.world.coordinates.lightning_rank == 0

    @property
    def why_cuts_stay(self) -> str:
        """Why the option ``replan="epoch"`` cannot change the cuts in this run; empty: it can."""
        here = self.world.coordinates
        if here.ranks_per_replica == 1:
            return "there is one stage"
        if self.building.deferred:
            return "a network that is made in configure_model is whole on no rank"
        if self.device.type != "cpu":
            return f"on {self.device.type!r} no device is compared with its plan"
        return ""

    @property
    def changes_cuts(self) -> bool:
        """Whether stages may be cut at other places when an epoch begins."""
        return self.fitting and self.config.replans_cuts and not self.why_cuts_stay

    def stage_options(self) -> StageOptions:
        """Make the options of stages (collective over the drivers, since it may make a group)."""
        statistics = self.world.mesh.statistics() if self.synchronised else None
        return replace(self._options, statistics=statistics)

    @property
    def _options(self) -> StageOptions:
        """The options of stages, without the group for batch statistics over the replicas."""
        weights, shrinking = self.config.settings.delayed_weights, self.config.gradient_shrinking
        return StageOptions(self.config.compile_stages, None, weights, shrinking)

    def order(self, *, survives: bool) -> ServeOrder:
        """Make the order by which rank 0 has the servers serve in this run.

        Args:
            survives: whether replicas go on if one is lost.
        """
        return ServeOrder.of(
            self.module,
            self._options,
            synchronised=self.synchronised,
            shards=self.config.shards_states,
            survives=survives,
            timed=self.stopwatch is not None,
        )

    def plan_network(
        self,
        network: CalledNetwork,
        microbatches: int,
        beside: Sequence[Plan],
        chosen: bool,
        *,
        optimizers: Sequence[Optimizer],
    ) -> Plan:
        """Return the plan of a network: the user's, or a new one, for which it is profiled.

        Without ``optimizers`` it is a
        :data:`lightning_hybrid.driver.network_options.Planner`.

        Args:
            network: the network, with the input tensors of a micro-batch.
            microbatches: number of micro-batches.
            beside: plans of the networks that are on these devices already.
            chosen: whether to choose the cuts even if the user has given a plan or cut points.
            optimizers: the user's optimizers, whose state needs memory if the run trains.

        Raises:
            PlanError: the user's plan is for another network.
        """
        given, settings = self.config.plan, self.config.settings
        # (a backward has parts of other replicas then, whose losses may get other gradients)
        if self.synchronised:
            settings = replace(settings, may_go_inside=False)
        if given is not None and not chosen:
            shown = f"{network.name or 'self'!r} ({type(network.graph.network).__name__})"
            given.check_network([partition.name for partition in network.partitions], shown)
            return given
        coordinates = self.world.coordinates
        site = Site(
            replicas=coordinates.replicas,
            stages=len(settings.copies) or coordinates.ranks_per_replica,
            backend=self.world.mesh.backend,
            on_cpu=self.device.type == "cpu",
            cluster=self.world.cluster,
            beside=beside,
            present_bytes=present_bytes(network.graph.network, self.device),
        )
        if self.changes_cuts:
            network = network.remembered(self.device)

            def again(plan: Plan, capacities: Sequence[float]) -> tuple[Plan, Plan]:
                # (a callback may have given the optimizers more weights since)
                costs = network.costs(settings, site.replicas, self.device, optimizers)
                return plan_again(costs, settings, site, plan, capacities)

            self.again[network.name] = again
        # not with the user's cut points: they are for the whole network, and this is a part
        now = replace(settings, allocation="exact") if chosen else settings
        trained_by = optimizers if self.fitting else None
        costs = network.costs(now, site.replicas, self.device, trained_by)
        return make_plan(costs, microbatches, settings=now, site=site)

    def share_weights(self) -> None:
        """Give all replicas the weights and buffers of replica 0 (collective over the drivers).

        Weights that no network can own are made first, where weights are made later.

        Raises:
            NetworkError: there are other ranks, and some weight cannot be sent to them.
        """
        coordinates = self.world.mesh.coordinates
        if coordinates.replicas * coordinates.ranks_per_replica > 1:
            refuse_composed(self.module)
        make_what_no_network_owns(self.module)
        broadcast_module(self.module, self.world.mesh.drivers)


def refuse_composed(module: nn.Module) -> None:
    """Refuse a module with weights that keep their numbers in other tensors, as quantised ones do.

    They cannot be sent to other ranks as they are.

    Raises:
        NetworkError: a parameter or buffer is of that kind.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_composed(tensor):
            raise NetworkError(
                f"{name!r} is a {type(tensor).__name__}, which keeps its numbers in other tensors, "
                "as quantised weights do: such cannot go to another rank. Leave the quantisation "
                "out, or use one device."
            )


def progress_beside(trainer: Trainer) -> StartProgress:
    """Make the object that shows the work before the first step, by lines on global rank 0.

    If the Trainer has no progress bar, nothing is shown.
    """
    return StartProgress(None if trainer.progress_bar_callback is None else rank_zero_info)


def scalers_of(precision: Precision) -> list[GradScaler]:
    """Return a list with the gradient scaler of a precision plugin; empty: it has none."""
    plugin: object = precision  # Fabric's is no subclass of the Trainer's
    if isinstance(plugin, MixedPrecision | FabricMixedPrecision) and plugin.scaler is not None:
        return [plugin.scaler]
    return []


def scaled(precision: Precision, number: Tensor) -> Tensor:
    """Multiply a number by the factor by which the precision's gradient scaler multiplies losses.

    Without a scaler the number is returned as it is.
    """
    for scaler in scalers_of(precision):  # (not `get_scale`, which reads it from a GPU)
        number = scaler.scale(number)
    return number
