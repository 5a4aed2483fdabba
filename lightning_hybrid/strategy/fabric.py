"""``Fabric(strategy="hybrid_gabra")``: stages within replicas, for a loop of the user's own.

The drivers run the function of ``fabric.launch``, and to them the world is that of DDP over the
replicas; the other ranks serve. Fabric has no hooks at which a batch or an evaluation begins, so
that both are taken from the calls of the model.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid._lightning import (
    CheckpointIO,
    ClusterEnvironment,
    FabricDDPStrategy,
    Trainer,
    rank_zero_info,
)
from lightning_hybrid._lightning_private import (
    disable_module_memory_sharing,
    let_fabric_clear_gradients,
)
from lightning_hybrid.comm import Failure, restore_handlers
from lightning_hybrid.config import Config, Count, RngScope, StageCounts, read_plan
from lightning_hybrid.driver import StartProgress, bring_here
from lightning_hybrid.errors import HybridError, PlanError
from lightning_hybrid.options import Search
from lightning_hybrid.planning import Plan
from lightning_hybrid.process import NoWorld, Phase, RestOrder
from lightning_hybrid.run import (
    BetweenRuns,
    Building,
    DriverSession,
    FabricFramework,
    Run,
    leave_on_cpu,
    move_module,
    scalers_of,
)
from lightning_hybrid.strategy.launcher import (
    HybridMultiProcessingLauncher,
    HybridSubprocessLauncher,
    LaunchedFunction,
)
from lightning_hybrid.strategy.ranks import StrategyRanks
from lightning_hybrid.strategy.refusals import refuse_device, refuse_lazy, refuse_optimizers
from lightning_hybrid.strategy.replica_ranks import ReplicaRanks

T = TypeVar("T")


class HybridGabraFabricStrategy(ReplicaRanks, FabricDDPStrategy):
    """Strategy for Fabric that trains replicas of a chain of stages, placed by predicted time.

    The function that is given to ``fabric.launch`` stays as it is. One rank of each replica runs
    it, its driver; the others compute stages. The options mean what they mean for
    :class:`HybridGabraStrategy`, which says more of them.

    Args:
        data_parallel_size: number of replicas. ``"auto"``: devices / stages. If both sizes are
            ``"auto"``, all devices form one chain.
        pipeline_parallel_size: number of devices of a replica, or the numbers of copies of its
            stages. ``"auto"``: devices / replicas.
        num_microbatches: into how many slices a replica's batch is split.
        schedule: how the devices share their time: ``"gpipe"``, ``"looped"``, ``"zero_bubble"``,
            ``"1f1b"`` or ``"auto"``. Schedules that begin with later batches early are refused.
        network: dotted name(s) of the module(s) to cut, in the model that is given to
            ``fabric.setup``. ``None``: found.
        plan: a :class:`Plan`, a path to one, or cut points. ``None``: searched.
        search: how a plan is searched where none is given.
        recompute: whether stages keep no activations, and run their forward again for the backward.
        compile_stages: whether each stage is run through ``torch.compile``.
        verify: which calls of a network are compared with what its own Python gives.
        rng: whose random numbers a network draws.
        seed: seed of the genetic algorithm.
        parallel_devices: as in Fabric's ``DDPStrategy``.
        cluster_environment: as in Fabric's ``DDPStrategy``.
        checkpoint_io: as in Fabric's ``DDPStrategy``.
        process_group_backend: backend of tensors between ranks: ``"gloo"`` on CPUs, ``"nccl"`` on
            CUDA. ``None``: the one for the device.
        timeout: time-out of tensors between ranks.
        start_method: how the other processes are started: ``"popen"``, ``"spawn"``, ``"fork"`` or
            ``"forkserver"``.

    Raises:
        PlanError: options contradict each other, or need a Trainer.
    """

    _no_run = (
        "has no model that is set up: what trains one goes between fabric.setup and the end of the "
        "function that is given to fabric.launch."
    )

    def __init__(
        self,
        *,
        data_parallel_size: Count = "auto",
        pipeline_parallel_size: StageCounts = "auto",
        num_microbatches: Count = "auto",
        schedule: Literal["auto", "gpipe", "looped", "zero_bubble", "1f1b"] = "auto",
        network: str | list[str] | None = None,
        plan: Plan | str | Path | list[str] | None = None,
        search: Search = Search(),
        recompute: bool | Literal["auto"] = "auto",
        compile_stages: bool = False,
        verify: int | Literal["auto", False] = "auto",
        rng: RngScope = "microbatch",
        seed: int = 0,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        made, cuts = read_plan(plan)
        config = Config(
            data_parallel_size=data_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            num_microbatches=num_microbatches,
            schedule=schedule,
            network=network,
            plan=made,
            cuts=cuts,
            search=search,
            recompute=recompute,
            compile_stages=compile_stages,
            verify=verify,
            rng=rng,
            seed=seed,
        )
        if config.streamed is not None:
            raise PlanError(
                f"{config.shown_schedule} begins with later batches early, which a loop "
                "of your own fetches: Fabric knows none. Use schedule='gpipe', or the Trainer."
            )
        if config.replans_cuts:
            raise PlanError(
                "search=Search(replan='epoch') cuts stages anew when an epoch begins, and Fabric "
                "knows no epochs. Leave replan out, or use the Trainer."
            )
        if config.by_speed:
            raise PlanError(
                "The plan has shares: it deals each global batch by speed, which is done in the "
                "Trainer's loaders. Give a plan without shares, or use the Trainer."
            )
        # (Fabric's DDP leaves the generators as they are, other than the Trainer's)
        self._ranks = StrategyRanks(config, reseeds=False)
        let_fabric_clear_gradients()
        super().__init__(
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._backward_sync_control = cast(Any, self)
        self._plans: dict[str, Plan] = {}
        self._optimizers: list[Optimizer] = []
        self._launched = False
        self._rest()

    def __deepcopy__(self, memo: object) -> "HybridGabraFabricStrategy":
        """Return this object itself, so that copies of a wrapped model belong to the same run."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without process groups: Fabric may spawn processes."""
        return vars(self) | {"_session": BetweenRuns(NoWorld(), Building())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the strategy from a pickle, perhaps in another process."""
        vars(self).update(state)
        let_fabric_clear_gradients()

    def _rest(self) -> None:
        self._session = BetweenRuns(self._ranks.world, Building())
        self._optimizers.clear()
        self._batch_is_over = True

    # ------------------------------------------------------------------ ranks

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:  # type: ignore[override]
        """Arguments of the sampler that divides data over the replicas; ``None``: one replica.

        A single replica takes its samples in the order in which one device would.
        """
        if not self.is_distributed:
            return None
        return {"num_replicas": self.num_replicas, "rank": self.coordinates.dp_rank}

    def _set_world_ranks(self) -> None:
        self._ranks.hosts = self._num_nodes  # as Fabric sets it
        self._ranks.set_launched(self.cluster_environment)

    # ------------------------------------------------------------------ a run

    def _configure_launcher(self) -> None:
        launcher = self._launcher_of_processes(self.cluster_environment, self._start_method)
        self._launcher = _Launcher(self, launcher)

    def run_launched(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run, in each process, the function that was given to ``fabric.launch``.

        Args:
            function: the user's.
            args: its arguments.
            kwargs: its keyword arguments.

        Returns:
            What the function returns.
        """
        if self._start_method in ("spawn", "forkserver"):
            # torch gives all processes the same memory, in which each replica would step
            args, kwargs = disable_module_memory_sharing((args, kwargs))
        self._launched = True
        try:
            return function(*args, **kwargs)
        finally:
            self._launched = False

    def setup_environment(self) -> None:
        """Meet all other ranks (collective). On a worker this serves, and never returns."""
        self._require_launch()
        refuse_device(self.root_device)
        self._set_world_ranks()  # which tell the device of this process
        super().setup_environment()

    def _require_launch(self) -> None:
        if not self._launched:
            raise HybridError(
                "hybrid_gabra needs to know where a run ends: give the code as a function, "
                "fabric.launch(fn), with fabric.setup inside of fn. fabric.launch() without one, "
                "and `fabric run`, do not say so."
            )

    def _setup_distributed(self) -> None:
        ranks = self._ranks
        self._process_group_backend = backend = self._get_process_group_backend()
        self._take_known_chain(None)
        ranks.meet(backend, self._timeout or timedelta(minutes=30))
        ranks.serve_if_worker(for_good=self._start_method == "popen")
        self._rest()

    def _why_chain(self, trainer: Trainer | None) -> str | None:
        return (
            "under Fabric no training step is known before the first. Other sizes: "
            "Fabric(strategy=HybridGabraFabricStrategy(data_parallel_size=..., "
            "pipeline_parallel_size=...))"
        )

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]  # DDP's, there
        """Begin the run of a model: send the weights of replica 0 to all replicas (collective).

        All drivers call this together. The networks in the model are found by its first call.

        Args:
            module: the model that is given to ``fabric.setup``.

        Returns:
            The model in a wrapper that notes its calls.

        Raises:
            HybridError: a model was set up before in this launch, or the code was not launched as a
                function.
            PlanError: the model does not go together with stages.
        """
        self._require_launch()
        self._refuse(module)
        bring_here(module)
        run = self._begin(module)
        run.world.survive(survives=False)  # (a Trainer of the same script may have said otherwise)
        run.world.phase = Phase.RUNNING
        run.share_weights()
        self._ranks.give(run.order(survives=False))
        planner = partial(run.plan_network, optimizers=self._optimizers)
        self._session = DriverSession(run, planner)
        run.world.defer_signals()
        return StagedModule(module, self._call_begins)

    def _refuse(self, module: nn.Module) -> None:
        if isinstance(self._session, DriverSession):
            raise HybridError(
                f"fabric.setup was given a second model, {type(module).__name__}, and the workers "
                "serve the first one since its setup. Make both parts of one nn.Module."
            )
        if getattr(module, "automatic_optimization", True) is False:
            raise PlanError(
                f"{type(module).__name__}.automatic_optimization=False is for the Trainer. Leave "
                "it out: under Fabric each loop steps by itself."
            )
        refuse_lazy(module)
        replicas, stages = self._ranks.shape
        for name, part in module.named_modules():
            if isinstance(part, nn.SyncBatchNorm) and replicas > 1 and stages > 1:
                raise PlanError(
                    f"{name!r} is a torch.nn.SyncBatchNorm, which speaks to other replicas by "
                    "itself, and workers have no group to do so. Leave it a torch.nn.BatchNorm, "
                    "or use the Trainer's sync_batchnorm=True."
                )

    def _begin(self, module: nn.Module) -> Run:
        """Make the data of the run of a model (collective over the drivers)."""
        world, device = self._ranks.joined, self.root_device
        self._framework = FabricFramework()
        return Run(
            config=self._ranks.config,
            framework=self._framework,
            module=module,
            world=world,
            device=device,
            precision=cast(Any, self.precision),
            fitting=True,
            synchronised=False,
            building=Building(),
            stopwatch=None,
            shared=world.shared_names(module),
            plans=self._plans,
            progress=StartProgress(rank_zero_info if self.is_global_zero else None),
        )

    def finish(self) -> None:
        """End the run, on the workers too; the model and its optimizers move to the CPU.

        Called when the function that was given to ``fabric.launch`` has returned. It waits for all
        ranks.
        """
        self._leave()
        if isinstance(self._session, DriverSession):
            self._session.end()
            leave_on_cpu(self._session.module, self._optimizers)
        else:  # no model was set up
            self._ranks.give(RestOrder())
        self._rest()
        self._ranks.joined.end_run()

    def fail(self, error: BaseException) -> Failure | None:
        """Tell the other ranks that this one fails with ``error``, and leave the run.

        Returns:
            The failure of another rank that came first; ``None``: this rank is the first to fail.
        """
        first = self._tell(error, "The code before fabric.setup", "fabric", "behind fabric.setup")
        self._session.abort()
        self._ranks.world.leave()
        with suppress(Exception):  # what has failed may fail again; the first error counts
            self._leave()
        self._ranks.world = NoWorld()
        self._rest()
        return first

    def _leave(self) -> None:
        restore_handlers()
        self._session.close()

    # ------------------------------------------------------------------ devices

    def module_to_device(self, module: nn.Module) -> None:
        """Move a module to the device of this rank, if it has room for twice the module's size.

        A module with less room stays on the CPU, and a line says so. It is cut at its first call
        with gradients; then each rank gets the weights of its own stages.
        """
        device = self.root_device
        all_of_it = device.type == "cpu" or self._ranks.stages == 1
        move_module(module, device, all_of_it=all_of_it)
        if not all_of_it and any(p.device.type == "cpu" for p in module.parameters()):
            rank_zero_info(
                f"{type(module).__name__} takes more than half of what is free on {device}, and "
                "waits on the CPU until it is cut into stages. Move a module that is not for "
                "fabric.setup by module.to(fabric.device)."
            )

    # ------------------------------------------------------------------ optimizers

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Set up a model, and optimizers, which then step on all ranks; return all that was given.

        See :meth:`setup_module`.

        Args:
            module: the model, which is returned in a wrapper.
            optimizers: its optimizers.
            scheduler: a learning-rate scheduler, which is returned as it is.
        """
        module = self.setup_module(module)
        self._connect(optimizers)
        return module, optimizers, scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Have an optimizer of the model that is set up already step on all ranks; return it.

        Args:
            optimizer: the optimizer.

        Raises:
            HybridError: there are optimizers already, or no model is set up.
        """
        if self._optimizers:
            raise HybridError(
                f"fabric.setup_optimizers was given {type(optimizer).__name__} beside "
                f"{type(self._optimizers[0]).__name__}. Set all of them up with their model: "
                "fabric.setup(model, *optimizers)."
            )
        self._connect([optimizer])
        return optimizer

    def _connect(self, optimizers: list[Optimizer]) -> None:
        scaled = bool(scalers_of(cast(Any, self.precision)))
        refuse_optimizers(optimizers, *self._ranks.shape, scaled=scaled)
        self._driving.connect_optimizers(optimizers)
        self._optimizers.extend(optimizers)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the gradients of all stages by their common norm; return the norm before.

        Args:
            module: not used.
            optimizer: an optimizer that was set up; the gradients are those of its parameters.
            max_norm: the largest norm; larger ones are scaled down to it.
            norm_type: p of the p-norm.
            error_if_nonfinite: whether a norm that is not finite is an error.

        Raises:
            HybridError: the optimizer was not set up.
            RuntimeError: the norm is not finite, and ``error_if_nonfinite``.
        """
        self.precision.unscale_gradients(self._known(optimizer))
        return self._driving.clipping.clip_norm(
            optimizer, float(max_norm), float(norm_type), finite=error_if_nonfinite
        )

    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float
    ) -> None:
        """Clip each element of the gradients of all stages to +/- ``clip_val``.

        Args:
            module: not used.
            optimizer: an optimizer that was set up; the gradients are those of its parameters.
            clip_val: the bound.

        Raises:
            HybridError: the optimizer was not set up.
        """
        self.precision.unscale_gradients(self._known(optimizer))
        self._driving.clipping.clip_values(optimizer, float(clip_val))

    def _known(self, optimizer: Optimizer) -> Optimizer:
        if optimizer not in self._optimizers:
            raise HybridError(
                f"fabric.clip_gradients was given {type(optimizer).__name__}, which was not set "
                "up. Give it to fabric.setup with its model."
            )
        return optimizer

    # ------------------------------------------------------------------ batches and steps

    def _call_begins(self, module: nn.Module) -> None:
        """Prepare for a call of the model: begin a batch, and give all replicas equal buffers.

        The first call with gradients after a backward begins a batch. With several replicas, layers
        in evaluation mode read the buffers of replica 0, as under DDP.

        Args:
            module: the user's model, which is about to be called.
        """
        if not isinstance(self._session, DriverSession):
            return  # after the run a model is an ordinary one
        driving, trains = self._session, torch.is_grad_enabled()
        if trains and self._batch_is_over:
            self._batch_is_over = False
            driving.begin_step(whole=False)  # a penalty may have been computed before
            self._framework.batches += 1
        if self.num_replicas == 1 or next(module.buffers(), None) is None:
            return
        modes = {part.training for part in module.modules()}
        if not trains or False in modes:
            driving.evaluates()
        if True in modes:  # it may change them
            driving.evaluation_starts(between=False)

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run a backward pass through all stages, then average gradients over the replicas.

        Args:
            tensor: the loss.
            module: the model, or ``None``.
            args: passed on to Lightning's precision plugin.
            kwargs: likewise.
        """
        driving, precision = self._driving, self.precision
        driving.require_network()
        precision.pre_backward(tensor, module)
        driving.backward(partial(precision.backward, tensor, module, *args, **kwargs))
        precision.post_backward(tensor, module)
        self._batch_is_over = True

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step an optimizer on all ranks, and return what its step returns.

        A backward through what was computed before the step is refused from then on.

        Args:
            optimizer: an optimizer that was set up.
            kwargs: passed on to Lightning's strategy, such as the closure.
        """
        output = super().optimizer_step(optimizer, **kwargs)
        if isinstance(self._session, DriverSession):
            # weights have changed, so that autograd refuses what was computed with them before
            self._session.graph_is_over()
        return output

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Return a context in which gradients are not averaged over the replicas.

        Args:
            module: the model.
            enabled: ``False``: the context does nothing.
        """
        return self._driving.accumulating() if enabled else nullcontext()

    # ------------------------------------------------------------------ states

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return self._session.state_dict(_own(module), here=True)

    def load_module_state_dict(
        self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        module = _own(module)
        with self._session.loading(module):
            module.load_state_dict(state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if optimizer not in self._optimizers:
            return super().get_optimizer_state(optimizer)
        return self._driving.optimizer_state(nn.Module(), optimizer, here=True)


class StagedModule(nn.Module):
    """A wrapper around the user's model that tells of each call of it, as DDP's wrapper would.

    Args:
        module: the user's model.
        call_begins: called with the model before each of its calls.
    """

    def __init__(self, module: nn.Module, call_begins: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.module = module
        self._call_begins = call_begins

    # torch.compile of the user's own, which Fabric puts around this, must not look into it
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, and return its output."""
        self._call_begins(self.module)
        return self.module(*args, **kwargs)


def _own(module: nn.Module) -> nn.Module:
    """Return the user's model: out of its `StagedModule`, or as it is."""
    return module.module if isinstance(module, StagedModule) else module


class _Launcher:
    """The launcher that Fabric gets: runs a function by another launcher, which starts processes.

    Args:
        strategy: the strategy of this process.
        launcher: the launcher that starts the other processes.
    """

    def __init__(
        self,
        strategy: HybridGabraFabricStrategy,
        launcher: HybridSubprocessLauncher | HybridMultiProcessingLauncher,
    ) -> None:
        self._strategy = strategy
        self._launcher = launcher

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether it can be used in a notebook."""
        return bool(self._launcher.is_interactive_compatible)

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start the other processes of this host, and run a function on all drivers.

        Args:
            function: the user's.
            args: its arguments.
            kwargs: its keyword arguments.

        Returns:
            What the function returns in this process; if it runs in spawned or forked processes
            alone, in the first of them.
        """
        # the arguments are the user's, and may have the names of the launcher's
        called = partial(self._strategy.run_launched, function, args, kwargs)
        return self._launcher.launch(LaunchedFunction(self._strategy, called))
