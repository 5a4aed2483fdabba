"""Asynchronous data parallelism (``gradient_sync="asgd"``): replicas do not wait for each other.

Replica 0 has the home of the parameters: their newest values, the state of the optimizer and a
version. A replica reads (weights, version), computes the gradient of its batch, and pushes it. The
home may apply what it holds when no read that is still out would become older by it than the bound
of staleness; all that it holds then is one update, weighted 1/R each and summed in the order of the
replicas. With a bound of 0 it waits for all, which is the synchronous step.

At a fence all replicas give up their reads, so that the home can apply everything, and go on from
the same version. Whatever replicas do together has one before it.
"""

import csv
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD

from lightning_hybrid._lightning import rank_zero_info
from lightning_hybrid._lightning_private import steps_alone
from lightning_hybrid.comm import GroupWire
from lightning_hybrid.errors import HybridError
from lightning_hybrid.run.run import Run

ORDER = "asynchronous_order.csv"
"""In the folder of the Trainer: which pushes each version was made of."""

_PUSH, _FENCE, _CLOSE = range(3)
_TAG = 2**21  # of the group of the drivers; nothing else sends on it

Read = tuple[int, Tensor]


class Home:
    """The newest parameters, and what may be applied to them when; its methods block.

    Args:
        parameters: of replica 0; they are copied.
        optimizer: of replica 0: its options and, at first, its state are taken.
        replicas: their number.
        bound: the largest staleness.
        order: hears of each push that is applied: version, replica, its number, version read.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        optimizer: SGD,
        replicas: int,
        bound: int,
        order: Callable[[tuple[int, int, int, int]], None],
    ) -> None:
        copies = {p: Parameter(p.detach().cpu().clone()) for p in parameters}
        self._parameters, self._theirs = list(copies.values()), optimizer
        self._copies = copies
        groups = [
            {**group, "params": [copies[p] for p in group["params"] if p in copies]}
            for group in optimizer.param_groups
        ]
        self._optimizer = SGD(groups, lr=0.0)
        for parameter, copy in copies.items():
            for name, value in optimizer.state.get(parameter, {}).items():
                kept = value.detach().cpu().clone() if isinstance(value, Tensor) else value
                self._optimizer.state[copy][name] = kept
        self._replicas, self._bound, self._order = replicas, bound, order
        self._changed = Condition()
        self.version = 0
        self._reads = dict.fromkeys(range(replicas), 0)
        self._held: dict[int, tuple[int, Tensor, list[bool]]] = {}
        self._pushes = Counter[int]()
        self._at_fence: set[int] = set()
        self._fences = 0
        self._open = False
        self._error: BaseException | None = None
        self.staleness = Counter[int]()

    def flat(self) -> Tensor:
        """The parameters in one tensor."""
        return torch.cat([p.detach().flatten() for p in self._parameters])

    def push(self, replica: int, version: int, gradient: Tensor, present: list[bool]) -> Read:
        """Hand a gradient in; when it is applied, read again.

        Args:
            replica: whose it is.
            version: of the weights that it was computed with.
            gradient: of all parameters.
            present: whether each parameter has one.
        """
        with self._changed:
            del self._reads[replica]
            self._held[replica] = version, gradient, present
            self._apply()
            self._wait(lambda: replica not in self._held)
            return self._reads[replica], self._newest

    def fence(self, replica: int) -> Read:
        """Give the read up, and read again when all replicas are here."""
        with self._changed:
            self._reads.pop(replica)
            self._at_fence.add(replica)
            self._apply()
            number = self._fences
            if len(self._at_fence) == self._replicas:
                self._open = False
                self._take_options()
                self._at_fence.clear()
                self._fences += 1
                self._reads = dict.fromkeys(range(self._replicas), self.version)
                self._newest = self.flat()
                self._changed.notify_all()
            self._wait(lambda: self._fences > number)
            return self.version, self._newest

    def open(self) -> None:
        """Replica 0 trains on, so that the others will be heard from."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def await_open(self) -> None:
        """Wait for :meth:`open` after a fence: no receive is to time out in a long evaluation."""
        with self._changed:
            self._wait(lambda: self._open)

    def fail(self, error: BaseException) -> None:
        """Wake all who wait, with an error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def give_state(self) -> None:
        """Give the optimizer of replica 0 the state of the home."""
        for parameter, copy in self._copies.items():
            for name, value in self._optimizer.state.get(copy, {}).items():
                kept = value.to(parameter.device, copy=True) if isinstance(value, Tensor) else value
                self._theirs.state[parameter][name] = kept

    def _wait(self, over: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._error is not None or over())
        if self._error is not None:
            raise self._error

    def _take_options(self) -> None:
        """A scheduler changes them on replica 0."""
        for ours, theirs in zip(self._optimizer.param_groups, self._theirs.param_groups):
            ours.update({name: value for name, value in theirs.items() if name != "params"})

    def _apply(self) -> None:
        """Make one update of all that is held, if no read becomes too old by it."""
        if not self._held or any(
            self.version + 1 - read > self._bound for read in self._reads.values()
        ):
            return
        pushes = sorted(self._held.items())
        sizes = [p.numel() for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        for replica, (version, gradient, present) in pushes:
            gradient = gradient * (1 / self._replicas)
            for parameter, part, there in zip(self._parameters, gradient.split(sizes), present):
                if there and parameter.grad is None:
                    parameter.grad = part.view_as(parameter)
                elif there:
                    parameter.grad += part.view_as(parameter)
            self.staleness[self.version - version] += 1
            self._order((self.version, replica, self._pushes[replica], version))
            self._pushes[replica] += 1
        self._optimizer.step()
        self.version += 1
        self._newest = self.flat()
        for replica, _ in pushes:
            self._reads[replica] = self.version
        self._held.clear()
        self._changed.notify_all()


class AsynchronousReplica:
    """One replica's part: its optimizer pushes to the home and reads from it.

    Args:
        run: that is about to begin.
        optimizer: the user's.
    """

    def __init__(self, run: Run, optimizer: SGD) -> None:
        self._run, self._optimizer = run, optimizer
        mesh = run.world.mesh
        self._replica, self._replicas = mesh.coordinates.dp_rank, mesh.coordinates.replicas
        self._group = mesh.drivers
        self._parameters = [
            p for group in optimizer.param_groups for p in group["params"] if p.requires_grad
        ]
        self._numel = sum(p.numel() for p in self._parameters)
        self._version = 0
        self._started = self._fenced = False
        self._home: Home | None = None
        self._wire: GroupWire | None = None
        self._threads: list[Thread] = []
        self._rows: list[tuple[int, int, int, int]] = []
        vars(optimizer)["step"] = self._step
        vars(optimizer)["_opt_called"] = True  # torch's schedulers ask whether it has stepped
        steps_alone(run.trainer, True)
        bound = run.config.staleness
        rank_zero_info(
            f"gradient_sync='asgd', staleness={bound}: a replica may go on with weights that are "
            f"up to {bound} updates old, so that one that stalls at random does not stop the "
            "others. Where a device is always slower, all still have as many batches to do, and "
            "nothing is gained: use balance='speed' there."
        )

    def batch_starts(self, batch_idx: int) -> None:
        """A batch begins; the first one, and that of each epoch, at a fence."""
        if not self._started:
            self._start()
        if batch_idx == 0:
            self._fenced = False  # schedulers have changed options since the end of the epoch
            self.fence()
        if self._home is not None:
            self._home.open()

    def fence(self) -> None:
        """Wait until all replicas are here and have the same weights."""
        if not self._started or self._fenced:
            return
        self._fenced = True
        if self._home is not None:
            self._home.open()
            self._take(self._home.fence(0))
            self._home.give_state()
            self._write()
        else:
            self._tell(_FENCE)
            self._hear()

    def close(self) -> None:
        """Training is over."""
        self.fence()
        if self._started and self._home is None:
            self._tell(_CLOSE)
        if self._home is not None:
            self._home.open()
            for thread in self._threads:
                thread.join()
        self._started = False
        self.release()

    def release(self) -> None:
        """The optimizer and the Trainer's loop are as before."""
        vars(self._optimizer).pop("step", None)
        steps_alone(self._run.trainer, False)
        if self._home is not None:
            self._home.fail(HybridError("The run is over."))

    def _start(self) -> None:
        self._started = True
        if self._replica:
            self._wire = GroupWire(self._group, 0, "replica 0", _TAG)
            return
        bound = self._run.config.staleness
        home = Home(self._parameters, self._optimizer, self._replicas, bound, self._rows.append)
        self._home = home
        path = Path(self._run.trainer.default_root_dir) / ORDER
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("version,replica,push,read\n")
        for replica in range(1, self._replicas):
            wire = GroupWire(self._group, replica, f"replica {replica}", _TAG)
            thread = Thread(target=self._serve, args=(home, replica, wire), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _serve(self, home: Home, replica: int, wire: GroupWire) -> None:
        """On replica 0, a thread: what another replica asks of the home."""
        head = torch.empty(2 + len(self._parameters), dtype=torch.int64)
        try:
            while True:
                home.await_open()
                wire.receive(head).wait()
                kind, version, *present = head.tolist()
                if kind == _CLOSE:
                    return
                if kind == _PUSH:
                    gradient = self._empty()
                    wire.receive(gradient).wait()
                    version, weights = home.push(replica, version, gradient, [*map(bool, present)])
                else:
                    version, weights = home.fence(replica)
                wire.send(torch.tensor([version])).wait()
                wire.send(weights).wait()
        except BaseException as error:
            home.fail(error)

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        """What `optimizer.step` is: push, then read."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = [p.grad for p in self._parameters]
        flat = torch.cat(
            [
                (torch.zeros_like(p) if g is None else g).detach().flatten()
                for p, g in zip(self._parameters, gradients)
            ]
        ).cpu()
        present = [g is not None for g in gradients]
        self._fenced = False
        if self._home is not None:
            self._take(self._home.push(0, self._version, flat, present))
        else:
            self._tell(_PUSH, present)
            self._peer.send(flat).wait()
            self._hear()
        trainer = self._run.trainer
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self.fence()
            self._log()
        return loss

    @property
    def _peer(self) -> GroupWire:
        assert self._wire is not None
        return self._wire

    def _tell(self, kind: int, present: Sequence[bool] = ()) -> None:
        head = torch.zeros(2 + len(self._parameters), dtype=torch.int64)
        head[0], head[1] = kind, self._version
        head[2 : 2 + len(present)] = torch.tensor(present, dtype=torch.int64)
        self._peer.send(head).wait()

    def _hear(self) -> None:
        version, weights = torch.empty(1, dtype=torch.int64), self._empty()
        self._peer.receive(version).wait()
        self._peer.receive(weights).wait()
        self._take((int(version), weights))

    def _empty(self) -> Tensor:
        return torch.empty(self._numel, dtype=self._parameters[0].dtype)

    @torch.no_grad()
    def _take(self, read: Read) -> None:
        self._version, weights = read
        parts = weights.split([p.numel() for p in self._parameters])
        for parameter, part in zip(self._parameters, parts):
            parameter.copy_(part.view_as(parameter))

    def _write(self) -> None:
        with (Path(self._run.trainer.default_root_dir) / ORDER).open("a", newline="") as file:
            csv.writer(file).writerows(self._rows)
        self._rows.clear()

    def _log(self) -> None:
        """The histogram of staleness of an epoch."""
        if self._home is None:
            return
        counts = self._home.staleness
        metrics = {f"staleness/{age}": float(number) for age, number in sorted(counts.items())}
        if self._run.config.log_performance:
            for logger in self._run.trainer.loggers:
                with suppress(NotImplementedError):
                    logger.log_metrics(metrics, step=self._run.trainer.global_step)
        counts.clear()
