"""Asynchronous data parallelism (``replicas=Asynchronous()``): replicas do not wait for each other.

Replica 0 has a parameter server, the *home*: the newest weights with a version number, and the
state of the optimizer. A replica *reads* the weights, computes the gradient of its batch, and
*pushes* it. The home collects pushes, and applies all that it has in one update (weighted 1/R each,
summed in the order of the replicas) as soon as that would make no weights with which a replica
computes older than the bound of staleness. With a bound of 0 it waits for all replicas, which is
the synchronous step.

Before replicas do anything together they come to a *fence*, without a new push: the home can apply
all pushes, and then all replicas have the same weights. The next batch begins with the weights that
replica 0 has at that time, including what hooks have changed since the fence.
"""

import csv
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from threading import Condition
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_hybrid._lightning_private import begin_batches_alone
from lightning_hybrid.comm import BackgroundThread, GroupWire, run_pending, signals_deferred
from lightning_hybrid.driver import Driver
from lightning_hybrid.errors import HybridError, PlanError
from lightning_hybrid.parts.reasons_to_refuse import exchanges_more, steps_otherwise
from lightning_hybrid.run import Part, Run

ORDER = "asynchronous_order.csv"
"""Name of a file in the Trainer's ``default_root_dir`` that lists the pushes of each update."""

_TAG = 2**21  # tag of the wires in the group of the drivers; nothing else uses it

Push = tuple[int, int, int, int]
"""An applied push: the version of the weights that it was applied to, its replica, its number among
the pushes of this replica, and the version of the weights that its gradient was computed with."""


