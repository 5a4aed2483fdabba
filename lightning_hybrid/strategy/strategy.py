"""``Trainer(strategy="hybrid_gabra")``: stages within replicas, replicas side by side.

To Lightning the world is that of DDP over the drivers, one per replica. What is below the strategy
does the work: :mod:`lightning_hybrid.config` says what was asked for, :mod:`lightning_hybrid.run`
knows the other ranks and drives a replica or serves it, :mod:`lightning_hybrid.planning` decides
where stages go.

What Lightning asks a strategy is here as far as it begins or ends a run; what it asks about ranks,
steps and checkpoints has a file each beside this one.
"""

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_hybrid._lightning import (
    Accelerator,
    CheckpointIO,
    ClusterEnvironment,
    Precision,
    Trainer,
    TrainerStatus,
    rank_zero_info,
)
from lightning_hybrid._lightning_private import forget_loaded_checkpoint, load_as_ever
from lightning_hybrid.comm import Failure, backend_on, restore_handlers
from lightning_hybrid.config import Balance, Checkpoint, Config, Count, Replan, Rng, ScheduleName
from lightning_hybrid.driver import bring_here
from lightning_hybrid.planning import Plan, free_bytes, free_of_host
from lightning_hybrid.process import HybridSubprocessLauncher, Parted, Results, has_met, look_around
from lightning_hybrid.run import (
    DriverSession,
    NoWorld,
    Phase,
    Run,
    SizeChooser,
    WorkerSession,
    announce_averages,
    move_module,
    prepared_alone,
    scalers_of,
)
from lightning_hybrid.schedules import DelayedWeights
from lightning_hybrid.strategy.ranks import given
from lightning_hybrid.strategy.refusals import (
    callbacks_allow,
    refuse_accelerator,
    refuse_all_but_plain_sgd,
    refuse_callbacks,
    refuse_copies,
    refuse_interactive,
    refuse_layer_sync,
    refuse_lazy,
    refuse_no_room,
    refuse_optimizers,
    refuse_streaming,
    refuse_version,
)
from lightning_hybrid.strategy.saving import SavingStrategy


