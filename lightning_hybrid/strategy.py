"""``Trainer(strategy="hybrid_gabra")``: stages within replicas, replicas side by side.

To Lightning the world is that of DDP over the drivers, one per replica. What is below the
strategy does the work: :mod:`lightning_hybrid.runtime` runs the stages,
:mod:`lightning_hybrid.planning` decides where they go.
"""

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator
from lightning.pytorch.callbacks import BatchSizeFinder, ModelPruning, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import CheckpointIO, MixedPrecision, Precision
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_hybrid.checkpoints import AtomicCheckpointIO
from lightning_hybrid.comm.collectives import broadcast_object, meet
from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.comm.failure import Failure
from lightning_hybrid.comm.hosts import choose_interface
from lightning_hybrid.comm.mesh import Mesh
from lightning_hybrid.comm.signals import make_deferrable, restore_handlers, run_pending
from lightning_hybrid.compat import replace_unscaling, unscales_by_itself
from lightning_hybrid.compat_lightning import WrappingCheckpointIO, set_module_device
from lightning_hybrid.errors import PlanError
from lightning_hybrid.launcher import (
    HybridMultiProcessingLauncher,
    HybridSubprocessLauncher,
    Parted,
)
from lightning_hybrid.network.deferred import Deferral
from lightning_hybrid.performance_log import PerformanceLog
from lightning_hybrid.planning.cluster import Cluster, given_speeds
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.planning.planner import PlanSettings, make_plan
from lightning_hybrid.results import Results, Snapshot, adopt_results, collect_results
from lightning_hybrid.runtime.batchnorm import Synchronised
from lightning_hybrid.runtime.discovery import Discovery, Networks
from lightning_hybrid.runtime.driver import Driver
from lightning_hybrid.runtime.engine import StageOptions
from lightning_hybrid.runtime.faults import (
    Watch,
    first_fault,
    is_loss,
    read_fault,
    say_at_next_meeting,
)
from lightning_hybrid.runtime.joining import Meeting, forget, join
from lightning_hybrid.runtime.large import (
    Unfilled,
    gather_after_run,
    gather_optimizer_after_run,
    make_what_no_network_owns,
    outline,
    whole,
)
from lightning_hybrid.runtime.performance import Stopwatch
from lightning_hybrid.runtime.replicas import broadcast_module
from lightning_hybrid.runtime.survey import survey
from lightning_hybrid.runtime.worker import Worker

NAMES = {
    "hybrid_gabra": "popen",
    "hybrid_gabra_spawn": "spawn",
    "hybrid_gabra_fork": "fork",
    "hybrid_gabra_notebook": "fork",
}
"""Registered names, and how each starts its processes."""

_BUSY, _DEVICE = "busy_s", "device"  # reports of workers

T = TypeVar("T")
Count = int | Literal["auto"]


class _Phase(Enum):
    """Whom a barrier or a broadcast speaks to."""

    TOGETHER = "all ranks: before the setup of a run, and after its end"
    RUNNING = "the drivers"
    ALONE = "nobody: this driver handles a signal, and others may wait for it"
    FAILED = "nobody: the others may be gone"