class ParameterServer:
    """The parameter server, in the process of replica 0: weights, optimizer and waiting pushes.

    Its methods are called from one thread for each replica. A message of a replica is one tensor:
    its gradients, flattened; then a 1 or 0 for each parameter that has a gradient or none; then a 1
    for a push. A tensor of zeros is a fence.

    Args:
        replicas: number of replicas.
        bound: largest staleness: how many updates old the weights may be that a replica computes
            with.
        note: called with each push when it is applied.
    """

    def __init__(self, replicas: int, bound: int, note: Callable[[Push], None]) -> None:
        self._replicas = replicas
        self._bound = bound
        self._note = note
        self._changed = Condition()
        self._version = 0
        self._reads: dict[int, int] = {}  # by replica, the version that it computes with
        self._held: dict[int, tuple[int, Tensor]] = {}  # by replica, its push that is not applied
        self._given: dict[int, Tensor] = {}  # by replica, weights that it has not read yet
        self._pushes = Counter[int]()
        self._open = False
        self._error: BaseException | None = None

    def load(self, optimizer: SGD) -> None:
        """Begin, or begin anew after a fence, with the weights of replica 0, which all have now.

        Args:
            optimizer: optimizer of replica 0. Its parameters and state are copied, and later
                changes of its options (such as learning rates) are followed.
        """
        with self._changed:
            self._theirs = optimizer
            # on the CPU, since messages come over gloo
            copies = {p: Parameter(p.detach().cpu().clone()) for p in parameters_of(optimizer)}
            self._copies = copies
            groups = [
                {**group, "params": [copies[p] for p in group["params"]]}
                for group in optimizer.param_groups
            ]
            # (each group has its own learning rate, so this one is never used)
            self._optimizer = SGD(groups, lr=0.0)
            for parameter, copy in copies.items():
                if parameter in optimizer.state:
                    self._optimizer.state[copy] = _moved(optimizer.state[parameter], copy)
            self._reads = dict.fromkeys(range(self._replicas), self._version)
            self._open = True
            self._changed.notify_all()

    def await_open(self) -> None:
        """Wait until :meth:`load` has been called since the last fence.

        For a thread that is about to receive a message: a receive that begins earlier could time
        out, during a long evaluation.
        """
        with self._changed:
            self._wait(lambda: self._open)

    def take(self, replica: int, message: Tensor) -> Tensor:
        """Take a message of a replica, and return the weights with which it is to go on.

        If the message is a push, this waits until it has been applied; if it is a fence, until all
        replicas have come to it.

        Args:
            replica: number of the replica.
            message: its push or fence.

        Raises:
            BaseException: what :meth:`end` was given.
        """
        with self._changed:
            # the replica computes with no weights now, so that it delays no update
            read = self._reads.pop(replica)
            if message[-1]:
                self._held[replica] = read, message
                if replica == 0:
                    self._follow_options()
            if self._held and all(
                self._version + 1 - read <= self._bound for read in self._reads.values()
            ):
                self._update()
            if not self._reads:  # all replicas are at the fence (an update adds those that pushed)
                self._open = False
                self._given = dict.fromkeys(range(self._replicas), flat(self._copies.values()))
            self._changed.notify_all()
            self._wait(lambda: replica in self._given)
            return self._given.pop(replica)

    def give_state(self) -> None:
        """Copy the state of the server's optimizer to the optimizer of replica 0, at a fence."""
        for parameter, copy in self._copies.items():
            if copy in self._optimizer.state:
                self._theirs.state[parameter] = _moved(self._optimizer.state[copy], parameter)

    def end(self, error: BaseException) -> None:
        """Make all threads that wait in this server, or will, raise an error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _wait(self, over: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._error is not None or over())
        if self._error is not None:
            raise self._error

    def _follow_options(self) -> None:
        """Copy the options of replica 0's optimizer to the server's: schedulers may change them."""
        for ours, theirs in zip(self._optimizer.param_groups, self._theirs.param_groups):
            ours.update({name: value for name, value in theirs.items() if name != "params"})

    def _update(self) -> None:
        """Apply all collected pushes in one optimizer step.

        The new weights are kept for the replicas that have pushed.
        """
        parameters = list(self._copies.values())
        sizes = [*(p.numel() for p in parameters), len(parameters) + 1]
        self._optimizer.zero_grad()
        # summed in the order of replicas: pushes arrive in any order, on which rounding depends
        for replica, (read, message) in sorted(self._held.items()):
            *parts, present = message.split(sizes)
            for parameter, part, there in zip(parameters, parts, present.tolist()):
                weighted = part.view_as(parameter) * (1 / self._replicas)
                if there and parameter.grad is None:
                    parameter.grad = weighted
                elif there:
                    parameter.grad += weighted
            self._note((self._version, replica, self._pushes[replica], read))
            self._pushes[replica] += 1
        self._optimizer.step()
        self._version += 1
        weights = flat(parameters)
        for replica in self._held:
            self._reads[replica], self._given[replica] = self._version, weights
        self._held.clear()


class AsynchronousReplica(Part):
    """The part of a run for one asynchronous replica.

    A step of its optimizer pushes gradients to the parameter server of replica 0 (the *home*), and
    reads new weights from it.

    Args:
        run: the run that is about to begin.
        say: prints a line, once for all replicas.
    """

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        self._run = run
        self._trainer = run.trainer
        self._say = say
        self._together = True
        self._stepping = False
        self._step = 0
        self._gradients: list[Tensor | None] = []
        self._read = torch.empty(0)
        self._order: list[Push] = []
        self._home: ParameterServer | None = None
        self._hooks: list[RemovableHandle] = []

    def begin(self, driver: Driver) -> None:
        self._averages = driver.gradients

    def begin_training(self, optimizers: Sequence[Optimizer]) -> None:
        """Have the optimizer's steps push gradients to the parameter server, and read weights.

        On replica 0 this starts the server. With one replica it only checks.

        Args:
            optimizers: the user's optimizers.

        Raises:
            PlanError: the run does something that replicas would have to do together in a step, or
                the optimizers do not suit.
        """
        run = self._run
        for reason in chain(_needs_all(run), _no_plain_steps(run, optimizers)):
            raise PlanError(f"{run.config.replicas!r} {reason}; or use replicas=Equal().")
        mesh, bound = run.world.mesh, run.config.staleness or 0
        replicas = mesh.coordinates.replicas
        if replicas == 1:  # there is nobody to be ahead of
            return
        [self._optimizer] = (each for each in optimizers if isinstance(each, SGD))
        self._averages.synchronize = False
        self._wire = GroupWire(mesh.drivers, 0, "replica 0", _TAG)
        if mesh.coordinates.dp_rank == 0:
            self._home = ParameterServer(replicas, bound, self._order.append)
            for replica in range(1, replicas):
                wire = GroupWire(mesh.drivers, replica, f"replica {replica}", _TAG)
                serve = BackgroundThread(self._serve, "hybrid-home", replica, wire, awaited=True)
                serve.start()
            if (path := self._path) is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("version,replica,push,read\n")
        self._hooks = [
            self._optimizer.register_step_pre_hook(self._exchange),
            self._optimizer.register_step_post_hook(self._stepped),
        ]
        begin_batches_alone(self._trainer, alone=True)
        self._say(
            f"Asynchronous(staleness={bound}): replicas go on with weights that are up to "
            f"{bound} updates old, each of which has momentum and weight decay of its own. That "
            "gains time where devices stall at random; where one is always slower, all have as "
            "many batches to do as it has: use BySpeed() there."
        )

    def batch_starts(self, batch: Any) -> None:
        """Run pending handlers of signals, and after a fence have the parameter server begin anew.

        Later signals wait for the next batch or fence. The server begins with the weights that
        replica 0 has now.

        Args:
            batch: not used.

        Raises:
            HybridError: the Trainer has another optimizer than at the beginning.
        """
        if not self._hooks:
            return
        run_pending(hold=True)
        if self._together:
            if self._trainer.optimizers != [self._optimizer]:
                raise HybridError(
                    "Asynchronous follows the optimizer that the fit began with, and "
                    "trainer.optimizers has another one. Use replicas=Equal()."
                )
            self._together = False
            self._read = flat(self._parameters)
            if self._home is not None:
                self._home.load(self._optimizer)

    @signals_deferred
    def fence(self) -> None:
        """Wait for all replicas; then all have the same weights (collective over the drivers).

        If there was no batch since the last fence, this does nothing.

        Raises:
            HybridError: it is called in the middle of a step, in which weights must not change.
        """
        if self._stepping:
            raise HybridError(
                "Asynchronous lets no replica wait for another one in a step, and this one "
                "logs with on_step=True and sync_dist=True, gathers, or comes to a barrier there. "
                "Log with sync_dist=False or on_step=False, and gather between batches."
            )
        if self._together:
            return
        size = self._read.numel() + len(self._parameters) + 1
        self._take(self._tell(torch.zeros(size, dtype=self._read.dtype)))
        self._together = True
        run_pending(hold=False)
        if self._home is not None:
            self._home.give_state()
            self._report()

    def close(self) -> None:
        """Remove the hooks from the optimizer, restore the Trainer's loop, and end the server."""
        for hook in self._hooks:
            hook.remove()
        begin_batches_alone(self._trainer, alone=False)
        if self._home is not None:
            self._home.end(HybridError("The run is over."))

    @property
    def _parameters(self) -> list[Parameter]:
        return parameters_of(self._optimizer)

    @property
    def _path(self) -> Path | None:
        root = self._trainer.default_root_dir
        # remote file systems do not support appending
        return None if "://" in root else Path(root) / ORDER

    def _serve(self, replica: int, wire: GroupWire) -> None:
        """Pass the messages of another replica to the parameter server, and its answers back.

        Runs in a thread on replica 0 until the server ends.

        Args:
            replica: number of the other replica.
            wire: connection to it.
        """
        home = self._home
        assert home is not None
        try:
            while True:
                home.await_open()
                size = self._read.numel() + len(self._parameters) + 1
                message = torch.empty(size, dtype=self._read.dtype)
                wire.receive(message).wait()
                wire.send(home.take(replica, message)).wait()
        # other threads must not wait for this replica any more
        except BaseException as error:
            home.end(error)

    def _tell(self, message: Tensor) -> Tensor:
        """Send a push or a fence to the parameter server, and return the weights of its answer."""
        if self._home is not None:
            return self._home.take(0, message)
        self._wire.send(message).wait()
        weights = torch.empty_like(self._read)
        self._wire.receive(weights).wait()
        return weights

    @signals_deferred
    def _exchange(self, optimizer: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
        """Before a step of the optimizer, run its closure, push gradients and read new weights.

        A pre-hook of the step, which itself then finds no gradients and changes nothing. Comes to a
        fence at the last batch of an epoch and at the end of the training.

        Returns:
            Arguments and keywords for the step; its closure only returns the loss.
        """
        closure, loss = keywords.get("closure"), None
        self._stepping = True
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._push()
        finally:
            self._stepping = False
        trainer = self._trainer
        last = trainer.is_last_batch or trainer.global_step + 1 == trainer.max_steps
        if last or trainer.received_sigterm:  # what follows is done by all replicas together
            self.fence()
        # the closure has run, and must not run again, which would be another backward
        return arguments, {"closure": lambda: loss}

    def _push(self) -> None:
        parameters = self._parameters
        # refuse weights that were changed here, since the next read would overwrite them silently
        if not _same_bits(flat(parameters), self._read):
            raise HybridError(
                "Asynchronous: replica 0 has the weights, and those of this replica were "
                "changed by hand since it has read them. Change them between epochs, or use "
                "replicas=Equal()."
            )
        self._step = self._trainer.global_step
        self._gradients = [p.grad for p in parameters]
        present = [*(gradient is not None for gradient in self._gradients), True]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        self._take(self._tell(torch.cat([flat(gradients), torch.tensor(present).to(self._read)])))
        for parameter in parameters:
            parameter.grad = None

    def _stepped(self, *_: Any) -> None:
        """After a step of the optimizer, put this replica's gradients back, for hooks to see.

        A post-hook of the step.
        """
        for parameter, gradient in zip(self._parameters, self._gradients):
            parameter.grad = gradient

    @torch.no_grad()
    def _take(self, weights: Tensor) -> None:
        self._read, parameters = weights, self._parameters
        for parameter, part in zip(parameters, weights.split([p.numel() for p in parameters])):
            parameter.copy_(part.view_as(parameter))

    def _report(self) -> None:
        """Append the pushes applied since the last report to `ORDER`, and log their staleness."""
        counts = Counter(version - read for version, _, _, read in self._order)
        if not counts:
            return
        if (path := self._path) is not None:
            with path.open("a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows(self._order)
        self._order.clear()
        mean = sum(age * count for age, count in counts.items()) / counts.total()
        metrics = {"hybrid/staleness_mean": mean, "hybrid/staleness_max": float(max(counts))}
        metrics |= {f"hybrid/pushes_of_staleness_{age}": float(counts[age]) for age in counts}
        for logger in self._trainer.loggers:
            logger.log_metrics(metrics, step=self._step)


def parameters_of(optimizer: SGD) -> list[Parameter]:
    """Return the parameters that an optimizer steps, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def flat(tensors: Any) -> Tensor:
    """Join tensors of one type into one tensor with one dimension, on the CPU."""
    return torch.cat([tensor.detach().to_dense().flatten() for tensor in tensors]).cpu()


def _moved(state: dict[str, Any], parameter: Parameter) -> dict[str, Any]:
    """Copy an optimizer's state of a parameter to the device of the parameter."""
    return {
        name: value.to(parameter.device, copy=True) if isinstance(value, Tensor) else value
        for name, value in state.items()
    }


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, NaNs included."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _needs_all(run: Run) -> Iterator[str]:
    """Yield reasons why replicas of a run would have to do more together than they can.

    Each is the end of a sentence that begins with "Asynchronous(...)", followed by a way out.
    """
    trainer = run.trainer
    if trainer.gradient_clip_val:
        yield f"clips no gradients: gradient_clip_val={trainer.gradient_clip_val}. Leave it out"
    yield from exchanges_more(run)


def _no_plain_steps(run: Run, optimizers: Sequence[Optimizer]) -> Iterator[str]:
    """Yield reasons why a run has no plain step of SGD in each batch.

    They have the form of those of `_needs_all`.

    Args:
        run: the run.
        optimizers: the user's optimizers.
    """
    yield from steps_otherwise(run.trainer, "steps once a batch")
    if len(optimizers) != 1:
        yield f"has one optimizer, and configure_optimizers returns {len(optimizers)}. Return one"
    for optimizer in optimizers:
        if type(optimizer) is not SGD:
            yield (
                f"makes R updates of a part of the gradient each, and {type(optimizer).__name__} "
                "is not torch.optim.SGD: its updates may not shrink with the gradient. Use SGD"
            )
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        kinds = sorted({str(p.dtype) for p in parameters})
        if len(kinds) != 1:
            yield f"takes parameters of one type, and here are {', '.join(kinds)}. Use one"
