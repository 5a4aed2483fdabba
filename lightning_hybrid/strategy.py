"""``Trainer(strategy="hybrid_gabra")``: stages within replicas, replicas side by side.

To Lightning the world is that of DDP over the drivers, one per replica. What is below the
strategy does the work: :mod:`lightning_hybrid.config` says what was asked for,
:mod:`lightning_hybrid.world` knows the other ranks, :mod:`lightning_hybrid.session` drives a
replica or serves it, :mod:`lightning_hybrid.planning` decides where stages go.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid._lightning import (
    STEP_OUTPUT,
    Accelerator,
    CheckpointIO,
    ClusterEnvironment,
    LightningModule,
    LightningOptimizer,
    Precision,
    Trainer,
    TrainerStatus,
)
from lightning_hybrid.building import BetweenRuns, DeferredModule, WholeModule, move_module
from lightning_hybrid.checkpoints import with_atomic_writes
from lightning_hybrid.comm.failure import Failure
from lightning_hybrid.comm.signals import restore_handlers
from lightning_hybrid.config import Config, Count, ScheduleName
from lightning_hybrid.errors import HybridError
from lightning_hybrid.pipeline.early import DelayedWeights
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.process.launcher import Parted
from lightning_hybrid.process.results import Results
from lightning_hybrid.process.survey import look_around
from lightning_hybrid.ranks import ReplicaStrategy, given
from lightning_hybrid.refusals import (
    callbacks_allow,
    refuse_accelerator,
    refuse_all_but_plain_sgd,
    refuse_callbacks,
    refuse_layer_sync,
    refuse_optimizers,
    refuse_streaming,
)
from lightning_hybrid.run import Run, scalers_of
from lightning_hybrid.session import DriverSession, WorkerSession
from lightning_hybrid.sizing import SizeChooser
from lightning_hybrid.world import NoWorld, Phase


class HybridGabraStrategy(ReplicaStrategy):
    """Trains replicas of a chain of stages; a genetic algorithm places the stages.

    The LightningModule stays as it is. Its network is found at its first call, traced, cut into
    ``pipeline_parallel_size`` stages and given to the ranks of a replica; ``data_parallel_size``
    replicas average their gradients per stage. The user's code runs on one rank of each replica,
    its driver; to Lightning the world is that of DDP over the drivers.

    Args:
        data_parallel_size: number of replicas. ``"auto"``: devices / stages. If both sizes are
            ``"auto"``, they are chosen by predicted time when a fit is set up, from one batch on a
            copy of the module (:mod:`lightning_hybrid.planning.sizes`); where nothing can be known
            then, all devices form one chain, and a line says why.
        pipeline_parallel_size: number of devices of a replica, which is that of its stages unless
            ``contiguous=False`` or a plan give devices several. ``"auto"``: devices / replicas. A
            network that cannot be cut is refused if a number is given; with ``"auto"`` it runs on
            the driver of each replica.
        num_microbatches: into how many slices a replica's batch is split on its way through the
            stages. ``"auto"``: chosen with the sizes, or, where these are given, enough to fill the
            pipeline twice, at least two samples each.
        schedule: how the devices share their time. ``"gpipe"`` (fill and drain), ``"looped"``
            (several stages per device) and ``"zero_bubble"`` (gradients of weights after those of
            inputs, where that pays) are exact; ``"auto"`` is ``"gpipe"``, or the one of the others
            that suits ``contiguous`` if its step is predicted to be clearly shorter. ``"1f1b"`` is
            exact, too; its micro-batches are the batches of ``accumulate_grad_batches``.
            ``"pipedream"``,
            ``"ddg"``, ``"fdg"`` and ``"akintoye"`` keep all devices busy by computing with weights
            that are some steps old; see ``docs/schedules.md``.
        delayed_weights: what the backward of a batch computes with under these four: the weights of
            its forward (``"stash"``), those of now on its inputs, which run forward again
            (``"recompute"``), or those of now beside the activations of then (``"current"``).
        gradient_shrinking: for ``"fdg"``: what gradients are multiplied with at every cut that
            they cross.
        allocation: ``"gabra"``, ``"exact"``, ``"merging"`` (the most expensive cuts are closed
            first, for equal devices), or cut points: the names of the first module of each next
            stage, as in the LightningModule (``["net.layer3"]``).
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
        schedule: ScheduleName = "auto",
        delayed_weights: DelayedWeights = "stash",
        gradient_shrinking: float = 1.0,
        allocation: Literal["gabra", "exact", "merging"] | list[str] = "gabra",
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
        config = Config.resolve(
            data_parallel_size=data_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            num_microbatches=num_microbatches,
            schedule=schedule,
            delayed_weights=delayed_weights,
            gradient_shrinking=gradient_shrinking,
            allocation=allocation,
            objective=objective,
            contiguous=contiguous,
            network=network,
            device_capacity=device_capacity,
            compile_stages=compile_stages,
            plan=plan,
            log_performance=log_performance,
            seed=seed,
        )
        super().__init__(
            config,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._plans: dict[str, Plan] = {}
        self._building: WholeModule | DeferredModule = WholeModule()
        self._rest()

    @property
    def plan(self) -> Plan | None:
        """The plan in force; of the first network, if there are several. ``None`` before it."""
        return next(iter(self._plans.values()), self._config.plan)

    # ------------------------------------------------------------------ a run

    def _configure_launcher(self) -> None:
        refuse_layer_sync(self._layer_sync, compile_stages=self._config.compile_stages)
        super()._configure_launcher()

    def setup_distributed(self) -> None:
        refuse_accelerator(given(self.accelerator, "accelerator"))
        super().setup_distributed()
        self._rest()
        if self._joined.has_places:
            refuse_callbacks(self._module.trainer, *self._shape())

    @property
    def _module(self) -> LightningModule:
        return given(self.lightning_module, "lightning_module")

    @property
    def _driving(self) -> DriverSession:
        """The run of this driver.

        Raises:
            HybridError: there is none.
        """
        if isinstance(self._session, DriverSession):
            return self._session
        raise HybridError(
            f"{self.coordinates} is in no run: steps and hooks of training are for the drivers, "
            "between the start of trainer.fit, validate, test or predict and its end."
        )

    def _rest(self) -> None:
        self._session: BetweenRuns | DriverSession = BetweenRuns(self._world, self._building)

    def setup(self, trainer: Trainer) -> None:
        """Part: workers leave from here and serve; drivers go on as under DDP."""
        with self._building.building(self._module):
            self.model = self.precision_plugin.convert_module(given(self.model, "model"))
        if not self._joined.has_places:
            self._choose_sizes(trainer)
        run = Run.of(
            trainer,
            self._config,
            self._joined,
            self._building,
            self._plans,
            synchronise=self._layer_sync is not None,
        )
        refuse_streaming(run)
        if not run.world.coordinates.is_driver:
            raise Parted(partial(self._serve, WorkerSession.begin(run)))
        run.world.phase = Phase.RUNNING
        run.accelerator.setup(trainer)
        run.share_weights()
        self.model_to_device()
        self._session = DriverSession.begin(run, partial(self._make_plan, run))
        if run.fitting:
            self.setup_optimizers(trainer)
            scaled = bool(scalers_of(self.precision_plugin))
            refuse_optimizers(self.optimizers, self._shape()[1], scaled=scaled)
            if self._config.streamed is not None and self._config.streamed.plain_sgd:
                refuse_all_but_plain_sgd(self.optimizers, self._config.streamed.name)
        self.setup_precision_plugin()

    def _choose_sizes(self, trainer: Trainer) -> None:
        """Sizes were left to us, and the network is built: choose them, and take a place."""
        world = self._joined
        backend = given(self._process_group_backend, "process_group_backend")
        machine = look_around(
            world.everyone.world, self.root_device, backend, self._config.capacity
        )
        chooser = SizeChooser(trainer, self._config, machine, self.root_device, self._may_have)
        sizes = chooser.on_all_ranks(world, deferred=self._building.deferred)
        if sizes is not None:
            self._config = self._config.with_sizes(sizes)
            self._plans.clear()  # of the chain in which an earlier run has evaluated
        self._start_alike()
        self._take_place(world, machine.devices)
        refuse_callbacks(trainer, *self._shape())

    def _may_have(self, replicas: int, stages: int) -> bool:
        """Whether these sizes may be chosen."""
        return callbacks_allow(self._module.trainer, replicas, stages)

    def _make_plan(self, run: Run, *arguments: Any, chosen: bool) -> Plan:
        """The plan of a network; see :class:`lightning_hybrid.runtime.network_options.Planner`."""
        return run.make_plan(*arguments, chosen=chosen, optimizers=self.optimizers)

    def _serve(self, session: WorkerSession) -> Results:
        """On a worker: obey the driver until the run is over. Returns its results."""
        results = session.serve()
        if session.fitting:
            self.optimizers = session.optimizers
        self._joined.end_run()
        return results

    def finish(self, returned: Any) -> None:
        """On a driver: end the run on its workers too."""
        self._driving.end(returned)
        self._rest()
        self._joined.end_run()

    def fail(self, error: BaseException) -> Failure | None:
        """This rank fails with ``error``: tell the others.

        Returns:
            The failure that came first, on another rank; ``None``: it is this one.
        """
        rank = str(self.coordinates)
        first = self._world.fail(error, rank)
        self._session.fail(first or Failure.of(error, rank), error)
        if self._start_method != "popen":
            self._abort()
        return first

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._abort()

    def _abort(self) -> None:
        self._session.abort()
        self._world.leave()

    def teardown(self) -> None:
        restore_handlers()
        self._world.stop_watching()
        self._session.close()
        super().teardown()
        if self._world.phase is Phase.FAILED:  # nobody is there to hear of a later error
            self._world = NoWorld()
            self._rest()

    # ------------------------------------------------------------------ made in configure_model

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """In ``configure_model``: weights are made by the rank that owns them, when that is known.

        Each rank notes down how they are made; see :mod:`lightning_hybrid.building`.
        """
        building: AbstractContextManager[None] = nullcontext()
        module = self.lightning_module
        if module is not None and self._world.phase is Phase.TOGETHER:
            trainer = module.trainer
            if trainer.state.status == TrainerStatus.RUNNING:
                stages = self._shape()[1]
                self._building = self._building.deferred_if_apart(trainer, self.root_device, stages)
                self._rest()
                building = self._building.building(module)
        with building, super().tensor_init_context(empty_init):
            yield

    # ------------------------------------------------------------------ a step

    def model_to_device(self) -> None:
        """All of it, or only what no network can own."""
        move_module(self._module, self.root_device, all_of_it=self._shape()[1] == 1)

    def process_dataloader(self, dataloader: object) -> object:
        """The train loader may be asked for batches before their turn."""
        dataloader = super().process_dataloader(dataloader)
        if isinstance(self._session, DriverSession):
            return self._session.train_loader(dataloader)
        return dataloader

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Batches that were needed before their turn are there already."""
        move = partial(super().batch_to_device, device=device, dataloader_idx=dataloader_idx)
        if isinstance(self._session, DriverSession):
            return self._session.move_batch(batch, move)
        return move(batch)

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        step: STEP_OUTPUT = self._driving.step(partial(super().training_step, *args, **kwargs))
        return step

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """As in every strategy, and gradients are averaged before any hook sees them."""
        module, precision = self._module, self.precision_plugin
        loss = precision.pre_backward(closure_loss, module)
        self._driving.backward(
            partial(precision.backward, loss, module, optimizer, *args, **kwargs)
        )
        return precision.post_backward(loss, module)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self._driving.accumulating():
            yield

    @property
    def optimizers(self) -> list[Optimizer]:
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        ReplicaStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        if isinstance(self._session, DriverSession):
            self._session.connect_optimizers(optimizers)
            for wrapper, optimizer in zip(self._lightning_optimizers, optimizers):
                # the wrapper inherits zero_grad from its class and would not see the instance's
                vars(wrapper)["zero_grad"] = optimizer.zero_grad

    def on_train_start(self) -> None:
        super().on_train_start()
        self._joined.defer_signals()

    def on_test_start(self) -> None:
        super().on_test_start()
        self._joined.defer_signals()

    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._joined.defer_signals()

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._joined.defer_signals()
        self._driving.validation_starts()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._driving.validation_ends()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._driving.batch_starts(batch)

    def on_train_end(self) -> None:
        super().on_train_end()
        self._driving.training_ends()

    # ------------------------------------------------------------------ checkpoints

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The user's, else one that writes a file whole or not at all."""
        self._checkpoint_io = io = with_atomic_writes(self._checkpoint_io)
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole module's, on the driver of replica 0; the others have nothing to save."""
        return self._session.state_dict(self._module, here=self.is_global_zero)

    def full_state_dict(self) -> dict[str, Any]:
        """The state dict of the whole LightningModule, on rank 0; empty on all other ranks.

        Needed for a network that is made in ``configure_model``: it is whole on no rank. Call it on
        all ranks: in a hook (which run on the drivers), or after ``fit``, ``validate``, ``test`` or
        ``predict``, where every rank has kept its stage.
        """
        return self._session.full_state_dict(self._module, here=self.is_global_zero)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """As on one device, on the driver of replica 0. After a run all ranks call it together."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        return self._session.optimizer_state(self._module, optimizer, here=self.is_global_zero)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """With a network that is whole on no rank, rank 0 alone reads, and all get the rest."""
        read = partial(super().load_checkpoint, checkpoint_path, weights_only)
        return self._building.read_checkpoint(read, self._world)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with self._session.loading(self._module):
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(self._driving.optimizer_states(checkpoint))

    def __getstate__(self) -> dict[str, Any]:
        """Without groups and links: a Trainer can be pickled after a run, and spawned with."""
        state: dict[str, Any] = super().__getstate__()
        ranks, building = NoWorld(), WholeModule()
        session = BetweenRuns(ranks, building)
        return state | {"_world": ranks, "_building": building, "_session": session}
