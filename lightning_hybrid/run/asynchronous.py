"""Asynchronous data parallelism (``gradient_sync="asgd"``): replicas do not wait for each other.

Replica 0 has the home of the parameters: their newest values, the state of the optimizer and a
version. A replica reads the weights, computes the gradient of its batch, and pushes it. The home
applies what it holds as soon as no read that is still out would become older by it than the bound
of staleness; all that it holds then is one update, weighted 1/R each and summed in the order of the
replicas. With a bound of 0 it waits for all, which is the synchronous step.

Before they do anything together all replicas come to a fence: they give up their reads, so that the
home can apply everything, and have the same weights then. The next batch begins with what replica 0
has by then: what hooks have changed between the two is kept.
"""

import csv
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import Condition
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD

from lightning_hybrid._lightning_private import begin_batches_alone
from lightning_hybrid.comm import BackgroundThread, GroupWire, run_pending, signals_deferred
from lightning_hybrid.errors import HybridError
from lightning_hybrid.run.run import Run

ORDER = "asynchronous_order.csv"
"""In the folder of the Trainer: which pushes each update was made of."""

_TAG = 2**21  # of the group of the drivers; nothing else sends on it

Push = tuple[int, int, int, int]
"""The version that it was applied to, its replica, its number there, the version it has read."""