class HybridGabraStrategy(DDPStrategy):
    """Trains replicas of a chain of stages; a genetic algorithm places the stages.

    The LightningModule stays as it is. Its network is found at its first call, traced, cut into
    ``pipeline_parallel_size`` stages and given to the ranks of a replica; ``data_parallel_size``
    replicas average their gradients per stage. The user's code runs on one rank of each replica,
    its driver; to Lightning the world is that of DDP over the drivers.

    Args:
        data_parallel_size: number of replicas. ``"auto"``: devices / stages.
        pipeline_parallel_size: number of devices of a replica, which is that of its stages unless
            ``contiguous=False`` or a plan give devices several. ``"auto"``: devices / replicas, so
            that without any sizes all devices form one chain. A network that cannot be cut is
            refused if a number is given; with ``"auto"`` it runs on the driver of each replica.
        num_microbatches: into how many slices a replica's batch is split on its way through the
            stages. ``"auto"``: enough to fill the pipeline twice, at least two samples each.
        schedule: ``"gpipe"`` (fill and drain), which is also ``"auto"``.
        allocation: ``"gabra"``, ``"exact"``, or cut points: the names of the first module of each
            next stage, as in the LightningModule (``["net.layer3"]``).
        objective: ``"step"``, the predicted time of a step; ``"makespan"``, the slowest device's
            time; or ``"profit"``, Eq. 5 of Akintoye et al. 2022 (constant on equal devices; kept
            for comparison).
        contiguous: whether each device gets one run of the network, as in ``allocate``. ``False``:
            GABRA may give a device several, each of which is a stage.
        network: dotted name(s) of the module(s) to cut. ``None``: found.
        device_capacity: relative speeds of the devices, one per rank; ``"auto"``: measured on all
            ranks at the start of a run (a third of a second), if there is something to decide.
        compile_stages: run each stage through ``torch.compile``. The first steps take longer
            (a minute or so per stage on a CPU); the module, its hooks and its checkpoints stay
            what they are.
        plan: a :class:`Plan` or a path to one; skips profiling and search.
        log_performance: whether the loggers get the time of a step, the throughput, the bubble, the
            speed-up (Eq. 14) and the plan; :mod:`lightning_hybrid.performance_log` defines them.
        seed: of the genetic algorithm.
        accelerator: as in ``DDPStrategy``, like the following arguments.
        parallel_devices: see there.
        cluster_environment: see there.
        checkpoint_io: see there.
        precision_plugin: see there.
        process_group_backend: for tensors between ranks; by default gloo on CPUs, NCCL on CUDA.
        timeout: of tensors between ranks.
        start_method: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.

    Raises:
        PlanError: the sizes contradict each other, the plan or the number of devices.

    References:
        Akintoye et al., "A Hybrid Parallelization Approach for Distributed and Scalable Deep
        Learning", IEEE Access 10:77950, 2022.
    """

    def __init__(
        self,
        data_parallel_size: Count = "auto",
        pipeline_parallel_size: Count = "auto",
        num_microbatches: Count = "auto",
        schedule: Literal["auto", "gpipe"] = "auto",
        allocation: Literal["gabra", "exact"] | list[str] = "gabra",
        objective: Literal["step", "makespan", "profit"] = "step",
        contiguous: bool = True,
        network: str | list[str] | None = None,
        device_capacity: Literal["auto"] | Sequence[float] = "auto",
        compile_stages: bool = False,
        plan: Plan | str | Path | None = None,
        log_performance: bool = False,
        seed: int = 0,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        self._driver: Driver | None = None  # read by the setter of `optimizers`
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._given_plan = Plan.load(plan) if isinstance(plan, str | Path) else plan
        self._sizes = self._check_sizes(data_parallel_size, pipeline_parallel_size)
        if num_microbatches != "auto" and num_microbatches < 1:
            raise PlanError(f"num_microbatches={num_microbatches} must be at least 1 or 'auto'.")
        self._microbatches = None if num_microbatches == "auto" else num_microbatches
        names = [network] if isinstance(network, str) else network
        self._names = None if names is None else tuple(names)
        self._settings = PlanSettings(
            schedule="gpipe" if schedule == "auto" else schedule,
            allocation=allocation if isinstance(allocation, str) else tuple(allocation),
            objective=objective,
            seed=seed,
            contiguous=contiguous,
        )
        if not (contiguous or isinstance(allocation, str)):
            raise PlanError(
                f"allocation={allocation} are cut points, which give each device one stage, and "
                "contiguous=False lets GABRA give it several. Leave one of them out, or give "
                "plan=Plan(..., devices=...), which says where each stage goes."
            )
        self._capacity = None if device_capacity == "auto" else tuple(device_capacity)
        self._compile_stages = compile_stages
        self._plans: dict[str, Plan] = {}
        self._deferral: Deferral | None = None
        self._outlined = False  # the checkpoint that is being loaded is an outline
        self._statistics: AbstractContextManager[Any] = nullcontext()
        self._failure = Failure("this rank has failed")
        self._salvages = False  # whether the workers can be asked for their weights
        self._phase = _Phase.TOGETHER
        self._mesh: Mesh | None = None
        self._cluster: Cluster | None = None
        self._networks: Networks | None = None
        self._watch: Watch | None = None
        self._before: Snapshot | None = None
        self._log_performance = log_performance
        self._stopwatch: Stopwatch | None = None
        self._performance: PerformanceLog | None = None

    # ------------------------------------------------------------------ sizes, ranks

    def _check_sizes(self, replicas: Count, stages: Count) -> tuple[int | None, int | None]:
        for name, value in (
            ("data_parallel_size", replicas),
            ("pipeline_parallel_size", stages),
        ):
            if value != "auto" and (not isinstance(value, int) or value < 1):
                raise PlanError(f"{name}={value!r} must be a positive number or 'auto'.")
        plan = self._given_plan
        if plan is None:
            return (
                None if replicas == "auto" else replicas,
                None if stages == "auto" else stages,
            )
        size = plan.devices_per_replica
        if replicas not in ("auto", plan.replicas) or stages not in ("auto", size):
            what = "stages" if size == plan.stages else f"devices with {plan.stages} stages"
            raise PlanError(
                f"data_parallel_size={replicas} x pipeline_parallel_size={stages} contradict the "
                f"plan: {plan.replicas} replicas x {size} {what}. Give one or the other."
            )
        return plan.replicas, size

    @property
    def _is_free(self) -> bool:
        """Whether a device may have several stages."""
        plan = self._given_plan
        if plan is not None:
            return plan.devices != (*range(1, plan.stages), 0)
        return not self._settings.contiguous

    def _shape(self) -> tuple[int, int]:
        """Replicas and devices of each, for the devices that there are."""
        devices = self.num_nodes * self.num_processes
        replicas, stages = self._sizes
        if stages is None:
            stages = devices // (replicas or 1)
        if replicas is None:
            replicas = devices // max(stages, 1)
        if replicas * stages != devices:
            raise PlanError(
                f"data_parallel_size({replicas}) x pipeline_parallel_size({stages}) = "
                f"{replicas * stages} != {devices} devices"
                f"{f' ({self.num_nodes} nodes)' if self.num_nodes > 1 else ''}: the number of "
                f"devices must be divisible by the number of stages. Set Trainer(devices=...) to a "
                f"multiple of {self._sizes[1] or self._sizes[0]}, or change the sizes."
            )
        return replicas, stages

    @property
    def coordinates(self) -> Coordinates:
        """Where this rank stands in the mesh of replicas and stages."""
        if self._mesh is not None:  # ranks may have got others
            return self._mesh.coordinates
        return self._own_coordinates

    @property
    def _own_coordinates(self) -> Coordinates:
        """Those of this rank before a survey of the devices."""
        environment = self.cluster_environment
        return self._coordinates_at(environment.global_rank() if environment else 0)

    def coordinates_of(self, local_rank: int) -> Coordinates:
        """Those of a process of this host, before a survey of the devices."""
        environment = self.cluster_environment
        node = environment.node_rank() if environment else 0
        return self._coordinates_at(node * self.num_processes + local_rank)

    def _coordinates_at(self, rank: int) -> Coordinates:
        return Coordinates(rank, *self._shape(), free=self._is_free)

    @property
    def plan(self) -> Plan | None:
        """The plan in force; of the first network, if there are several. ``None`` before it."""
        return next(iter(self._plans.values()), self._given_plan)

    @property
    def num_replicas(self) -> int:
        """Over how many replicas the data is divided: what ``world_size`` is under DDP."""
        return self._shape()[0]

    @property
    def world_size(self) -> int:
        # Lightning's handler of SIGTERM would wait for the other drivers
        return 1 if self._phase is _Phase.ALONE else self.num_replicas

    @property
    def is_distributed(self) -> bool:
        """Whether the data is divided: with one replica it is not, whatever its stages."""
        return self.num_replicas > 1

    @property
    def global_rank(self) -> int:
        return self.coordinates.lightning_rank if self.parallel_devices else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_replicas, "rank": self.coordinates.dp_rank}

    # ------------------------------------------------------------------ processes and groups

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``hybrid_gabra`` and its variants."""
        for name, start_method in NAMES.items():
            strategy_registry.register(
                name,
                cls,
                description=f"Stages placed by GABRA, in replicas (start method {start_method})",
                override=True,
                start_method=start_method,
            )

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        # complain now, before any process is started
        self._shape()
        if self._capacity is not None:
            given_speeds(self._capacity, self.num_nodes * self.num_processes)
        self._refuse_what_cannot_work()
        if self._start_method == "popen":
            self._launcher = HybridSubprocessLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )
        else:
            self._launcher = HybridMultiProcessingLauncher(self, self._start_method)

    def setup_distributed(self) -> None:
        if not isinstance(self.accelerator, CPUAccelerator | CUDAAccelerator):
            raise PlanError(
                f"hybrid_gabra runs on CPUs and CUDA devices, not on "
                f"{type(self.accelerator).__name__}. Use Trainer(accelerator='cpu' | 'cuda')."
            )
        if self.num_replicas > 1:  # drivers start alike, as under DDP; one goes on like one device
            reset_seed()
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        environment, coordinates = self.cluster_environment, self._own_coordinates
        assert environment is not None
        agent_serves = (
            isinstance(environment, TorchElasticEnvironment)
            and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        )
        address, port = environment.main_address, environment.main_port
        choose_interface(address, port, self.num_nodes)
        joined = join(
            coordinates,
            Meeting(address, port, self.num_nodes, coordinates.rank == 0 and not agent_serves),
            backend=self._process_group_backend,
            timeout=self._timeout or timedelta(minutes=30),
            device=self.root_device,
            survey=self._survey if self._is_open else None,
            capacity=self._capacity,
        )
        self._mesh, self._cluster = joined.mesh, joined.cluster
        self._watch = Watch(str(self._mesh.coordinates), self._mesh.store)
        if self._cluster is not None:
            self.set_world_ranks()
        self._mesh.init_default_group(self._process_group_backend, self.root_device)
        self._phase = _Phase.TOGETHER
        assert self.lightning_module is not None
        self._refuse_callbacks(self.lightning_module.trainer)

    @property
    def _is_open(self) -> bool:
        """Whether there is anything to decide for which devices must be known."""
        given = self._given_plan is not None or not isinstance(self._settings.allocation, str)
        return self._shape()[1] > 1 and (self._capacity is not None or not given)

    def _survey(self, world: Any) -> Cluster:
        return survey(world, self.root_device, *self._shape(), self._capacity)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._phase is _Phase.RUNNING:
            super().barrier(*args, **kwargs)
        elif self._phase is _Phase.TOGETHER and self._mesh is not None:
            self._meet(self._mesh)

    def broadcast(self, obj: T, src: int = 0) -> T:
        if self._phase is _Phase.RUNNING:
            return super().broadcast(obj, src)
        if self._phase is _Phase.TOGETHER and self._mesh is not None:
            self._meet(self._mesh)
            value: T = broadcast_object(self._mesh.world, obj, src)
            return value
        return obj

    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """One replica is one device, whose tensors get no dimension of devices."""
        if self.num_replicas == 1:
            return tensor
        return super().all_gather(tensor, group, sync_grads)

    @staticmethod
    def _meet(mesh: Mesh) -> None:
        if not meet(mesh.world):
            raise read_fault(mesh).exception()

    # ------------------------------------------------------------------ a run

    def setup(self, trainer: Trainer) -> None:
        """Part: workers leave from here and serve; drivers go on as under DDP."""
        assert self.accelerator is not None
        assert self._mesh is not None
        assert self.model is not None
        assert self.lightning_module is not None
        with self._building():
            self.model = self.precision_plugin.convert_module(self.model)
        self._stopwatch = Stopwatch(self.root_device) if self._log_performance else None
        self._before = Snapshot(trainer)
        if not self._mesh.coordinates.is_driver:
            raise Parted
        self._phase = _Phase.RUNNING
        self.accelerator.setup(trainer)
        assert self._mesh.drivers is not None
        make_what_no_network_owns(self.lightning_module)
        broadcast_module(self.lightning_module, self._mesh.drivers)
        fitting = trainer.state.fn == TrainerFn.FITTING
        options = self._stage_options(fitting)
        self._statistics = Synchronised(options.statistics) if options.statistics else nullcontext()
        self.model_to_device()
        seed = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))
        seed = broadcast_object(self._mesh.drivers, seed)
        self._driver = Driver(
            self.lightning_module,
            self._mesh,
            self.root_device,
            seed,
            options,
            self._stopwatch,
            share=self._deferral is not None,
            say=rank_zero_info,
        )
        self._networks = Networks(
            self.lightning_module,
            self._driver,
            self._mesh,
            Discovery(
                self._names,
                self._microbatches,
                self._make_plan,
                training=fitting,
                compiled=self._compile_stages,
                automatic=self._sizes[1] is None,
                say=rank_zero_info,
            ),
            self._plans,
        )
        self._observe(trainer, fitting)
        if fitting:
            self.setup_optimizers(trainer)
            self._refuse_optimizers()
        self.setup_precision_plugin()
        # clipping by a norm needs the gradients of all stages
        vars(self.precision_plugin).update(
            clip_grad_by_norm=self._driver.clip_norm, clip_grad_by_value=self._driver.clip_values
        )
        if (scaler := self._scaler) is not None and self._shape()[1] > 1:
            replace_unscaling(scaler, self._driver.unscale)

    @property
    def _scaler(self) -> GradScaler | None:
        plugin = self.precision_plugin
        return plugin.scaler if isinstance(plugin, MixedPrecision) else None

    def _stage_options(self, fitting: bool) -> StageOptions:
        """On every rank alike: it may make a group."""
        assert self._mesh is not None
        share = fitting and self._layer_sync is not None and self.num_replicas > 1
        return StageOptions(self._compile_stages, self._mesh.statistics() if share else None)

    def _observe(self, trainer: Trainer, fitting: bool) -> None:
        """Let callbacks see the devices of the workers too, and measure if that is asked for."""
        if self._shape()[1] > 1:
            vars(self.accelerator)["get_device_stats"] = self._device_stats
        if self._stopwatch is not None and fitting and self.is_global_zero:
            self._performance = PerformanceLog(
                trainer, self._plans, self.num_replicas, self._read_busy_s
            )

    def _read_busy_s(self) -> list[float]:
        assert self._driver is not None
        assert self._stopwatch is not None
        return [*self._driver.reports(_BUSY), self._stopwatch.read()]

    def _own_device_stats(self) -> dict[str, Any]:
        assert self.accelerator is not None
        return type(self.accelerator).get_device_stats(self.accelerator, self.root_device)

    def _device_stats(self, device: Any) -> dict[str, Any]:
        """What DeviceStatsMonitor logs: the driver's, and each worker's by its stage or device."""
        assert self._driver is not None
        stats = self._own_device_stats()
        for stage, others in enumerate(self._driver.reports(_DEVICE)):
            worker = f"device{stage + 1}" if self._is_free else f"stage{stage}"
            stats |= {f"{worker}.{name}": value for name, value in others.items()}
        return stats

    def _make_plan(self, *arguments: Any, chosen: bool) -> Plan:
        if self._given_plan is not None and not chosen:
            return self._given_plan
        replicas, stages = self._shape()
        assert self._process_group_backend is not None
        assert self._mesh is not None
        assert self.lightning_module is not None
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        return make_plan(
            *arguments,
            settings=replace(self._settings, allocation="exact") if chosen else self._settings,
            replicas=replicas,
            stages=stages,
            backend=self._process_group_backend,
            device=self.root_device,
            cluster=self._cluster,
            optimizers=self.optimizers if fitting else None,
        )

    def _refuse_what_cannot_work(self) -> None:
        if self._layer_sync is not None and not isinstance(self._layer_sync, TorchSyncBatchNorm):
            raise PlanError(
                f"{type(self._layer_sync).__name__} replaces modules, and hybrid_gabra cannot know "
                "which ranks they speak to. Use Trainer(sync_batchnorm=True), which takes batch "
                "statistics over the replicas of each stage."
            )
        if self._layer_sync is not None and self._compile_stages:
            raise PlanError(
                "sync_batchnorm=True and compile_stages=True do not go together: torch.compile "
                "does not follow the exchange of statistics. Leave one of them out."
            )

    def _refuse_callbacks(self, trainer: Trainer) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        replicas, stages = self._shape()
        for callback in callbacks:
            name = type(callback).__name__
            if isinstance(callback, BatchSizeFinder) and replicas > 1:
                raise PlanError(
                    f"{name} tries batches until one does not fit, and {replicas} replicas would "
                    "not agree on which. Look for the size with data_parallel_size=1 on "
                    f"{stages} device{'s' if stages > 1 else ''}, then train with it."
                )
            if isinstance(callback, ModelPruning) and stages > 1:
                raise PlanError(
                    f"{name} replaces parameters by others while they are trained on other ranks. "
                    "Prune the trained network with torch.nn.utils.prune after fit, or use "
                    "pipeline_parallel_size=1."
                )

    def _refuse_optimizers(self) -> None:
        for optimizer in self.optimizers:
            if self._scaler is not None and unscales_by_itself(optimizer) and self._shape()[1] > 1:
                raise PlanError(
                    f"{type(optimizer).__name__}(fused=True) takes the loss scale into its step, "
                    "and each stage would decide by itself whether to skip it. With "
                    "precision='16-mixed' use fused=False."
                )

    def serve(self) -> Results:
        """On a worker: obey the driver until the run is over. Returns its results."""
        assert self.lightning_module is not None
        assert self._mesh is not None
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        options = self._stage_options(fitting)
        reports: dict[str, Callable[[], Any]] = {_DEVICE: self._own_device_stats}
        if self._stopwatch is not None:
            reports[_BUSY] = self._stopwatch.read
        worker = Worker(
            self.lightning_module, self._mesh, self.root_device, options, self._stopwatch, reports
        )
        self._stop_watching()  # what becomes of its driver, a worker hears from it
        results: Results = worker.serve()
        self._plans.update(results.plans)
        self.lightning_module.cpu()
        if fitting:
            for optimizer in worker.optimizers:
                state = move_data_to_device(dict(optimizer.state), torch.device("cpu"))
                optimizer.state.update(state)
            self.optimizers = worker.optimizers
        assert self._before is not None
        adopt_results(self.lightning_module.trainer, results, self._before)
        self._part_from_all()
        return results

    # ------------------------------------------------------------------ made in configure_model

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """In ``configure_model``: weights are made by the rank that owns them, when that is known.

        Each rank notes down how they are made; see :mod:`lightning_hybrid.network.deferred`.
        """
        module = self.lightning_module
        if self._phase is _Phase.TOGETHER and self._mesh is not None and module is not None:
            running = module.trainer.state.status == TrainerStatus.RUNNING
            # a callback that averages weights needs all of them on its rank
            callbacks: list[Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
            whole = any(isinstance(callback, WeightAveraging) for callback in callbacks)
            if running and self._shape()[1] > 1 and self._deferral is None and not whole:
                self._deferral = Deferral(self.root_device)
            building = self._building() if running else nullcontext()
        else:
            building = nullcontext()
        with building, super().tensor_init_context(empty_init):
            yield

    def _building(self, *, loading: bool = False) -> AbstractContextManager[None]:
        """Inside, what is done to weights that are not made yet is noted down."""
        if self._deferral is None:
            return nullcontext()
        assert self.lightning_module is not None
        return self._deferral.building(self.lightning_module, loading=loading)

    def full_state_dict(self) -> dict[str, Any]:
        """The state dict of the whole LightningModule, on rank 0; empty on all other ranks.

        Needed for a network that is made in ``configure_model``: it is whole on no rank. Call it on
        all ranks: in a hook (which run on the drivers), or after ``fit``, ``validate``, ``test`` or
        ``predict``, where every rank has kept its stage.
        """
        assert self.lightning_module is not None
        if self._driver is not None:
            return self.lightning_module_state_dict()
        values = {} if self._mesh is None else gather_after_run(self.lightning_module, self._mesh)
        if not self.is_global_zero:
            return {}
        with whole(self.lightning_module, values):
            state: dict[str, Any] = self.lightning_module.state_dict()
            return state

    def finish(self, returned: Any) -> None:
        """On a driver: end the run on its workers too."""
        assert self._driver is not None
        assert self._before is not None
        assert self.lightning_module is not None
        results = collect_results(self.lightning_module.trainer, returned, self._before)
        results.plans.update(self._plans)
        self._driver.end(results, weights=results.state.fn == TrainerFn.FITTING)
        self._driver = self._networks = None
        self._part_from_all()

    def _part_from_all(self) -> None:
        """The end of a run, on all ranks: no script ends, and no store with it, while others run.

        One replica may predict for longer than the others.
        """
        assert self._mesh is not None
        self._phase = _Phase.TOGETHER
        self._meet(self._mesh)

    def fail(self, error: BaseException) -> Failure | None:
        """This rank fails with ``error``: tell the others.

        Returns:
            The failure that came first, on another rank; ``None``: it is this one.
        """
        self._stop_watching()
        rank = str(self.coordinates)
        first = first_fault(self._mesh, error, rank)
        self._failure = first or Failure.of(error, rank)
        if first is None and self._phase is _Phase.TOGETHER and not is_loss(error):
            say_at_next_meeting(self._mesh)
        if self._mesh is not None and not self.coordinates.is_driver:
            self._mesh.say_goodbye(self._failure)
        # whoever presses Ctrl-C may do so because a worker does not answer
        self._salvages = isinstance(error, Exception) and not is_loss(error)
        if self._start_method != "popen":
            self._abort_workers()
        self._phase = _Phase.FAILED
        return first

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._abort_workers()

    def _abort_workers(self) -> None:
        if self._driver is not None:
            assert self.lightning_module is not None
            if self._salvages and self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
                self._salvages = False
                with suppress(Exception):  # the first error is what counts
                    self._driver.salvage()
            self._driver.abort(self._failure)
        self._phase = _Phase.FAILED
        forget()

    def teardown(self) -> None:
        assert self.lightning_module is not None
        restore_handlers()
        self._stop_watching()
        if self._networks is not None:
            self._networks.close()
        if self._driver is not None:
            state = self.lightning_module.trainer.state
            went_well = state.status != TrainerStatus.INTERRUPTED
            if went_well and state.fn == TrainerFn.FITTING and self._phase is _Phase.RUNNING:
                self._driver.check()
                self._driver.broadcast_buffers()
                self._driver.gather_weights()
            self._driver.close()
            vars(self.accelerator).pop("get_device_stats", None)
            self._performance = None
            vars(self.precision_plugin).pop("clip_grad_by_norm", None)
            vars(self.precision_plugin).pop("clip_grad_by_value", None)
            if self._scaler is not None:
                replace_unscaling(self._scaler, None)
        super().teardown()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.close()

    # ------------------------------------------------------------------ a step

    def model_to_device(self) -> None:
        """One stage: the whole module moves. More: only what no network can own.

        Modules with parameters wait on the CPU until they are called for the first time.
        """
        module = self.lightning_module
        assert module is not None
        if self._shape()[1] == 1:
            module.to(self.root_device)
            return
        for part in module.modules():
            if part is not module and next(part.parameters(), None) is None:
                part.to(self.root_device)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.data = tensor.data.to(self.root_device)
        set_module_device(module, self.root_device)

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        assert self._driver is not None
        assert self._networks is not None
        module = self.lightning_module
        assert module is not None
        self._driver.begin_step(module.trainer.fit_loop.epoch_loop.total_batch_idx)
        with self._statistics:
            output = super().training_step(*args, **kwargs)
        if output is not None:
            self._networks.require()
        return output

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """As in every strategy, and gradients are averaged before any hook sees them."""
        assert self._driver is not None
        assert self.lightning_module is not None
        module, precision = self.lightning_module, self.precision_plugin
        closure_loss = precision.pre_backward(closure_loss, module)
        self._driver.before_backward()
        with self._statistics:  # activation checkpointing runs layers again here
            precision.backward(closure_loss, module, optimizer, *args, **kwargs)
        self._driver.after_backward()
        if not self.is_global_zero and self._driver.synchronize:
            run_pending(hold=True)  # the first driver has been here too
        return precision.post_backward(closure_loss, module)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        assert self._driver is not None
        self._driver.synchronize = False
        try:
            yield
        finally:
            self._driver.synchronize = True

    @property
    def optimizers(self) -> list[Optimizer]:
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        DDPStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        if self._driver is not None:
            self._driver.connect_optimizers(optimizers)
            for wrapper, optimizer in zip(self._lightning_optimizers, optimizers):
                # the wrapper inherits zero_grad from its class and would not see the instance's
                vars(wrapper)["zero_grad"] = optimizer.zero_grad

    @contextmanager
    def _alone(self) -> Iterator[None]:
        before, self._phase = self._phase, _Phase.ALONE
        try:
            yield
        finally:
            self._phase = before

    def _defer_signals(self) -> None:
        make_deferrable(self._alone)
        run_pending(hold=False)

    def on_train_start(self) -> None:
        super().on_train_start()
        self._defer_signals()

    def on_test_start(self) -> None:
        super().on_test_start()
        self._defer_signals()

    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._defer_signals()

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._defer_signals()
        assert self._driver is not None
        self._driver.broadcast_buffers()
        if self._performance is not None:
            self._performance.pause()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self._performance is not None:
            self._performance.resume()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if not self.is_global_zero:
            run_pending(hold=True)
        if self._performance is not None:
            self._performance.batch_starts(batch)

    def on_train_end(self) -> None:
        super().on_train_end()
        run_pending(hold=False)
        if self._performance is not None:
            self._performance.end()

    # ------------------------------------------------------------------ checkpoints

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The user's, else one that writes a file whole or not at all."""
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        elif isinstance(self._checkpoint_io, WrappingCheckpointIO):
            # as in Lightning: one that was made around another keeps that one
            self._checkpoint_io.checkpoint_io = AtomicCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole module's, on the driver of replica 0; the others have nothing to save."""
        assert self.lightning_module is not None
        if self._driver is None:
            if self._deferral is not None:
                return self.full_state_dict()
            return self.lightning_module.state_dict() if self.is_global_zero else {}
        if self._phase is _Phase.RUNNING:  # else a callback saves what is left after a failure
            self._driver.check()
            self._driver.broadcast_buffers()
        if not self.is_global_zero:
            return {}
        with self._driver.whole():
            return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """As on one device, on the driver of replica 0. After a run all ranks call it together."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if self._driver is None and self._mesh is not None:
            assert self.lightning_module is not None
            return gather_optimizer_after_run(self.lightning_module, optimizer, self._mesh)
        return optimizer.state_dict() if self.is_global_zero else {}

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """With a network that is whole on no rank, rank 0 alone reads, and all get the rest."""
        self._outlined = False
        if self._deferral is None or self._phase is not _Phase.TOGETHER:
            return super().load_checkpoint(checkpoint_path, weights_only)
        checkpoint = None
        if self.coordinates.rank == 0:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        outlined = self.broadcast(None if checkpoint is None else outline(checkpoint))
        assert outlined is not None
        self._outlined = checkpoint is None
        return checkpoint or outlined

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._outlined:
            with self._building(), Unfilled():  # type: ignore[no-untyped-call]
                super().load_model_state_dict(checkpoint, strict=strict)
            return
        if self._driver is None:
            with self._building(loading=True):
                super().load_model_state_dict(checkpoint, strict=strict)
            return
        with self._driver.remote.suspended(), self._building(loading=True):
            super().load_model_state_dict(checkpoint, strict=strict)
        self._driver.scatter_weights()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._driver is not None
        if self._deferral is not None:
            self._driver.expect_optimizers()
        if self._outlined:
            states = [{**state, "state": {}} for state in checkpoint["optimizer_states"]]
            checkpoint = {**checkpoint, "optimizer_states": states}
        super().load_optimizer_state_dict(checkpoint)

    def __getstate__(self) -> dict[str, Any]:
        """Without groups and links: a Trainer can be pickled after a run, and spawned with."""
        state: dict[str, Any] = super().__getstate__()
        return state | {
            "_driver": None,
            "_networks": None,
            "_mesh": None,
            "_cluster": None,
            "_watch": None,
            "_stopwatch": None,
            "_performance": None,
            "_statistics": nullcontext(),
            "_deferral": None,
        }
