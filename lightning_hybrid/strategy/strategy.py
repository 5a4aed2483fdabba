"""``Trainer(strategy="hybrid_gabra")``: stages within replicas, replicas side by side.

Lightning is told of a world like that of DDP over the drivers, one per replica. The class has the
methods that Lightning calls on a strategy; other modules do the work. The user's options are in
:mod:`lightning_hybrid.config`, ranks and sizes in :mod:`lightning_hybrid.strategy.ranks`, and a
session of :mod:`lightning_hybrid.run` drives a replica. What does not go together with stages is
refused in :mod:`lightning_hybrid.strategy.refusals`.
"""

from collections.abc import Collection, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid._lightning import (
    CHOSEN_MODULE,
    STEP_OUTPUT,
    Accelerator,
    CheckpointIO,
    ClusterEnvironment,
    DDPStrategy,
    LightningModule,
    LightningOptimizer,
    Precision,
    Trainer,
    TrainerStatus,
)
from lightning_hybrid._lightning_private import (
    ask_strategy_whether_distributed,
)
from lightning_hybrid.comm import Failure, restore_handlers
from lightning_hybrid.config import (
    Config,
    Count,
    RngScope,
    ScheduleName,
    StageCounts,
    read_plan,
)
from lightning_hybrid.driver import bring_here
from lightning_hybrid.options import Asynchronous, BySpeed, Delayed, Equal, Search, Sharded
from lightning_hybrid.parts import parts_of, refuse_streaming, survives_losses
from lightning_hybrid.planning import Plan
from lightning_hybrid.process import LateWorld, NoWorld, Phase, Servers
from lightning_hybrid.profiling import free_of_host
from lightning_hybrid.run import (
    BetweenRuns,
    Building,
    DriverSession,
    Run,
    move_module,
    scalers_of,
    why_chain,
    with_atomic_writes,
)
from lightning_hybrid.state import (
    ShardedSaves,
    is_sharded,
    let_go_of_checkpoints,
)
from lightning_hybrid.strategy.agreed_sizes import Prepared, agree_on_sizes
from lightning_hybrid.strategy.launcher import HybridSubprocessLauncher
from lightning_hybrid.strategy.ranks import StrategyRanks, given
from lightning_hybrid.strategy.refusals import (
    allows_sizes,
    has_room_for_copies,
    refuse_checkpoint_io,
    refuse_copies,
    refuse_device,
    refuse_interactive,
    refuse_layer_sync,
    refuse_lazy,
    refuse_optimizers,
    refuse_other_places,
    refuse_sizes,
)
from lightning_hybrid.strategy.replica_ranks import ReplicaRanks

T = TypeVar("T")

# names of barriers that Lightning makes then
_AFTER_PREPARE_DATA, _BEFORE_LOOPS = "pre_setup", "run-stage"


