"""A run on the driver of a replica, from ``strategy.setup`` to its end.

Sessions are created complete, so that nothing in them is ever missing. Before the first run and
after each there is :class:`~lightning_hybrid.run.building.BetweenRuns`.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid._lightning import rank_zero_info
from lightning_hybrid._torch.autograd import run_backwards_by
from lightning_hybrid._torch.optimizers import replace_unscaling
from lightning_hybrid.comm import (
    Failure,
    broadcast_object,
    gather_objects,
    run_pending,
    signals_deferred,
)
from lightning_hybrid.driver import (
    Batches,
    Discovery,
    Driver,
    DriverOptions,
    GradientClipping,
    OptimizerStateDicts,
    Planner,
    bring_here,
)
from lightning_hybrid.planning import Plan
from lightning_hybrid.process import Phase, is_loss, read_fault
from lightning_hybrid.profiling import give_back_memory
from lightning_hybrid.remote import materialize
from lightning_hybrid.run.part import Part
from lightning_hybrid.run.run import Run, scaled, scalers_of
from lightning_hybrid.stage import Synchronised
from lightning_hybrid.state import save_alone, were_divided, without_frozen

T = TypeVar("T")


class DriverSession:
    """A run on the driver of a replica: what the strategy does when Lightning calls its hooks.

    It is made when all replicas have the weights of replica 0, and the module is on its device.
    From then on calls of networks are intercepted, and the workers obey this driver.

    Args:
        run: the data of the run.
        planner: makes the plan of a network that was found.
        parts: the parts of the run, in the order in which their hooks are called. One that is a
            :class:`Batches` too gives the driver later batches.
    """

    def __init__(self, run: Run, planner: Planner, parts: Sequence[Part] = ()) -> None:
        mesh, config, stages = run.world.mesh, run.config, run.stage_options()
        self._run, self._parts = run, parts
        # whether replicas hear together that one was told to end
        self._agree_to_end = any(part.agrees_to_end for part in parts)
        # entered wherever layers may compute
        self._statistics: AbstractContextManager[Any] = (
            Synchronised(stages.statistics) if stages.statistics else nullcontext()
        )
        self._batches = next((part for part in parts if isinstance(part, Batches)), None)
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
            as_on_one_device=config.rng == "device",
            shards=config.shards_states,
            shares=config.may_run_inside and run.fitting,
            inside=config.runs_inside and run.fitting,
            accumulates=run.framework.accumulates,
            scaled=partial(scaled, run.precision),
            first_failure=lambda: read_fault(mesh.store).exception(),
        )
        self._failure = Failure("this rank has failed")
        self._buffers_agree = True  # whether replicas have those of replica 0 in an evaluation
        self._changed = False  # whether weights or buffers are others than before the run
        self._salvages = False  # whether the workers can be asked for their weights
        self._driver, self._networks = self._drive()
        if not run.fitting:
            self._driver.weights.remember()
        self._intercept()
        for part in parts:
            part.begin(self._driver)

    def _drive(self, before: Driver | None = None) -> tuple[Driver, Discovery]:
        """Make the driver, and the object that finds networks and has them cut into stages.

        Args:
            before: the driver until now, if networks are cut anew; ``None``: it is the first of the
                run.

        Raises:
            NetworkNotFoundError: the LightningModule has no module of a name that the user has
                given. The workers are told.
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

    def begin_loop(self) -> None:
        """In an evaluation: look for networks from now on, see :meth:`Discovery.begin`."""
        if not self._run.fitting:
            self._networks.begin()

    def _intercept(self) -> None:
        """Replace functions of torch and Lightning that act on the driver's gradients alone.

        These run a backward, clip gradients, and divide them by the scale of the loss; in this run
        they do so for all stages. :meth:`_release` puts them back. With one stage nothing is
        replaced.
        """
        if self._run.world.coordinates.ranks_per_replica == 1:  # one device knows all of it
            return
        run_backwards_by(self._driver.user_backwards)
        clipping = self._driver.clipping
        # Clipping by a norm needs the gradients of all stages. Lightning calls the precision plugin
        # directly, not through the strategy, and the plugin may be of a user's class. So we cannot
        # override these methods in a subclass, and replace them on the object.
        vars(self._run.precision).update(
            clip_grad_by_norm=clipping.clip_norm, clip_grad_by_value=clipping.clip_values
        )
        for scaler in scalers_of(self._run.precision):
            replace_unscaling(scaler, clipping.unscale)

    def _release(self) -> None:
        """Undo :meth:`_intercept`."""
        run_backwards_by(None)
        vars(self._run.precision).pop("clip_grad_by_norm", None)
        vars(self._run.precision).pop("clip_grad_by_value", None)
        for scaler in scalers_of(self._run.precision):
            replace_unscaling(scaler, None)

    def __deepcopy__(self, memo: object) -> "DriverSession":
        """Return this session: copies of a Trainer, and of what is patched, are in the same run."""
        return self

    @property
    def module(self) -> nn.Module:
        """The LightningModule, or the module that was given to ``fabric.setup``."""
        return self._run.module

    # ------------------------------------------------------------------ a step

    def step(self, train: Callable[[], T]) -> T:
        """Run a training step of the user's, and return what it returns.

        Args:
            train: runs the step.

        Raises:
            NetworkNotFoundError: the step has returned a loss, and no network that can be cut was
                called.
        """
        self.begin_step()
        with ExitStack() as contexts:
            for part in self._parts:
                contexts.enter_context(part.step())
            contexts.enter_context(self._statistics)
            output = train()
        if output is not None:
            self.require_network()
        return output

    def begin_step(self, *, whole: bool = True) -> None:
        """Begin a step: calls of networks from now on belong to the next training batch.

        Args:
            whole: whether no autograd graph from before goes on in the step. ``False``: a penalty
                may have been computed with weights already; see :meth:`graph_is_over`.
        """
        self._driver.begin_step(self._run.framework.batches, whole=whole)

    def graph_is_over(self) -> None:
        """Forget which proxies are in autograd's graph.

        Called when no backward will go through what was computed with workers' weights so far.
        """
        self._driver.remote.forget_graph()

    def require_network(self) -> None:
        """Raise an error if no network that can be cut has been called in this run so far.

        Called after the forward of a training step.

        Raises:
            NetworkNotFoundError: none was called.
        """
        self._networks.require()

    def weighted(self, loss: Tensor) -> Tensor:
        """Return the loss from which a backward is to run: scaled if replicas take unequal batches.

        The gradients, averaged over the replicas, are then those of the global batch.

        Args:
            loss: the loss of this replica's batch.
        """
        for part in self._parts:
            loss = part.weigh_loss(loss)
        return loss

    def backward(self, compute: Callable[[], None]) -> None:
        """Run a backward pass through all stages, then average gradients over the replicas.

        Inside of :meth:`accumulating` they are not averaged. After an average, pending handlers of
        signals run on all drivers but the first (on none, if a part has replicas agree on an end).

        Args:
            compute: runs autograd.
        """
        self._driver.gradients.before_backward()
        with self._statistics:  # activation checkpointing runs layers again here
            compute()
        for part in self._parts:
            part.backward_is_over()
        self._driver.gradients.after_backward()
        for part in self._parts:
            part.gradients_are_averaged()
        others = not (self._run.is_global_zero or self._agree_to_end)
        if others and self._driver.gradients.synchronize:
            run_pending(hold=True)  # the first driver has been here too

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Inside, backwards leave each replica its own gradients, and average none."""
        gradients = self._driver.gradients
        before, gradients.synchronize = gradients.synchronize, False
        try:
            yield
        finally:
            gradients.synchronize = before

    @property
    def state_dicts(self) -> OptimizerStateDicts:
        """Makes state dicts of the user's optimizers, of the states of all ranks."""
        return self._driver.state_dicts

    @property
    def clipping(self) -> GradientClipping:
        """Clips and unscales gradients on all ranks of the replica."""
        return self._driver.clipping

    def connect_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Have the user's optimizers step on all ranks, in place of those that were given before.

        In an evaluation, optimizers whose states an earlier run has divided over the replicas are
        left alone.

        Args:
            optimizers: the optimizers.

        Raises:
            HybridError: this run trains, and an earlier one has divided their states.
        """
        if were_divided(optimizers, trains=self._run.fitting):
            return  # an evaluation leaves them as they are
        self._driver.optimizers.connect(optimizers)

    def train_loader(self, loader: Any) -> Any:
        """Return the loader that the Trainer is to use in place of one that it has made.

        Parts of the run may replace a loader while the Trainer trains, also one for validation.

        Args:
            loader: the Trainer's own.
        """
        for part in self._parts if self._run.trainer.training else ():
            loader = part.train_loader(loader)
        return loader

    def move_batch(self, batch: Any, move: Callable[[Any], Any]) -> Any:
        """Return a batch on the device of this driver; in training, parts of the run may do more.

        Args:
            batch: the batch, on any device.
            move: returns a batch on the device.
        """
        for part in self._parts if self._run.trainer.training else ():
            move = partial(part.move_batch, move=move)
        return move(batch)

    def fence(self) -> None:
        """Wait until no replica is ahead of another one, before they do something together.

        Calls :meth:`~lightning_hybrid.run.part.Part.fence` of each part of the run; those that let
        replicas run ahead wait there. Outside of a run, or after a failure, nothing happens.
        """
        for part in self._parts if self._run.world.phase is Phase.RUNNING else ():
            part.fence()

    def batch_starts(self, batch: Any) -> None:
        """Begin a training batch; called by `on_train_batch_start` on every driver.

        First run pending handlers of signals (on the first driver only if a part has replicas agree
        on an end); later signals wait. If a part brings new plans, cut the stages anew (all drivers
        together). Then tell all parts of the batch.

        Args:
            batch: the batch, on the device of this driver.
        """
        if not self._run.is_global_zero or self._agree_to_end:
            run_pending(hold=True)
        for part in self._parts:
            if plans := part.new_plans():
                self._change_cuts(plans)
        for part in self._parts:
            part.batch_starts(batch)

    @signals_deferred
    def _change_cuts(self, plans: Mapping[str, Plan]) -> None:
        """Between two steps, cut networks at other places (collective over the drivers).

        As at the end of a run, this rank gets the weights, gradients and states of all its workers;
        as in a second run, the next call of a network hands them out. If code has changed the
        module so that it cannot be cut anew, all stays as it is. The parts are told which of the
        two it is.

        Args:
            plans: the new plans, by name of the network.

        Raises:
            Exception: a stage of some replica has failed before.
        """
        self._driver.check()
        reasons = gather_objects(self._run.world.mesh.drivers, self._networks.changed())
        reason = next(filter(None, reasons), "")
        for part in self._parts:
            part.cuts_decided(plans, reason)
        if reason:
            return
        self.await_shards()  # a worker may be writing
        self._networks.close()
        self._driver.bring_all()
        self._driver.close()
        self._release()
        self._driver.end_stages()
        bring_here(self._run.module)
        self._run.plans.update(plans)
        before = self._driver
        self._driver, self._networks = self._drive(before)
        self._intercept()
        for part in self._parts:
            part.begin(self._driver)
        self._driver.optimizers.connect(before.optimizers.optimizers)

    def training_ends(self) -> None:
        """End the training, after its last batch; called by `on_train_end` on every driver.

        Wait for all replicas, run pending handlers of signals, drop what was begun of later
        batches, and tell all parts. Signals are not held from then on.
        """
        self.fence()
        for part in self._parts:
            part.last_batch_is_over()
        run_pending(hold=False)
        self._driver.interrupt()
        for part in self._parts:
            part.training_ends()

    def evaluation_starts(self, *, between: bool) -> None:
        """Prepare for an evaluation, before its hooks and its first batch.

        The hooks may change buffers of single replicas, so the next :meth:`evaluates` gives all
        replicas those of replica 0. Before a validation, the replicas get equal buffers here
        already, what was begun of later batches is dropped, and parts of the run pause.

        Args:
            between: whether it is a validation, which may come between batches of training.
        """
        self._buffers_agree = self._run.world.mesh.coordinates.replicas == 1
        if between:  # those hooks are to find the buffers of replica 0
            self._driver.interrupt()
            self._driver.weights.broadcast_buffers()
            for part in self._parts:
                part.pause()

    def validation_ends(self) -> None:
        """Have the parts of the run resume what :meth:`evaluation_starts` had them pause."""
        for part in self._parts:
            part.resume()

    def evaluates(self) -> None:
        """Give all replicas the buffers of replica 0, once in an evaluation, as under `ddp`.

        Called for each of its batches and at its end, on all drivers: the first call does it, later
        ones do nothing. It also drops what was begun of later batches. With one replica nothing
        happens.
        """
        if not self._buffers_agree:
            self._buffers_agree = True
            self._driver.interrupt()
            self._driver.weights.broadcast_buffers()

    # ------------------------------------------------------------------ states

    def state_dict(
        self, module: nn.Module, *, here: bool, unread: bool | None = None
    ) -> dict[str, Any]:
        """Return the state dict of the whole module (collective over the drivers).

        While the run goes on, it asks all replicas for failures. Once the run is known to have
        failed (`Phase.FAILED`) it raises no error of it, and returns what is left on this rank,
        without the other drivers.

        Args:
            module: the LightningModule.
            here: whether this rank gets the state dict; else it is empty.
            unread: whether numbers of workers stay there until they are read; ``None``: only if the
                run saves sharded checkpoints.

        Raises:
            Exception: while the run goes on: a stage of some replica has failed before.
        """
        # else a callback saves what is left after a failure
        if self._run.world.phase is Phase.RUNNING:
            self.fence()
            self._driver.interrupt()
            self._driver.check()
            self._driver.weights.broadcast_buffers()
        if not here:
            return {}
        unread = self._saves_shards if unread is None else unread
        with self._driver.weights.gathered(unread=unread):
            return module.state_dict()

    def full_state_dict(
        self, module: nn.Module, *, here: bool, frozen: bool = True
    ) -> dict[str, Any]:
        """Return the state dict of the whole module with all numbers (collective over the drivers).

        Args:
            module: the LightningModule.
            here: whether this rank gets the state dict; else it is empty.
            frozen: whether parameters that require no gradient are in it. ``False``: they are left
                out, and are not fetched from workers.
        """
        if frozen:
            return self.state_dict(module, here=here, unread=False)
        trained = without_frozen(module, self.state_dict(module, here=here, unread=True))
        materialize(trained.values())
        return trained

    def optimizer_state(
        self, module: nn.Module, optimizer: Optimizer, *, here: bool
    ) -> dict[str, Any]:
        """Return the state dict of an optimizer, as on one device (collective over the drivers).

        If the run saves sharded checkpoints, tensors of workers stay there until they are read.
        After a failure it is made of what is left on this rank, without the other drivers.

        Args:
            module: not used.
            optimizer: the user's optimizer.
            here: whether this rank gets the state dict; else it is empty.
        """
        if self._run.world.phase is Phase.RUNNING:
            self.fence()
            unread = self._saves_shards
            return self._driver.state_dicts.state_dict(optimizer, here=here, unread=unread)
        return self._driver.state_dicts.of_this_rank(optimizer) if here else {}

    @property
    def _saves_shards(self) -> bool:
        return self._run.config.checkpoint != "full" and self._run.world.phase is Phase.RUNNING

    def save_shards(self, checkpoint: Mapping[str, Any], folder: Path) -> None:
        """On replica 0, write a sharded checkpoint: each rank of the replica writes what it owns.

        Where replicas divide states of optimizers, the others call :meth:`help_to_save_shards` at
        the same time. After a failure this rank writes all that the checkpoint has.

        Args:
            checkpoint: the ordinary checkpoint, with unread tensors for what workers own.
            folder: an empty folder that all ranks can write to.

        Raises:
            OSError: a rank cannot write.
        """
        save = self._driver.save_shards if self._saves_shards else save_alone
        save(checkpoint, folder)

    def help_to_save_shards(self, checkpoint: Mapping[str, Any]) -> None:
        """On another replica than 0, have its ranks write the states that they alone have.

        Where replicas do not divide states of optimizers, there are none, and nothing happens.

        Args:
            checkpoint: what Lightning has collected on this rank, which has no weights or states.
        """
        if self._saves_shards and self._run.config.shards_states:
            self._driver.save_shards(checkpoint, Path())

    def stage_shards(
        self, checkpoint: Mapping[str, Any], folder: Path, given_up: Event
    ) -> Callable[[], None]:
        """Have each rank copy what it owns of a sharded checkpoint, to be written later.

        Arguments and result are those of `stage_shards` of
        :class:`lightning_hybrid.driver.driver.Driver`.
        """
        return self._driver.stage_shards(checkpoint, folder, given_up)

    def await_shards(self) -> None:
        """Wait until workers have written what :meth:`stage_shards` has copied.

        If the run has failed, it does not wait.
        """
        if self._saves_shards:
            self._driver.await_shards()

    @contextmanager
    def loading(self, module: nn.Module) -> Iterator[None]:
        """Inside, code loads weights into the module on this rank; then the workers get theirs.

        Before, weights of workers are fetched, for what is not loaded. Inside, all parameters and
        buffers are ordinary tensors, or deferred ones if the network is made in
        ``configure_model``.

        Args:
            module: the LightningModule.
        """
        self._driver.remote.bring()
        with self._driver.remote.suspended(), self._run.building.loading(module):
            yield
        self._driver.weights.scatter()

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Bring the trained weights to this rank, and undo what the run has changed.

        Called when the Trainer is done, also after an error: then nothing is brought. Without a
        change in the run, weights come only if they were made in ``configure_model``. From then on
        the module has ordinary parameters and optimizers, and torch and Lightning have their own
        functions back. The workers serve until :meth:`end`.
        """
        self._networks.close()
        went_well = self._run.framework.went_well
        # an evaluation may be in training mode, adapt batch statistics, or train at test time
        self._changed = self._run.fitting or self._driver.weights.changed
        # workers keep nothing between runs, not even what was made in configure_model
        brings = self._changed or self._run.building.deferred
        if went_well and brings and self._run.world.phase is Phase.RUNNING:
            if self._run.fitting:
                self._driver.check()
                self._driver.weights.broadcast_buffers()
            self._driver.bring_all(changed=self._changed)
        self._driver.close()
        self._driver.weights.leave_inference()
        for part in self._parts:
            part.close()
        self._release()

    def end(self) -> None:
        """End the run on the workers, after :meth:`close`; this rank gets the states of optimizers.

        Raises:
            Exception: a worker has failed since its last answer.
        """
        self._driver.end()
        give_back_memory()

    def fail(self, failure: Failure, error: BaseException) -> None:
        """Note that the run has failed, for :meth:`abort`, which tells the workers.

        Args:
            failure: the first failure of the run, here or on another rank.
            error: what was raised on this rank.
        """
        self._failure = failure
        # (Ctrl-C waits for the end of a pass, so that the workers are in step; a SystemExit is of
        # whoever wants an end soon)
        ours = isinstance(error, Exception | KeyboardInterrupt)
        self._salvages = ours and not is_loss(error)

    def abort(self) -> None:
        """End a run that has failed: tell the workers of the failure that :meth:`fail` has noted.

        Before, this rank takes from the workers what they have trained, for a script that catches
        the error; but not if a rank was lost, after a ``SystemExit``, or in an evaluation. An error
        in that is ignored.
        """
        if self._salvages and self._run.fitting:
            self._salvages = False
            with suppress(Exception):  # the first error is what counts
                self._driver.salvage()
        self._driver.abort(self._failure)
        run_backwards_by(None)