class HybridGabraStrategy(SavingStrategy):
    """Trains replicas of a chain of stages, which are placed by predicted time.

    The LightningModule stays as it is. Its network is found at its first call, captured, cut into
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
            ``"pipedream"``, ``"ddg"``, ``"fdg"`` and ``"akintoye"`` keep all devices busy by
            computing with weights that are some steps old; see ``docs/schedules.md``.
        delayed_weights: what the backward of a batch computes with under these four: the weights of
            its forward (``"stash"``), those of now on its inputs, which run forward again
            (``"recompute"``), or those of now beside the activations of then (``"current"``).
        gradient_shrinking: for ``"fdg"``: what gradients are multiplied with at every cut that
            they cross.
        recompute: stages keep their inputs and no activations, and run their forward again for the
            backward: less memory for one forward more, with the same numbers. ``"auto"``: where
            the network fits in no other way, as far as the memory of the devices is known. Where
            sizes are chosen and one stage is the fastest that fits, there is none to do it.
        allocation: ``"gabra"``, ``"exact"``, ``"merging"`` (the most expensive cuts are closed
            first, for equal devices), or cut points: the names of the first module of each next
            stage, as in the LightningModule (``["net.layer3"]``). For contiguous stages and the
            objective ``"step"``, the defaults, ``"gabra"`` and ``"exact"`` stand for a dynamic
            programme; the genetic algorithm GABRA searches with ``contiguous=False``, and for the
            other objectives.
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
            speed-up (Eq. 14) and the plan, and `hybrid_runs.csv` a line for `lightning-hybrid
            fit-model`; :mod:`lightning_hybrid.run.performance_log` defines them.
        verify: which calls of a network are compared with what its own Python gives on a copy of
            it, so that a captured value that has changed unseen ends the run and not its numbers:
            ``"auto"``: calls 1, 2, 4, 8, ... of each kind (with gradients or not, in training mode
            or not); ``n``: the first call and every ``n``-th after it; ``False``: none.
        rng: whose random numbers a network draws (dropout): ``"microbatch"``: each micro-batch has
            generators of its own, so that the numbers are the same for every number of stages;
            ``"device"``: those of one device, whatever the stages and micro-batches. The driver
            then draws the masks of dropout for the whole batch, and sends each micro-batch its
            rows: a byte for each element, across each cut before the layer. What draws in another
            way (attention with ``dropout_p``) takes its batches whole, with a line that names it.
        checkpoint: ``"full"``: a checkpoint is Lightning's ordinary file. ``"sharded"``: it is a
            folder to which each rank writes what it owns, as of Lightning's ``FSDPStrategy`` and
            in the format of `torch.distributed.checkpoint`; any number of replicas and stages goes
            on with it, and `lightning-hybrid consolidate` makes the ordinary file of it.
            ``"sharded_async"``: likewise, from copies that each rank makes of what it owns, while
            training goes on.
        shard_optimizer_states: whether the replicas of a stage divide its optimizer states among
            themselves, as ``ZeroRedundancyOptimizer`` does: each rank keeps those of some whole
            parameters (1/R of their bytes, as far as the sizes of parameters allow), steps these,
            and gets the new weights of the others. The numbers and the ordinary checkpoint are
            those without it. An optimizer that must step as a whole keeps all of its states on each
            replica, with a line that says so.
        balance: whether each replica takes as many samples of a global batch as the others
            (``"equal"``, as under ``ddp``), or a part by the measured speed of its devices
            (``"speed"``), for devices that are not alike. The global batch stays what it is under
            ``ddp``: the loader's batch size for each replica. Every sample is then in one batch of
            an epoch, and gradients are weighted by the samples that they come from, so that they
            are those of one device with the whole batch. A loss that is no mean over samples says
            by ``hybrid_weight(batch) -> float`` in the LightningModule what a batch weighs.
        replan: ``"epoch"``: each epoch is dealt by the speeds that were measured in the one before
            it, so that parts follow a device that becomes slower or was taken for faster than it
            is. Which samples a step has does not change. For ``balance="speed"``.
        seed: of the genetic algorithm.
        accelerator: as in ``DDPStrategy``, like the following arguments.
        parallel_devices: see there.
        cluster_environment: see there.
        checkpoint_io: see there.
        precision_plugin: see there.
        process_group_backend: for tensors between ranks: ``"gloo"`` on CPUs, ``"nccl"`` on CUDA, or
            ``"cpu:gloo,cuda:nccl"``. By default the one for the device.
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
        recompute: bool | Literal["auto"] = "auto",
        allocation: Literal["gabra", "exact", "merging"] | list[str] = "gabra",
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
            recompute=recompute,
            allocation=allocation,
            objective=objective,
            contiguous=contiguous,
            network=network,
            device_capacity=device_capacity,
            compile_stages=compile_stages,
            plan=plan,
            log_performance=log_performance,
            verify=verify,
            rng=rng,
            checkpoint=checkpoint,
            shard_optimizer_states=shard_optimizer_states,
            balance=balance,
            replan=replan,
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
        self._prepared_alone = False

    @property
    def plan(self) -> Plan | None:
        """The plan in force; of the first network, if there are several. ``None`` before it."""
        return next(iter(self._plans.values()), self._config.plan)

    # ------------------------------------------------------------------ a run

    def _configure_launcher(self) -> None:
        refuse_version()
        refuse_layer_sync(self._layer_sync, compile_stages=self._config.compile_stages)
        super()._configure_launcher()
        refuse_interactive(works=given(self._launcher, "launcher").is_interactive_compatible)
        if isinstance(self._launcher, HybridSubprocessLauncher):
            self._launcher.before_start = self._refuse_copies

    def _refuse_copies(self) -> None:
        self._refuse_no_room()
        refuse_copies(self._module, self._per_host - 1, free_of_host())

    def _refuse_no_room(self) -> None:
        if self._shape()[1] > 1 and not has_met():
            refuse_no_room(self._module, free_bytes())

    def setup_distributed(self) -> None:
        refuse_accelerator(given(self.accelerator, "accelerator"))
        load_as_ever(self._module.trainer)
        self._refuse_no_room()
        super().setup_distributed()
        self._rest()
        if self._joined.has_coordinates:
            refuse_callbacks(self._module.trainer, *self._shape())

    def setup(self, trainer: Trainer) -> None:
        """Part: workers leave from here and serve; drivers go on as under DDP."""
        bring_here(self._module)
        with self._building.building(self._module):
            self.model = self.precision_plugin.convert_module(given(self.model, "model"))
        refuse_lazy(self._module)
        self._compare_prepared(trainer)
        if not self._joined.has_coordinates:
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
        self._session = DriverSession.begin(run, partial(self._plan_network, run))
        if run.fitting:
            self.setup_optimizers(trainer)
            if self._shape()[1] > 1:
                announce_averages(trainer, self._module)
            scaled = bool(scalers_of(self.precision_plugin))
            refuse_optimizers(self.optimizers, *self._shape(), scaled=scaled)
            if self._config.streamed is not None and self._config.streamed.plain_sgd:
                refuse_all_but_plain_sgd(self.optimizers, self._config.streamed.name)
        self.setup_precision_plugin()

    def _choose_sizes(self, trainer: Trainer) -> None:
        """Sizes were left to us, and the network is built: choose them, and take coordinates."""
        world = self._joined
        named = given(self._process_group_backend, "process_group_backend")
        backend = backend_on(self.root_device, named)
        machine = look_around(
            world.everyone.world, self.root_device, backend, self._config.capacity
        )
        if self._told_replicas is not None:
            rank_zero_info(
                f"The number of replicas is {self._told_replicas}: {self._asked_for} was asked "
                "before sizes were chosen, and what was made of the answer must stay true. Ask in "
                "train_dataloader or in a later hook, or give data_parallel_size."
            )
        chooser = SizeChooser(
            trainer, self._config, machine, self.root_device, self._may_have, self._supposing
        )
        sizes = chooser.on_all_ranks(world, deferred=self._building.deferred)
        if sizes is not None:
            self._config = self._config.with_sizes(sizes)
            self._plans.clear()  # of the chain in which an earlier run has evaluated
        self._start_alike()
        self._take_coordinates(world, machine)
        refuse_callbacks(trainer, *self._shape())

    def _compare_prepared(self, trainer: Trainer) -> None:
        """What ``prepare_data`` has set on rank 0 alone, drivers of other replicas do not have."""
        is_open = not self._joined.has_coordinates
        self._prepared_alone = False
        if is_open or self.num_replicas > 1:
            names = prepared_alone(trainer, self._joined)
            self._prepared_alone = bool(names)
            if names:
                rank_zero_info(
                    f"prepare_data has set {', '.join(names)} on rank 0 alone, where it runs (as "
                    "under DDP): the other replicas do not have it"
                    f"{', so there is one' if is_open else ''}. Set it in setup, which runs on all "
                    "ranks."
                )

    def _may_have(self, replicas: int, stages: int) -> bool:
        """Whether these sizes may be chosen."""
        if self._told_replicas not in (None, replicas) or (self._prepared_alone and replicas > 1):
            return False
        return callbacks_allow(self._module.trainer, replicas, stages)

    def _plan_network(self, run: Run, *arguments: Any, **how: Any) -> Plan:
        """The plan of a network; see :class:`lightning_hybrid.driver.network_options.Planner`."""
        return run.plan_network(*arguments, **how, optimizers=self.optimizers)

    def _serve(self, session: WorkerSession) -> Results:
        """On a worker: obey the driver until the run is over. Returns its results."""
        forget_loaded_checkpoint(self._module.trainer)
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
        ours = self._world.phase is Phase.TOGETHER and isinstance(error, Exception)
        if ours and self.global_rank >= self.num_replicas:
            error.add_note(
                "(Hooks before the training run on workers too. To them trainer.global_rank, here "
                f"{self.global_rank}, is not below trainer.world_size, {self.num_replicas}: shard "
                "data by these in train_dataloader, which drivers alone run.)"
            )
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
        self._saves.give_up()
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

        Each rank notes down how they are made; see :mod:`lightning_hybrid.run.building`.
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

    def model_to_device(self) -> None:
        """All of it, or only what no network can own."""
        move_module(self._module, self.root_device, all_of_it=self._shape()[1] == 1)