class Home:
    """The newest parameters, and what may be applied to them when. All of its methods may block.

    A message of a replica is one tensor: its gradients one behind the other, for each parameter
    whether it has one, and whether this is a push; zeros are a fence.

    Args:
        replicas: their number.
        bound: the largest staleness.
        note: hears of each push that is applied.
    """

    def __init__(self, replicas: int, bound: int, note: Callable[[Push], None]) -> None:
        self._replicas, self._bound, self._note = replicas, bound, note
        self._changed = Condition()
        self._version = 0
        self._reads: dict[int, int] = {}  # versions that replicas compute with
        self._held: dict[int, tuple[int, Tensor]] = {}  # pushes that are not applied yet
        self._given: dict[int, Tensor] = {}  # weights that replicas are to read
        self._pushes = Counter[int]()
        self._open = False
        self._error: BaseException | None = None

    def load(self, optimizer: SGD) -> None:
        """From a fence on: all replicas compute with the weights of replica 0.

        Args:
            optimizer: of replica 0; its options are followed, its state is taken.
        """
        with self._changed:
            self._theirs = optimizer
            # messages come over gloo, so the home is on the CPU
            copies = {p: Parameter(p.detach().cpu().clone()) for p in parameters_of(optimizer)}
            self._copies = copies
            groups = [
                {**group, "params": [copies[p] for p in group["params"]]}
                for group in optimizer.param_groups
            ]
            # (each group brings its own rate, so this one is never used)
            self._optimizer = SGD(groups, lr=0.0)
            for parameter, copy in copies.items():
                if parameter in optimizer.state:
                    self._optimizer.state[copy] = _moved(optimizer.state[parameter], copy)
            self._reads = dict.fromkeys(range(self._replicas), self._version)
            self._open = True
            self._changed.notify_all()

    def await_open(self) -> None:
        """Wait for :meth:`load`: no receive is to time out in a long evaluation."""
        with self._changed:
            self._wait(lambda: self._open)

    def take(self, replica: int, message: Tensor) -> Tensor:
        """Take a push or a fence; when it is applied, or all are there, give the newest weights."""
        with self._changed:
            # it computes with nothing now, and holds nobody up
            read = self._reads.pop(replica)
            if message[-1]:
                self._held[replica] = read, message
                if replica == 0:
                    self._follow_options()
            if self._held and all(
                self._version + 1 - read <= self._bound for read in self._reads.values()
            ):
                self._update()
            if not self._reads:  # after an update, those have one that have pushed
                self._open = False
                self._given = dict.fromkeys(range(self._replicas), flat(self._copies.values()))
            self._changed.notify_all()
            self._wait(lambda: replica in self._given)
            return self._given.pop(replica)

    def give_state(self) -> None:
        """At a fence: give the optimizer of replica 0 the state of the home."""
        for parameter, copy in self._copies.items():
            if copy in self._optimizer.state:
                self._theirs.state[parameter] = _moved(self._optimizer.state[copy], parameter)

    def end(self, error: BaseException) -> None:
        """Wake all who wait, with an error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _wait(self, over: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._error is not None or over())
        if self._error is not None:
            raise self._error

    def _follow_options(self) -> None:
        """A scheduler may have changed those of replica 0, and counts its steps."""
        for ours, theirs in zip(self._optimizer.param_groups, self._theirs.param_groups):
            ours.update({name: value for name, value in theirs.items() if name != "params"})

    def _update(self) -> None:
        """Make one update of all that is held."""
        parameters = list(self._copies.values())
        sizes = [*(p.numel() for p in parameters), len(parameters) + 1]
        self._optimizer.zero_grad()
        # rounding depends on the order of a sum, and pushes arrive in any
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


class AsynchronousReplica:
    """One replica's part: a step of its optimizer pushes to the home and reads from it.

    Args:
        run: that is about to begin.
        optimizer: the user's.
        say: prints a line, once for all replicas.
    """

    def __init__(self, run: Run, optimizer: SGD, say: Callable[[str], None]) -> None:
        self._trainer, self._optimizer = run.trainer, optimizer
        mesh, bound = run.world.mesh, run.config.staleness
        replicas = mesh.coordinates.replicas
        self._together, self._stepping = True, False
        self._step = 0
        self._gradients: list[Tensor | None] = []
        self._read = torch.empty(0)
        self._order: list[Push] = []
        self._home: Home | None = None
        self._wire = GroupWire(mesh.drivers, 0, "replica 0", _TAG)
        if mesh.coordinates.dp_rank == 0:
            self._home = Home(replicas, bound, self._order.append)
            for replica in range(1, replicas):
                wire = GroupWire(mesh.drivers, replica, f"replica {replica}", _TAG)
                serve = BackgroundThread(self._serve, "hybrid-home", replica, wire, awaited=True)
                serve.start()
            if (path := self._path) is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("version,replica,push,read\n")
        self._hooks = [
            optimizer.register_step_pre_hook(self._exchange),
            optimizer.register_step_post_hook(self._stepped),
        ]
        begin_batches_alone(run.trainer, alone=True)
        say(
            f"gradient_sync='asgd', staleness={bound}: replicas go on with weights that are up to "
            f"{bound} updates old, each of which has momentum and weight decay of its own. That "
            "gains time where devices stall at random; where one is always slower, all have as "
            "many batches to do as it has: use balance='speed' there."
        )

    def batch_starts(self) -> None:
        """A batch begins. Handlers of signals wait for its next, or for a fence."""
        run_pending(hold=True)
        if self._together:
            if self._trainer.optimizers != [self._optimizer]:
                raise HybridError(
                    "gradient_sync='asgd' follows the optimizer that the fit began with, and "
                    "trainer.optimizers has another one. Use gradient_sync='allreduce'."
                )
            self._together = False
            self._read = flat(self._parameters)
            if self._home is not None:
                self._home.load(self._optimizer)

    @signals_deferred
    def fence(self) -> None:
        """Wait until all replicas are here and have the same weights.

        Raises:
            HybridError: this is the middle of a step, whose weights must stay as they are.
        """
        if self._stepping:
            raise HybridError(
                "gradient_sync='asgd' lets no replica wait for another one in a step, and this one "
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
        """The optimizer and the Trainer's loop are as before."""
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
        # a file system behind a URL cannot be appended to
        return None if "://" in root else Path(root) / ORDER

    def _serve(self, replica: int, wire: GroupWire) -> None:
        """On replica 0, a thread: what another replica asks of the home."""
        home = self._home
        assert home is not None
        try:
            while True:
                home.await_open()
                size = self._read.numel() + len(self._parameters) + 1
                message = torch.empty(size, dtype=self._read.dtype)
                wire.receive(message).wait()
                wire.send(home.take(replica, message)).wait()
        # whoever waits for the home must not wait for a thread that is gone
        except BaseException as error:
            home.end(error)

    def _tell(self, message: Tensor) -> Tensor:
        """What the home answers."""
        if self._home is not None:
            return self._home.take(0, message)
        self._wire.send(message).wait()
        weights = torch.empty_like(self._read)
        self._wire.receive(weights).wait()
        return weights

    @signals_deferred
    def _exchange(self, optimizer: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
        """Before the optimizer's own step, which then finds no gradient: push, then read."""
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
        if last or trainer.received_sigterm:  # what comes then finds the replicas together
            self.fence()
        # the loss is there already: to run the closure again would be another backward
        return arguments, {"closure": lambda: loss}

    def _push(self) -> None:
        parameters = self._parameters
        # the next read would overwrite what was changed here, and nobody would hear of it
        if not _same_bits(flat(parameters), self._read):
            raise HybridError(
                "gradient_sync='asgd': replica 0 has the weights, and those of this replica were "
                "changed by hand since it has read them. Change them between epochs, or use "
                "gradient_sync='allreduce'."
            )
        self._step = self._trainer.global_step
        self._gradients = [p.grad for p in parameters]
        present = [*(gradient is not None for gradient in self._gradients), True]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        self._take(self._tell(torch.cat([flat(gradients), torch.tensor(present).to(self._read)])))
        for parameter in parameters:
            parameter.grad = None

    def _stepped(self, *_: Any) -> None:
        """After the optimizer's own step: hooks see the gradients of this replica."""
        for parameter, gradient in zip(self._parameters, self._gradients):
            parameter.grad = gradient

    @torch.no_grad()
    def _take(self, weights: Tensor) -> None:
        self._read, parameters = weights, self._parameters
        for parameter, part in zip(parameters, weights.split([p.numel() for p in parameters])):
            parameter.copy_(part.view_as(parameter))

    def _report(self) -> None:
        """What was applied since the last fence, to the file and the loggers."""
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
    """All that it steps, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def flat(tensors: Any) -> Tensor:
    """Tensors of one type, one behind the other, on the CPU."""
    return torch.cat([tensor.detach().to_dense().flatten() for tensor in tensors]).cpu()


def _moved(state: dict[str, Any], parameter: Parameter) -> dict[str, Any]:
    """A state of an optimizer, copied to where a parameter is."""
    return {
        name: value.to(parameter.device, copy=True) if isinstance(value, Tensor) else value
        for name, value in state.items()
    }


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, NaNs included."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
