"""A run on one rank, from ``strategy.setup`` to its end: it drives a replica, or it serves one.

Sessions are created complete, so that nothing in them is ever missing. Before the first run and
after each there is :class:`BetweenRuns`.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_hybrid._lightning import move_data_to_device, rank_zero_info
from lightning_hybrid._lightning_private import (
    begin_batches_alone,
    load_evaluation_data_anew,
    tell_to_end,
)
from lightning_hybrid._torch.autograd import run_backwards_by
from lightning_hybrid._torch.optimizers import replace_unscaling
from lightning_hybrid.comm import (
    Failure,
    broadcast_object,
    gather_objects,
    run_pending,
    signals_deferred,
    signals_ignored,
)
from lightning_hybrid.driver import (
    Batches,
    Discovery,
    DrivenOptimizers,
    Driver,
    DriverOptions,
    Planner,
    bring_here,
)
from lightning_hybrid.planning import Plan, give_back_memory
from lightning_hybrid.process import Phase, is_loss, read_fault
from lightning_hybrid.remote import materialize
from lightning_hybrid.run.asynchronous import AsynchronousReplica
from lightning_hybrid.run.coming_batches import ComingBatches
from lightning_hybrid.run.device_times import StepWatcher
from lightning_hybrid.run.performance_log import PerformanceLog
from lightning_hybrid.run.replanning import Replanning
from lightning_hybrid.run.run import Run, scaled, scalers_of
from lightning_hybrid.run.run_results import Results
from lightning_hybrid.run.unequal_shares import UnequalShares
from lightning_hybrid.stage import Synchronised
from lightning_hybrid.state import save_alone, were_divided, without_frozen
from lightning_hybrid.worker import BUSY, Worker, serve

T = TypeVar("T")


class DriverSession:
    """A run on the driver of a replica. The weights are shared, and the module is on its device.

    Args:
        run: what it is made from.
        planner: makes the plan of a network that was found.
    """

    def __init__(self, run: Run, planner: Planner) -> None:
        mesh, config = run.world.mesh, run.config
        stages, streamed = run.stage_options(), config.streamed
        self._run = run
        # entered wherever layers may compute
        self._statistics: AbstractContextManager[Any] = (
            Synchronised(stages.statistics) if stages.statistics else nullcontext()
        )
        self._batches = Batches()
        if streamed is not None and run.fitting and mesh.coordinates.ranks_per_replica > 1:
            self._batches = ComingBatches(run.trainer, streamed.barrier)
        seed = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))
        self._options = DriverOptions(
            seed=broadcast_object(mesh.drivers, seed),
            stages=stages,
            planner=planner,
            progress=run.progress,
            # what is said at the first cuts need not be said again
            say=cache(rank_zero_info) if run.changes_cuts else rank_zero_info,
            names=config.names,
            microbatches=config.microbatches,
            number_of_stages=len(config.copies) or None,
            cut_by_user=config.cuts_given,
            automatic=config.may_keep_whole,
            verify=config.verify,
            shared=run.shared,
            share=run.building.deferred,
            trains=run.fitting,
            folder=run.framework.folder,
            follows=config.rng == "device",
            shards=config.shards_states,
            served=run.world.served,
            shares=config.may_run_inside and run.fitting,
            inside=config.runs_inside and run.fitting,
            accumulates=run.framework.accumulates,
            scaled=partial(scaled, run.precision),
            first_failure=lambda: read_fault(mesh.store).exception(),
        )
        self._replanning: Replanning | None = None
        self._failure = Failure("this rank has failed")
        self._asynchronous: AsynchronousReplica | None = None
        self._buffers_agree = True  # whether replicas have those of replica 0 in an evaluation
        self._changed = False  # whether weights or buffers are others than before the run
        self._salvages = False  # whether the workers can be asked for their weights
        by_speed = run.config.by_speed and mesh.coordinates.replicas > 1
        self._shares = UnequalShares(run) if run.fitting and by_speed else None
        self._driver, self._networks = self._drive()
        if not run.fitting:
            self._driver.weights.remember()
        self._intercept()
        self._survivors = mesh.survivors  # if replicas go on without a lost one
        if self._survivors is not None:
            begin_batches_alone(run.trainer, alone=True)
            self._survivors.on_loss = self._goes_on_without
        self._watch_steps()

    def _drive(self, before: Driver | None = None) -> tuple[Driver, Discovery]:
        """Make a driver of stages, and what finds the networks that are cut into them.

        Args:
            before: the driver until now, if stages get other cuts.
        """
        run, mesh = self._run, self._run.world.mesh
        driver = Driver(
            run.module,
            mesh,
            self._options,
            watch=run.stopwatch,
            batches=self._batches,
            before=before,
        )
        try:
            return driver, Discovery(run.module, driver, mesh, self._options, run.plans)
        # a name that the user has given; the workers serve already
        except BaseException as error:
            driver.abort(Failure.of(error, str(mesh.coordinates)))
            driver.close()
            raise

    def _goes_on_without(self, lost: Collection[int]) -> None:
        """Replicas are lost, and this one goes on."""
        load_evaluation_data_anew(self._run.trainer)
        if self._shares is not None:
            self._shares.say_who_is_left(lost)

    def _watch_steps(self) -> None:
        """Let those who look at steps do so."""
        run = self._run
        self._watchers: list[StepWatcher] = []
        if run.fitting and run.config.replans_cuts and run.cuts_stay:
            rank_zero_info(f"replan='epoch' changes nothing in this run: {run.cuts_stay}.")
        if not run.fitting:
            return
        if run.config.log_performance and run.is_global_zero:
            self._watchers.append(PerformanceLog(run, self._busy_s))
        if run.changes_cuts:
            self._replanning = Replanning(run, self._busy_s, rank_zero_info)
            self._watchers.append(self._replanning)

    def _busy_s(self) -> list[float]:
        """What devices have computed; see :data:`lightning_hybrid.run.device_times.Meter`."""
        watch = self._run.stopwatch
        return [*self._driver.reports(BUSY), watch.read()] if watch is not None else []

    def _intercept(self) -> None:
        """Let Lightning's plugins speak of all stages, where they know of one device."""
        if self._run.world.coordinates.ranks_per_replica == 1:  # one device knows all of it
            return
        run_backwards_by(self._driver.chosen_gradients)
        optimizers = self._driver.optimizers
        # Clipping by a norm needs the gradients of all stages. It is set on the object, since the
        # LightningModule asks the plugin for it without a word to the strategy, and that may be of
        # a class of the user's, which none of ours is.
        vars(self._run.precision).update(
            clip_grad_by_norm=optimizers.clip_norm, clip_grad_by_value=optimizers.clip_values
        )
        for scaler in scalers_of(self._run.precision):
            replace_unscaling(scaler, optimizers.unscale)

    def _release(self) -> None:
        """Undo :meth:`_intercept`."""
        if self._asynchronous is not None:
            self._asynchronous.close()
        if self._survivors is not None:
            begin_batches_alone(self._run.trainer, alone=False)
        run_backwards_by(None)
        vars(self._run.precision).pop("clip_grad_by_norm", None)
        vars(self._run.precision).pop("clip_grad_by_value", None)
        for scaler in scalers_of(self._run.precision):
            replace_unscaling(scaler, None)

    def __deepcopy__(self, memo: object) -> "DriverSession":
        """Copies of a Trainer, and of what it has patched, belong to the same run."""
        return self

    @property
    def module(self) -> nn.Module:
        """What is trained."""
        return self._run.module

    # ------------------------------------------------------------------ a step

    def step(self, train: Callable[[], T]) -> T:
        """A training step.

        Args:
            train: runs the user's step.

        Raises:
            NetworkNotFoundError: no network was called in it.
        """
        self.begin_step()
        with self._statistics, self._batches.step():
            output = train()
        if self._shares is not None:
            self._shares.hear()
        if output is not None:
            self.require_network()
        return output

    def begin_step(self, *, whole: bool = True) -> None:
        """What follows, up to a backward and the step of an optimizer, belongs to one batch.

        Args:
            whole: whether nothing before belongs to it; see :meth:`graph_is_over`.
        """
        self._driver.begin_step(self._run.framework.batches, whole=whole)

    def graph_is_over(self) -> None:
        """No backward comes of what code has computed with weights of other ranks until now."""
        self._driver.remote.begin_step()

    def require_network(self) -> None:
        """Complain if a training step has computed its loss without a network that is cut.

        Raises:
            NetworkNotFoundError: there was no such call.
        """
        self._networks.require()

    def weighted(self, loss: Tensor) -> Tensor:
        """A loss whose gradients, averaged over the replicas, are those of the global batch."""
        return loss if self._shares is None else self._shares.weighted(loss)

    def backward(self, compute: Callable[[], None]) -> None:
        """A backward pass, after which the gradients of all replicas are averaged.

        Args:
            compute: runs autograd.
        """
        self._driver.gradients.before_backward()
        with self._statistics:  # activation checkpointing runs layers again here
            compute()
        if self._shares is not None:
            self._shares.backward_is_over()
        survivors = self._survivors
        if survivors is not None:
            survivors.told_to_end = self._run.trainer.received_sigterm
        self._driver.gradients.after_backward()
        if survivors is not None:
            if survivors.told_to_end:
                tell_to_end(self._run.trainer)
        elif not self._run.is_global_zero and self._driver.gradients.synchronize:
            run_pending(hold=True)  # the first driver has been here too

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Inside, gradients stay those of each replica."""
        gradients = self._driver.gradients
        before, gradients.synchronize = gradients.synchronize, False
        try:
            yield
        finally:
            gradients.synchronize = before

    @property
    def optimizers(self) -> DrivenOptimizers:
        """The user's, as they step on all ranks."""
        return self._driver.optimizers

    def connect_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Let optimizers step on all ranks.

        Raises:
            HybridError: this run trains, and an earlier one has divided their states.
        """
        if were_divided(optimizers, trains=self._run.fitting):
            return  # an evaluation leaves them as they are
        self._driver.optimizers.connect(optimizers)

    def train_loader(self, loader: Any) -> Any:
        """A loader as the Trainer is to use it."""
        if self._shares is not None and self._run.trainer.training:
            loader = self._shares.deal(loader)
        return self._batches.wrap(loader)

    def move_batch(self, batch: Any, move: Callable[[Any], Any]) -> Any:
        """A batch on its device.

        Args:
            batch: where it is now.
            move: brings it there.
        """
        return self._batches.arrive(batch, move)

    def start_asynchronous(self, optimizers: Sequence[Optimizer]) -> None:
        """From now on the optimizer pushes to the home of the parameters, and reads from it."""
        [optimizer] = optimizers
        assert isinstance(optimizer, SGD)
        self._driver.gradients.synchronize = False
        self._asynchronous = AsynchronousReplica(self._run, optimizer, rank_zero_info)

    def fence(self) -> None:
        """Replicas are about to do something together: none is ahead of the others."""
        if self._asynchronous is not None and self._run.world.phase is Phase.RUNNING:
            self._asynchronous.fence()

    def batch_starts(self, batch: Any) -> None:
        """A training batch is about to be trained on."""
        if self._asynchronous is not None:
            self._asynchronous.batch_starts()
        # (where replicas go on without a lost one, all hear together that one was told to end)
        if not self._run.is_global_zero or self._survivors is not None:
            run_pending(hold=True)
        if self._replanning is not None and (plans := self._replanning.new_plans()):
            self._change_cuts(self._replanning, plans)
        if self._shares is not None:
            self._shares.weigh(batch)
        for watcher in self._watchers:
            watcher.batch_starts(batch)

    @signals_deferred
    def _change_cuts(self, replanning: Replanning, plans: Mapping[str, Plan]) -> None:
        """Between two steps: cut networks at other places (collective over the drivers).

        As at the end of a run, this rank gets the weights, gradients and states of all; as in a
        second run, the next call of a network hands them out.

        Args:
            replanning: has found the plans.
            plans: by name of the network.
        """
        self._driver.check()
        reasons = gather_objects(
            self._run.world.mesh.drivers, self._networks.changed() or self._driver.lacking()
        )
        reason = next(filter(None, reasons), "")
        replanning.tell(plans, reason)
        if reason:
            return
        self.await_shards()  # a worker may be writing
        self._networks.close()
        self._driver.bring_all()
        self._driver.require_all()
        self._driver.close()
        self._release()
        self._driver.end_stages()
        bring_here(self._run.module)
        self._run.plans.update(plans)
        for watcher in self._watchers:
            watcher.begin_anew()
        before = self._driver
        self._driver, self._networks = self._drive(before)
        self._intercept()
        self._driver.optimizers.connect(before.optimizers.optimizers)

    def training_ends(self) -> None:
        """All batches are trained on."""
        self.fence()
        if self._survivors is not None:
            self._survivors.end()
        run_pending(hold=False)
        self._driver.interrupt()
        for watcher in self._watchers:
            watcher.end()

    def evaluation_starts(self, *, between: bool) -> None:
        """Hooks may exchange weights and buffers before the first batch (an average of weights).

        Args:
            between: whether it is a validation, which may come between batches of training.
        """
        self._buffers_agree = self._run.world.mesh.coordinates.replicas == 1
        if between:  # those hooks are to find the buffers of replica 0
            self._driver.interrupt()
            self._driver.weights.broadcast_buffers()
            for watcher in self._watchers:
                watcher.pause()

    def validation_ends(self) -> None:
        """Training goes on, if there is any."""
        for watcher in self._watchers:
            watcher.resume()

    def evaluates(self) -> None:
        """An evaluation comes to a batch, or to its end: as under `ddp`, replicas agree by then."""
        if not self._buffers_agree:
            self._buffers_agree = True
            self._driver.interrupt()
            self._driver.weights.broadcast_buffers()

    # ------------------------------------------------------------------ states

    def state_dict(
        self, module: nn.Module, *, here: bool, unread: bool | None = None
    ) -> dict[str, Any]:
        """The state dict of the whole module (collective over the drivers).

        Args:
            module: the LightningModule.
            here: whether this rank is the one that gets it; the others get nothing.
            unread: whether numbers of workers stay there until they are read; ``None``: as the
                checkpoints of this run want it.
        """
        # else a callback saves what is left after a failure
        if self._run.world.phase is Phase.RUNNING:
            self.fence()
            self._driver.interrupt()
            self._driver.check()
            self._driver.weights.broadcast_buffers()
        if not here:
            return {}
        at_once = self._streams and unread is None
        unread = self._saves_shards if unread is None else unread
        with self._driver.weights.gathered(unread=unread, at_once=at_once):
            return module.state_dict()

    def full_state_dict(
        self, module: nn.Module, *, here: bool, frozen: bool = True
    ) -> dict[str, Any]:
        """The state of the module with the weights of all ranks, which call this together.

        Args:
            module: the LightningModule.
            here: whether this rank gets the state; else it is empty.
            frozen: whether parameters that require no gradient are in it; else they stay where
                they are.
        """
        if frozen:
            return self.state_dict(module, here=here, unread=False)
        trained = without_frozen(module, self.state_dict(module, here=here, unread=True))
        materialize(trained.values())
        return trained

    def optimizer_state(
        self, module: nn.Module, optimizer: Optimizer, *, here: bool
    ) -> dict[str, Any]:
        """The state dict of one device; for a sharded checkpoint as :meth:`state_dict`."""
        if self._run.world.phase is Phase.RUNNING:
            self.fence()
            optimizers = self._driver.optimizers
            return optimizers.state_dict(
                optimizer, here=here, unread=self._saves_shards, at_once=self._streams
            )
        return self._driver.optimizers.left(optimizer) if here else {}

    @property
    def _streams(self) -> bool:
        """Whether a checkpoint is written at once, tensor by tensor."""
        return self._run.framework.streams and self._run.world.phase is Phase.RUNNING

    @property
    def _saves_shards(self) -> bool:
        return self._run.config.checkpoint != "full" and self._run.world.phase is Phase.RUNNING

    def save_shards(self, checkpoint: Mapping[str, Any], folder: Path) -> None:
        """Write a sharded checkpoint.

        Args:
            checkpoint: the ordinary one.
            folder: that all ranks of this replica write to.
        """
        save = self._driver.save_shards if self._saves_shards else save_alone
        save(checkpoint, folder)

    def help_to_save_shards(self, checkpoint: Mapping[str, Any]) -> None:
        """Where states are divided: write what this replica has of them.

        Args:
            checkpoint: without the states of any rank.
        """
        if self._saves_shards and self._run.config.shards_states:
            self._driver.save_shards(checkpoint, Path())

    def stage_shards(
        self, checkpoint: Mapping[str, Any], folder: Path, given_up: Event
    ) -> Callable[[], None]:
        """Copy the tensors of a sharded checkpoint, to be written in the background.

        See :meth:`lightning_hybrid.driver.driver.Driver.stage_shards`.
        """
        return self._driver.stage_shards(checkpoint, folder, given_up)

    def await_shards(self) -> None:
        """Wait until workers have written what was staged, if they are still there."""
        if self._saves_shards:
            self._driver.await_shards()

    @contextmanager
    def loading(self, module: nn.Module) -> Iterator[None]:
        """Inside, weights are written to the module; then the workers get those of their stages."""
        self._driver.remote.bring()
        with self._driver.remote.suspended(), self._run.building.loading(module, alone=True):
            yield
        self._driver.weights.scatter()

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """The Trainer is done: bring the trained weights here, and leave all as it was."""
        self._networks.close()
        went_well = self._run.framework.went_well
        # an evaluation may be in training mode, adapt batch statistics, or train at test time
        self._changed = self._run.fitting or self._driver.weights.changed
        # servers keep nothing between runs, not even what was made in configure_model
        brings = self._changed or (self._run.world.served and self._run.building.deferred)
        if went_well and brings and self._run.world.phase is Phase.RUNNING:
            if self._run.fitting:
                self._driver.check()
                self._driver.weights.broadcast_buffers()
            self._driver.bring_all(changed=self._changed)
        self._driver.close()
        self._driver.weights.leave_inference()
        self._release()

    def end(self, returned: Any) -> None:
        """End the run on the workers too.

        Args:
            returned: what the run returns.
        """
        if self._run.world.served:  # no other rank has a script that could go on with results
            self._driver.end(None, weights=False)
        else:
            results = self._run.framework.collect(returned)
            results.plans.update(self._run.plans)
            self._driver.end(results, weights=self._changed)
        give_back_memory()

    def fail(self, failure: Failure, error: BaseException) -> None:
        """Remember what :meth:`abort` is to tell.

        Args:
            failure: what came first.
            error: what was raised on this rank.
        """
        self._failure = failure
        # (Ctrl-C waits for the end of a pass, so that the workers are in step; a SystemExit is of
        # whoever wants an end soon)
        ours = isinstance(error, Exception | KeyboardInterrupt)
        self._salvages = ours and not is_loss(error)

    def abort(self) -> None:
        """Tell the workers that the run has failed, and save what they have trained."""
        if self._salvages and self._run.fitting:
            self._salvages = False
            with suppress(Exception):  # the first error is what counts
                self._driver.salvage()
        self._driver.abort(self._failure)
        run_backwards_by(None)


class WorkerSession:
    """A run on a worker.

    Args:
        run: what it is made from.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._options = run.stage_options()
        self._worker: Worker | None = None

    @property
    def fitting(self) -> bool:
        """Whether the run trains."""
        return self._run.fitting

    @property
    def module(self) -> nn.Module:
        """What was trained."""
        return self._run.module

    def take_optimizers(self) -> list[Optimizer]:
        """The user's, with the state of what this rank owns; after the run, and once."""
        assert self._worker is not None
        optimizers, self._worker.optimizers[:] = [*self._worker.optimizers], []
        return optimizers

    def serve(self) -> Results:
        """Obey the driver until the run is over. Returns its results, which are adopted here.

        Raises:
            Exception: the driver's, which has failed; caused by a RemoteError.
            ConnectionLost: the driver was lost.
        """
        run = self._run
        run.world.serve()
        with signals_ignored():
            self._worker, served = serve(
                run.module,
                run.world.mesh,
                self._options,
                run.stopwatch,
                shards=run.config.shards_states,
            )
        results: Results = served
        self._run.world.phase = Phase.TOGETHER
        self._run.plans.update(results.plans)
        self._run.module.cpu()
        for optimizer in self._worker.optimizers if self.fitting else ():
            state = move_data_to_device(dict(optimizer.state), torch.device("cpu"))
            optimizer.state.update(state)
        self._run.framework.adopt(results)
        give_back_memory()
        return results