class HybridGabraStrategy(ReplicaRanks, DDPStrategy):
    """Trains replicas of a chain of stages, which are placed by predicted time.

    The LightningModule stays as it is. Its network is found at its first call, captured, cut into
    ``pipeline_parallel_size`` stages and given to the ranks of a replica; ``data_parallel_size``
    replicas average their gradients per stage. The user's code runs on one rank of each replica,
    its driver; to Lightning the world is that of DDP over the drivers.

    Args:
        data_parallel_size: number of replicas. ``"auto"``: devices / stages. If both sizes are
            ``"auto"``, they are chosen by predicted time when a fit is set up, from one batch on a
            copy of the module (:mod:`lightning_hybrid.planning.fastest_sizes`). Where nothing can
            be known then, all devices form one chain of stages, and a line says why.
        pipeline_parallel_size: number of devices of a replica, which is that of its stages unless
            ``contiguous=False`` or a plan give devices several. ``"auto"``: devices / replicas. A
            network that cannot be cut is refused if a number is given; with ``"auto"`` it runs on
            the driver of each replica. A tuple gives stages copies: with ``(3, 1)`` three devices
            have stage 0 and take micro-batches in turn, the driver has stage 1; with ``(1, 3)`` the
            driver has one of the copies of stage 1.
        num_microbatches: into how many slices a replica's batch is split on its way through the
            stages; with one stage it goes whole. ``"auto"``: chosen with the sizes, or, where these
            are given, enough to fill the pipeline twice, at least two samples each.
        schedule: how the devices share their time. A name stands for an exact schedule: ``"gpipe"``
            (fill and drain), ``"looped"`` (several stages per device), ``"zero_bubble"`` (gradients
            of weights after those of inputs, where this is faster), ``"1f1b"`` (one forward, one
            backward: a stage keeps no more micro-batches than there are stages, where the network
            returns its loss) or ``"1f1b_stream"``, whose micro-batches are the batches of
            ``accumulate_grad_batches``. ``"auto"`` is ``"gpipe"``; or ``"zero_bubble"`` (without
            ``search.contiguous`` ``"looped"``), if its step is predicted to be clearly shorter; or
            ``"1f1b"`` where memory is short. :class:`Delayed` computes with weights that are some
            steps old.
        network: dotted name(s) of the module(s) to cut. ``None``: found.
        plan: a :class:`Plan`, a path to one (skips profiling and search), or cut points: the names
            of the first module of each next stage, as in the LightningModule (``["net.layer3"]``).
        search: how a plan is searched where none is given; see :class:`Search`.
        replicas: how replicas share batches, states and updates: :class:`Equal`, :class:`BySpeed`
            or :class:`Asynchronous`.
        recompute: stages keep their inputs and no activations, and run their forward again for the
            backward: less memory for one forward more, with the same numbers. ``"auto"``: where
            the network fits in no other way, as far as the memory of the devices is known. (If
            sizes are left open and one stage is chosen, nothing is recomputed.)
        compile_stages: run each stage through ``torch.compile``. The first steps take longer
            (a minute or so per stage on a CPU); the module, its hooks and its checkpoints stay
            what they are.
        checkpoint: ``"full"``: Lightning's ordinary file; :class:`Sharded`: a folder.
        verify: which calls of a network are compared with what its own Python gives on a copy of
            it, so that a captured value that has changed unseen ends the run and not its numbers:
            ``"auto"``: calls 1, 2, 4, 8, ... of each kind (with gradients or not, in training mode
            or not); ``n``: the first call and every ``n``-th after it; ``False``: none.
        rng: whose random numbers a network draws (dropout): ``"microbatch"``: each micro-batch has
            generators of its own, so that the numbers are the same for every number of stages;
            ``"device"``: those of one device, whatever the stages. A network that draws inside of
            its stages (dropout) then takes its batches whole, with a line that names the operation.
        log_performance: whether the loggers get the time of a step, the throughput, the bubble, the
            speed-up (Eq. 14) and the plan, and `hybrid_runs.csv` a line for `lightning-hybrid
            fit-model`; :mod:`lightning_hybrid.parts.performance_log` defines them.
        seed: of the genetic algorithm.
        accelerator: as in ``DDPStrategy``.
        parallel_devices: as in ``DDPStrategy``.
        cluster_environment: as in ``DDPStrategy``.
        checkpoint_io: as in ``DDPStrategy``.
        precision_plugin: as in ``DDPStrategy``.
        process_group_backend: for tensors between ranks: ``"gloo"`` on CPUs, ``"nccl"`` on CUDA, or
            ``"cpu:gloo,cuda:nccl"``. By default the one for the device.
        timeout: time-out of tensors between ranks.
        start_method: how the other processes are started: ``"popen"``, ``"spawn"``, ``"fork"`` or
            ``"forkserver"``.

    Raises:
        PlanError: the sizes contradict each other, the plan or the number of devices.

    References:
        Akintoye et al., "A Hybrid Parallelization Approach for Distributed and Scalable Deep
        Learning", IEEE Access 10:77950, 2022.
    """

    _no_run = (
        "is in no run: steps and hooks of training are for the drivers, between the start of "
        "trainer.fit, validate, test or predict and its end."
    )

    def __init__(
        self,
        *,
        data_parallel_size: Count = "auto",
        pipeline_parallel_size: StageCounts = "auto",
        num_microbatches: Count = "auto",
        schedule: ScheduleName | Delayed = "auto",
        network: str | list[str] | None = None,
        plan: Plan | str | Path | list[str] | None = None,
        search: Search = Search(),
        replicas: Equal | BySpeed | Asynchronous = Equal(),
        recompute: bool | Literal["auto"] = "auto",
        compile_stages: bool = False,
        checkpoint: Literal["full"] | Sharded = "full",
        verify: int | Literal["auto", False] = "auto",
        rng: RngScope = "microbatch",
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
            replicas=replicas,
            recompute=recompute,
            compile_stages=compile_stages,
            checkpoint=checkpoint,
            verify=verify,
            rng=rng,
            log_performance=log_performance,
            seed=seed,
        )
        self._ranks = StrategyRanks(config)
        ask_strategy_whether_distributed(HybridGabraStrategy)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.checkpoint_io = checkpoint_io
        self._building = Building()
        self._plans: dict[str, Plan] = {}
        self._saves = ShardedSaves()
        self._prepared: Prepared | None = None  # up to the set-up of a run
        self._rest()

    def __repr__(self) -> str:
        """Name the class and its package of Lightning; a Trainer of the other one shows this."""
        return f"<{type(self).__name__} of {CHOSEN_MODULE}>"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without process groups: a Trainer may spawn processes."""
        state: dict[str, Any] = super().__getstate__()
        building = Building()
        return state | {"_building": building, "_session": BetweenRuns(NoWorld(), building)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the strategy from a pickle, perhaps in another process."""
        super().__setstate__(state)
        ask_strategy_whether_distributed(HybridGabraStrategy)

    @property
    def _config(self) -> Config:
        return self._ranks.config

    @property
    def _module(self) -> LightningModule:
        return given(self.lightning_module, "lightning_module")

    def _rest(self) -> None:
        divided = self._config.shards_states
        self._session = BetweenRuns(self._ranks.world, self._building, divided=divided)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # (not the global rank: hooks before the run may ask for loaders on workers too)
        replica, survivors = self.coordinates.dp_rank, self._ranks.survivors
        rank = replica if survivors is None else survivors.living.index(replica)
        return {"num_replicas": self.num_replicas, "rank": rank}

    def set_world_ranks(self) -> None:
        self._ranks.set_launched(self.cluster_environment)

    def reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: Any = "mean") -> Tensor:
        """Reduce a tensor over the replicas as `DDPStrategy` does (collective over the drivers).

        But where replicas take unequal parts of a batch, the mean of whole numbers, such as numbers
        of samples, is a float: Lightning would cut it to a whole number.

        Args:
            tensor: the tensor of this rank.
            group: as in `DDPStrategy`.
            reduce_op: the operation, such as ``"mean"`` or ``"sum"``.
        """
        whole = isinstance(tensor, Tensor) and not tensor.is_floating_point()
        if whole and self._config.by_speed and reduce_op in ("mean", "avg"):
            tensor = tensor.float()
        self._session.fence()
        return super().reduce(tensor, group, reduce_op)

    # ------------------------------------------------------------------ a run

    def _configure_launcher(self) -> None:
        config = self._config
        refuse_layer_sync(
            self._layer_sync, compile_stages=config.compile_stages, copies=config.copies
        )
        launcher = self._launcher_of_processes(self.cluster_environment, self._start_method)
        if isinstance(launcher, HybridSubprocessLauncher):
            launcher.before_start = self._refuse_copies
        self._launcher = launcher
        refuse_interactive(works=self._launcher.is_interactive_compatible)

    def _why_chain(self, trainer: Trainer | None) -> str | None:
        return why_chain(given(trainer, "trainer"))

    def _refuse_copies(self, number: int) -> None:
        refuse_copies(self._module, number, free_of_host())

    def setup_distributed(self) -> None:
        refuse_device(self.root_device)
        self.set_world_ranks()
        self._take_known_chain(self._module.trainer)
        self._process_group_backend = backend = self._get_process_group_backend()
        self._ranks.meet(backend, self._timeout or timedelta(minutes=30))
        self._rest()
        self._prepared = Prepared(self._module.trainer)
        if self._ranks.world.has_coordinates:
            refuse_sizes(self._module.trainer, *self._ranks.shape)
            self._ranks.serve_if_worker(self._module, for_good=self._start_method == "popen")

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        if name == _AFTER_PREPARE_DATA and self._prepared is not None:
            self._prepared.note()
        super().barrier(name, *args, **kwargs)
        if name == _BEFORE_LOOPS and isinstance(self._session, DriverSession):
            self._session.begin_loop()

    def setup(self, trainer: Trainer) -> None:
        """Set up a run: choose open sizes, share the weights, make the optimizers (collective).

        On a rank that turns out to be a worker this serves, and never returns. Drivers go on as
        under DDP.

        Args:
            trainer: the Trainer.

        Raises:
            PlanError: something that the user has asked for does not go together with stages.
        """
        bring_here(self._module)
        with self._building.building(self._module):
            self.model = self.precision_plugin.convert_module(given(self.model, "model"))
        refuse_lazy(self._module)
        ranks = self._ranks
        is_open = not ranks.world.has_coordinates
        # (it refers to data, which the user may drop during the run)
        prepared, self._prepared = given(self._prepared, "prepared"), None
        if isinstance(ranks.world, LateWorld):
            ranks.meet_late(ranks.world)
        else:
            alone = prepared.alone(ranks)
            if is_open and agree_on_sizes(
                ranks, trainer, self._may_have, self._start_drivers, alone=alone
            ):
                self._plans.clear()  # of the chain in which an earlier run has evaluated
        if is_open:
            self._rest()
            refuse_sizes(trainer, *ranks.shape)
            ranks.serve_if_worker(self._module, for_good=self._start_method == "popen")
        syncs = self._layer_sync is not None
        run = Run.of(
            trainer, self._config, ranks.joined, self._building, self._plans, synchronise=syncs
        )
        refuse_streaming(run)
        if run.changes_cuts:
            self._plans.clear()  # of an earlier run it is not known here what they were made from
        scripted = isinstance(self._launcher, HybridSubprocessLauncher)
        survives = survives_losses(run, scripted=scripted)
        run.world.survive(survives=survives)
        run.world.phase = Phase.RUNNING
        trainer.accelerator.setup(trainer)
        run.share_weights()
        self.model_to_device()
        ranks.give(run.order(survives=survives))
        parts = parts_of(run) if run.fitting else []
        self._session = DriverSession(run, partial(self._plan_network, run), parts)
        if run.fitting:
            self.setup_optimizers(trainer)
            for part in parts:
                part.begin_training(self.optimizers)
            scaled = bool(scalers_of(self.precision_plugin))
            refuse_optimizers(self.optimizers, *ranks.shape, scaled=scaled)
        self.setup_precision_plugin()

    def _start_drivers(self, ranks: Collection[int]) -> list[Popen[bytes]]:
        """Start the script for drivers; see `HybridSubprocessLauncher.start_drivers`."""
        started: list[Popen[bytes]] = self._launcher.start_drivers(ranks)
        return started

    def _may_have(self, replicas: int, stages: int) -> bool:
        """Whether the Trainer's callbacks and launcher allow so many replicas and stages.

        Where drivers are started late, the memory of this host must also have room for them.
        """
        others = replicas - 1 if Servers.lone else 0
        if not has_room_for_copies(self._module, others, free_of_host()):
            return False
        return allows_sizes(self._module.trainer, replicas, stages)

    def _plan_network(self, run: Run, *arguments: Any) -> Plan:
        """Make the plan of a network, or return the user's.

        Args:
            run: the current run.
            arguments: those of :data:`lightning_hybrid.driver.network_options.Planner`.
        """
        return run.plan_network(*arguments, optimizers=self.optimizers)

    def finish(self) -> None:
        """End the run on this driver and its workers, and wait for all ranks."""
        self._driving.end()
        self._rest()
        self._ranks.joined.end_run()

    def fail(self, error: BaseException) -> Failure | None:
        """Tell the other ranks that this one fails with ``error``.

        Returns:
            The failure of another rank that came first; ``None``: this rank is the first to fail.
        """
        first = self._tell(error, "A hook before the training", "trainer", "in train_dataloader")
        if self._start_method != "popen":
            self._abort()
        return first

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._abort()

    def _abort(self) -> None:
        self._session.abort()
        self._saves.give_up()
        self._ranks.world.leave()

    def teardown(self) -> None:
        restore_handlers()
        self._session.close()
        try:
            if isinstance(self._session, DriverSession):
                self._saves.finish(
                    self._session
                )  # asynchronous ones are there when a run has ended
        finally:
            super().teardown()
        if self._ranks.world.phase is Phase.FAILED:  # nobody is there to hear of a later error
            self._ranks.world = NoWorld()
            self._rest()

    # ------------------------------------------------------------------ made in configure_model

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Return the context in which Lightning calls ``configure_model``.

        Inside, if replicas have several stages, weights get no memory: each rank notes down how
        they are made, and later each is made for the rank that owns it. See
        :mod:`lightning_hybrid.run.building`.

        Args:
            empty_init: as in Lightning.
        """
        building: AbstractContextManager[None] = nullcontext()
        module = self.lightning_module
        if module is not None and self._ranks.world.phase is Phase.TOGETHER:
            trainer = module.trainer
            if trainer.state.status == TrainerStatus.RUNNING:
                # copies of a stage would each make its weights
                stages = 1 if self._config.copies else self._ranks.stages
                self._building = self._building.deferred_if_apart(trainer, self.root_device, stages)
                self._rest()
                building = self._building.building(module)
        with building, super().tensor_init_context(empty_init):
            yield

    def model_to_device(self) -> None:
        """Move the module to this rank's device, at once or in part.

        With several stages, what will be cut possibly stays where it is until then; see
        :func:`lightning_hybrid.run.building.move_module`.
        """
        move_module(self._module, self.root_device, all_of_it=self._ranks.stages == 1)

    # ------------------------------------------------------------------ batches and steps

    def process_dataloader(self, dataloader: object) -> object:
        """Return the data loader that the Trainer is to use; parts of the run may replace it."""
        dataloader = super().process_dataloader(dataloader)
        if isinstance(self._session, DriverSession):
            return self._session.train_loader(dataloader)
        return dataloader

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Return a batch on the device; one that was fetched early may have been moved already."""
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
        """Run a backward pass, then average gradients over the replicas; return the loss.

        Lightning's hooks after a backward see the averaged gradients.

        Args:
            closure_loss: the loss that ``training_step`` has returned.
            optimizer: the optimizer that steps next; ``None``: under manual optimization.
            args: passed on to Lightning's precision plugin.
            kwargs: likewise.
        """
        module, precision = self._module, self.precision_plugin
        loss = precision.pre_backward(closure_loss, module)
        weighted = self._driving.weighted(loss)
        self._driving.backward(
            partial(precision.backward, weighted, module, optimizer, *args, **kwargs)
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
        DDPStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        if isinstance(self._session, DriverSession):
            self._session.connect_optimizers(optimizers)
            for wrapper, optimizer in zip(self._lightning_optimizers, optimizers):
                # the wrapper inherits zero_grad from its class and would not see the instance's,
                # which is another one when stages are cut anew
                vars(wrapper)["zero_grad"] = partial(_zero_grad, optimizer)

    def on_train_start(self) -> None:
        super().on_train_start()
        self._ranks.joined.defer_signals()

    def on_test_start(self) -> None:
        super().on_test_start()
        self._ranks.joined.defer_signals()
        self._driving.evaluation_starts(between=False)

    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._ranks.joined.defer_signals()
        self._driving.evaluation_starts(between=False)

    def on_validation_start(self) -> None:
        self._session.fence()
        super().on_validation_start()
        self._ranks.joined.defer_signals()
        self._driving.evaluation_starts(between=True)

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._driving.evaluates()
        return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._driving.evaluates()
        return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._driving.evaluates()
        return super().predict_step(*args, **kwargs)

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._driving.evaluates()
        self._driving.validation_ends()

    def on_test_end(self) -> None:
        super().on_test_end()
        self._driving.evaluates()

    def on_predict_end(self) -> None:
        super().on_predict_end()
        self._driving.evaluates()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._driving.batch_starts(batch)

    def on_train_end(self) -> None:
        super().on_train_end()
        self._driving.training_ends()

    # ------------------------------------------------------------------ checkpoints

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The user's checkpoint plugin; if none, one that writes a file whole or not at all."""
        self._checkpoint_io = io = with_atomic_writes(self._checkpoint_io)
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        refuse_checkpoint_io(io, self._config.checkpoint)
        self._checkpoint_io = io

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state dict of the whole module on the driver of replica 0; on others an empty one.

        Collective: all drivers call this together in a run, all ranks after a run. What workers own
        is gathered in :meth:`lightning_hybrid.driver.weights.Weights.gathered`.
        """
        return self._session.state_dict(self._module, here=self.is_global_zero)

    def full_state_dict(self, *, ignore_frozen_params: bool = False) -> dict[str, Any]:
        """The state dict of the whole LightningModule, on rank 0; empty on all other ranks.

        Needed for a network that is made in ``configure_model``: it is whole on no rank. Call it on
        all ranks: in a hook (which run on the drivers), or after ``fit``, ``validate``, ``test`` or
        ``predict``, where every rank has kept its stage.

        Args:
            ignore_frozen_params: leave out parameters that require no gradient, as the option of
                this name in `torch.distributed.checkpoint.state_dict`. They are not gathered: of a
                network with adapters come the adapters alone, and buffers.
        """
        return self._session.full_state_dict(
            self._module, here=self.is_global_zero, frozen=not ignore_frozen_params
        )

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state dict of an optimizer, as on one device; empty but on the driver of replica 0.

        Collective: all drivers call this together in a run, all ranks after a run.
        """
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        return self._session.optimizer_state(self._module, optimizer, here=self.is_global_zero)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint: replica 0's driver writes a file, or all ranks of replica 0 a folder.

        Collective over the drivers. Where optimizer states are divided over the replicas, the other
        replicas write their parts of a folder too. An asynchronous save goes on after this returns.

        Args:
            checkpoint: what Lightning has collected on this rank.
            filepath: the file or folder to write.
            storage_options: as in Lightning; refused for a folder.
        """
        if self._config.checkpoint == "full":
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        refuse_other_places(filepath, storage_options, self._config.checkpoint)
        running = self._ranks.world.phase is Phase.RUNNING
        if not self.is_global_zero:
            # where states are divided, other replicas write a part of them
            self._session.help_to_save_shards(checkpoint)
        elif self._config.saves_beside and running:
            self._saves.begin(self._driving, checkpoint, Path(filepath))
        else:
            self._saves.save(partial(self._session.save_shards, checkpoint), Path(filepath))

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint, a file or a folder; a folder after the saves that are under way.

        Only replica 0's driver does so.
        """
        if self._config.checkpoint == "full" and not is_sharded(filepath):
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            self._saves.remove(Path(filepath))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with self._session.loading(self._module):
            super().load_model_state_dict(checkpoint, strict=strict)
        let_go_of_checkpoints()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(self._driving.state_dicts.share_of(checkpoint))


def _zero_grad(optimizer: Optimizer, *arguments: Any, **keywords: Any) -> None:
    optimizer.zero_grad(*arguments, **keywords)
