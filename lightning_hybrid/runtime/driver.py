"""The driver: it runs the user's code, owns the last stage, and drives the workers of its replica.

(Under a free placement it may own earlier stages too.)

To the code around it a call of the network is one node of autograd (:class:`_NetworkCall`). Its
forward runs the pipeline and returns the outputs; its backward sends the gradients back through
the stages.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from lightning_hybrid.comm.call_key import CallKey, Precision
from lightning_hybrid.comm.collectives import meet
from lightning_hybrid.comm.failure import Failure
from lightning_hybrid.comm.heartbeat import Heartbeat
from lightning_hybrid.comm.links import Links, link_stages
from lightning_hybrid.comm.mesh import Mesh
from lightning_hybrid.comm.protocol import (
    Answer,
    Backward,
    Check,
    ClearGradients,
    ClipValues,
    Command,
    Cut,
    End,
    ForgetFailure,
    Forward,
    Free,
    GiveBorrowedGradients,
    GiveGradients,
    GiveOptimizer,
    GiveWeights,
    GradientNorm,
    Hyperparameters,
    Kind,
    NameGradients,
    OptimizerCommand,
    Reduce,
    Report,
    ScaleGradients,
    Share,
    Step,
    SynchronizeBuffers,
    TakeGradients,
    TakeGroups,
    TakeOptimizers,
    TakeWeights,
    Unscale,
    ZeroGrad,
)
from lightning_hybrid.comm.signals import signals_deferred
from lightning_hybrid.comm.specs import TensorSpec
from lightning_hybrid.compat import (
    as_they_are,
    backward_reaches,
    forward_derivatives,
    graph_is_kept,
)
from lightning_hybrid.errors import HybridError, NetworkError
from lightning_hybrid.network import NetworkGraph, StageCode, make_stages
from lightning_hybrid.network.deferred import is_deferred, is_unmade, make
from lightning_hybrid.network.places import place_now
from lightning_hybrid.network.splitting import fits
from lightning_hybrid.runtime.borrowing import Borrowing
from lightning_hybrid.runtime.calls import Call, Gradients, Values
from lightning_hybrid.runtime.clipping import clip_factor, gradient_norms, gradients_of
from lightning_hybrid.runtime.engine import Engine, StageOptions
from lightning_hybrid.runtime.faults import read_fault
from lightning_hybrid.runtime.large import (
    Claim,
    leave_to_worker,
    refuse_tied,
    share_optimizers,
    to_send,
    whole,
)
from lightning_hybrid.runtime.optimizer_trial import announce, refuse_deferred, why_whole
from lightning_hybrid.runtime.optimizers import OptimizerLink, ship
from lightning_hybrid.runtime.performance import Stopwatch
from lightning_hybrid.runtime.random import (
    draw_number,
    generators_of_microbatch,
    microbatch_seed,
    random_state,
    set_random_state,
)
from lightning_hybrid.runtime.remote import RemoteTensors
from lightning_hybrid.runtime.replicas import Copies, state_buffers
from lightning_hybrid.runtime.scaling import unscale
from lightning_hybrid.runtime.staged import (
    StagedNetwork,
    borrowed_parameters,
    own_buffers,
    own_parameters,
    tensors_of,
    write_tensors,
)
from lightning_hybrid.runtime.trace import Trace

_ALL = -1  # every bit


class Driver:
    """Drives one replica through one run.

    Args:
        module: the LightningModule.
        mesh: the groups.
        device: the driver's own.
        seed: of the random numbers inside networks.
        options: how stages compute.
        watch: adds up the time in which this rank computes.
        share: whether replicas may differ in weights that are not made yet, so that those of
            replica 0 must travel.
        say: tells the user something, in one line.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        device: torch.device,
        seed: int,
        options: StageOptions,
        watch: Stopwatch | None = None,
        *,
        share: bool = False,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._say = say
        self._share, self._share_optimizers = share, False
        self._options = options
        self.module, self._mesh, self.device, self._seed = module, mesh, device, seed
        self._workers = range(1, mesh.coordinates.ranks_per_replica)
        self._channels = {worker: mesh.channel(worker) for worker in self._workers}
        self._heartbeat: Heartbeat | None = None
        if self._channels:
            self._heartbeat = Heartbeat([*self._channels.values()], mesh.timeout)
        self._trace = Trace(mesh.coordinates.rank, str(mesh.coordinates), watch)
        self._networks: list[DrivenNetwork] = []
        self._optimizers: list[OptimizerLink] = []
        self._names = {id(p): name for name, p in module.named_parameters()}
        # what a hook makes on this rank alone, the workers do not have
        self._shared = frozenset(tensors_of(module))
        self._settled = False
        self._in_pass = False  # workers may be waiting for a stage of this rank
        self._rest = self._copies_of_the_rest()
        self.synchronize = True  # off while gradients accumulate
        self._synchronized = True  # in the last step
        self._has_state = mesh.coordinates.replicas > 1 and bool(state_buffers(module))
        self._batch = self._calls_in_step = self._streams_in_step = self._evaluations = 0
        self._stale: set[int] = set()  # networks whose gradients are not averaged yet
        self._owner: dict[str, tuple[int, int]] = {}  # of remote tensors: network, worker
        self._sharers: dict[str, list[int]] = {}  # further workers with the same constant buffer
        self.remote = RemoteTensors(self)
        self._borrowing = Borrowing(self, self._send_weights, self._collect_borrowed)

    # ------------------------------------------------------------------ the network

    @signals_deferred
    def add_network(
        self,
        name: str,
        network: nn.Module,
        graph: NetworkGraph,
        codes: Sequence[StageCode],
        *,
        devices: Sequence[int],
        parts: int,
        schedule: str,
        continues: bool,
    ) -> "DrivenNetwork":
        """Give every rank of the replica its stages of a network that has been cut.

        Args:
            name: dotted name of the network in the LightningModule.
            network: the module.
            graph: its graph.
            codes: its stages.
            devices: ``pp_rank`` of each stage; the last one is 0, this rank.
            parts: into how many slices a batch is split in calls of this graph.
            schedule: name of the schedule.
            continues: whether the code around a call draws random numbers of the same stream.

        Raises:
            NetworkError: code of a stage cannot travel to its rank.
            Exception: of a worker that cannot make its stages.
            DeferredError: stages share a weight that is made in ``configure_model``.
        """
        number = len(self._networks)
        prefix = f"{name}." if name else ""
        tensors = tensors_of(self.module)
        parameters = dict(network.named_parameters())
        borrowed = borrowed_parameters(
            [[n for n in code.owned if n in parameters] for code in codes], devices
        )
        refuse_tied(name, tensors, borrowed)
        self._refuse_compiled(name, borrowed[0])
        links = self._order_cut(number, name, codes, devices, borrowed, schedule)
        remote = []
        for worker in self._workers:
            lent = borrowed[worker]
            theirs = [code for code, device in zip(codes, devices) if device == worker]
            names = {n: prefix + n for code in theirs for n in code.owned}
            self._send_weights(worker, to_send(tensors, names.values()))
            remote.append(tuple(full for n, full in names.items() if n not in lent))
            for full in self._owner.keys() & set(remote[-1]):
                self._sharers.setdefault(full, []).append(self._owner[full][1])
            self._owner |= dict.fromkeys(remote[-1], (number, worker))
            leave_to_worker(tensors, remote[-1], self._mesh.coordinates, worker)
        stages = dict(zip(links, make_stages([codes[n] for n in links], network, self.device)))
        here = [*stages.values()]
        mine = [prefix + n for part in here for n in part.tensor_names]
        Claim(self.module, mine, (), self._mesh.coordinates).settle(())
        for part in here:
            part.move(self.device)
        own = own_parameters(here, borrowed[0])
        state = partial(state_buffers, network)
        buffers = partial(own_buffers, here)
        copies = Copies(own, buffers, self._mesh.data_parallel, self._trace, state)
        engine = Engine(
            stages,
            devices,
            self._mesh.coordinates,
            links,
            copies,
            self.device,
            schedule,
            self._seed,
            self._trace,
            self._options,
        )
        driven = DrivenNetwork(
            self, number, name, network, engine, graph, parts, remote, borrowed[0]
        )
        driven.owned_by_stage = [frozenset(code.owned) for code in codes]
        driven.devices, driven.schedule = tuple(devices), schedule
        driven.continues = continues
        self._networks.append(driven)
        self._rest.close()
        self._rest = self._copies_of_the_rest()
        self.ship_optimizers(fresh=0 if number else _ALL)
        owned_there = (name for owned in remote for name in owned)
        used_here = [prefix + name for part in here for name in part.buffer_names]
        windows = (n for n in owned_there if not is_unmade(tensors[n]))
        self.remote.add(self.module, windows, used_here)
        self._borrowing.add([[prefix + n for n in sorted(names)] for names in borrowed])
        if self._share:
            self.tell(Share(number, self._share_optimizers))
            copies.broadcast_weights()
            self._rest.broadcast_weights()
            if self._share_optimizers:
                optimizers = [link.optimizer for link in self._optimizers]
                share_optimizers(optimizers, self._names, self._mesh.data_parallel, self.device)
        return driven

    def _refuse_compiled(self, name: str, borrowed: Iterable[str]) -> None:
        for parameter in borrowed if self._options.compiled else ():
            raise NetworkError(
                f"compile_stages=True: the driver's stage of network {name!r} shares {parameter!r} "
                "with that of another rank, and torch.compile would not hear of its changes. Cut "
                "elsewhere (HybridGabraStrategy(allocation=[...])), or leave compile_stages out."
            )

    def refresh_borrowed(self, *, grad: bool) -> None:
        """A forward follows: tied parameters must have one value in all stages."""
        self._borrowing.refresh(grad=grad)

    def _send_weights(self, worker: int, values: Mapping[str, Tensor]) -> None:
        self._channels[worker].send(TakeWeights(values.items()))

    @signals_deferred
    def _collect_borrowed(self) -> Mapping[str, Tensor]:
        found: dict[str, Tensor] = {}
        for answer in self._ask(GiveBorrowedGradients()):
            for name, value in answer.tensors:
                found[name] = found[name] + value if name in found else value
        return found

    def keep(self, module: nn.Module) -> None:
        """Take in a network that is not cut."""
        make((*module.parameters(), *module.buffers()))
        module.to(self.device)
        self._rest.close()
        self._rest = self._copies_of_the_rest()
        if self._share:
            self._rest.broadcast_weights()

    def expect_optimizers(self) -> None:
        """Only replica 0 has loaded the state of optimizers."""
        self._share_optimizers = self._share

    def add_variant(
        self, network: "DrivenNetwork", graph: NetworkGraph, codes: Sequence[StageCode], parts: int
    ) -> None:
        """Give every rank of the replica its stages of another graph of the same network.

        Args:
            network: the network.
            graph: the graph.
            codes: its stages; each uses tensors that its rank has.
            parts: into how many micro-batches a batch may be split.
        """
        number, devices = network.number, network.devices
        nobody = [frozenset[str]() for _ in (0, *self._workers)]
        self._order_cut(number, network.name, codes, devices, nobody, network.schedule)
        here = [own.number for own in network.engine.owned]
        stages = make_stages([codes[n] for n in here], network.module, self.device)
        network.engine.add_variant(dict(zip(here, stages)))
        network.add_graph(graph, parts)

    @signals_deferred
    def _order_cut(
        self,
        number: int,
        name: str,
        codes: Sequence[StageCode],
        devices: Sequence[int],
        borrowed: Sequence[frozenset[str]],
        schedule: str,
    ) -> dict[int, Links]:
        """Have the workers make their stages. Returns the links of those that are here, if new."""
        for code in codes:
            code.code.check()
        self._refuse_in_pass()
        self.remote.flush()
        for worker in self._workers:
            theirs = {n: codes[n] for n, device in enumerate(devices) if device == worker}
            order = Cut(
                number, name, theirs, tuple(devices), borrowed[worker], schedule, self._seed
            )
            self._channels[worker].send(order)
        links = {}
        if number == len(self._networks):
            links = link_stages(self._mesh, devices, self.device)
        self._hear_answers(self._workers)
        return links

    def _copies_of_the_rest(self) -> Copies:
        """The copies of what no network owns: temperatures, loss weights, small networks."""
        cut = {id(t) for network in self._networks for t in network.tensors()}
        parameters = [p for p in self.module.parameters() if not (id(p) in cut or is_unmade(p))]
        if self._networks or self._settled:  # until then everything waits on the CPU
            for tensor in (*parameters, *self._buffers_of_the_rest()):
                tensor.data = tensor.data.to(self.device)
        state = partial(state_buffers, self.module)
        return Copies(
            parameters, self._buffers_of_the_rest, self._mesh.data_parallel, self._trace, state
        )

    def _buffers_of_the_rest(self) -> list[Tensor]:
        cut = {id(t) for network in self._networks for t in network.tensors()}
        return [b for b in self.module.buffers() if not (id(b) in cut or is_unmade(b))]

    def settle(self) -> None:
        """No network is cut: all that waited for one is the driver's own."""
        if not self._settled:
            self._settled = True
            self._rest.close()
            self._rest = self._copies_of_the_rest()

    def tell(self, command: Command) -> None:
        """Send a command to every worker, without waiting.

        Raises:
            HybridError: in the middle of a pass; see :meth:`passing`.
        """
        self._tell(dict.fromkeys(self._workers, command))

    def _tell(self, commands: Mapping[int, Command]) -> None:
        """Send some workers a command each."""
        if not commands:
            return
        self._refuse_in_pass()
        self.remote.flush()
        for worker, command in commands.items():
            self.remote.outdate(*command.outdates)
            self._channels[worker].send(command)

    def _ask(self, command: Command) -> list[Answer]:
        """Send a command to every worker and wait for all answers.

        Raises:
            Exception: of a worker, now or before; caused by a RemoteError.
        """
        return self._ask_some(dict.fromkeys(self._workers, command))

    @signals_deferred
    def _ask_some(self, commands: Mapping[int, Command]) -> list[Answer]:
        """Likewise, to some workers a command each."""
        self._tell(commands)
        return self._hear_answers(commands)

    def _hear_answers(self, workers: Iterable[int]) -> list[Answer]:
        answers = [self._channels[worker].receive(Answer) for worker in workers]
        for answer in answers:
            if answer.failure is not None:
                raise answer.failure.exception()
        return answers

    @contextmanager
    def passing(self, engine: Engine) -> Iterator[None]:
        """Inside, the pipeline runs.

        A worker that waits for an earlier stage of this rank would take a command for what it waits
        for, and could not answer. With one stage per rank it hears a command after the pass.
        """
        self._in_pass = len(engine.owned) > 1
        try:
            yield
        finally:
            self._in_pass = False

    def _refuse_in_pass(self) -> None:
        if self._in_pass:
            raise HybridError(
                "A weight, buffer or gradient that another rank owns was read or changed, or an "
                "optimizer stepped, in the middle of a pass through the stages, as by a hook on a "
                "module or parameter. Where a device has several stages that is not possible: give "
                "each device one (HybridGabraStrategy(contiguous=True), or such a plan)."
            )

    # ------------------------------------------------------------------ a step

    def begin_step(self, batch: int) -> None:
        """A `training_step` begins: count its calls of networks anew.

        Args:
            batch: how many training batches the run has seen before.
        """
        self._batch, self._calls_in_step, self._streams_in_step = batch, 0, 0
        self.remote.begin_step()
        if self._has_state and self._synchronized:
            self.broadcast_buffers(state=True)
        self._synchronized = self.synchronize

    def draw_number(self, grad: bool) -> int:
        """The number of the next call, for its random numbers."""
        if grad:
            return draw_number(self._batch, self._calls_in_step + self._streams_in_step)
        self._evaluations += 1  # networks that draw without gradients (dropout at test time)
        return -self._evaluations

    def one_stream(self) -> AbstractContextManager[None]:
        """Inside is one call, whole: this rank draws from the generators that the call has."""
        grad, replica = torch.is_grad_enabled(), self._mesh.coordinates.dp_rank
        seed = microbatch_seed(self._seed, replica, self.draw_number(grad), 0)
        self._streams_in_step += grad
        return generators_of_microbatch(seed, self.device)

    def note_call(self) -> None:
        """A differentiable call of a network was made."""
        self._calls_in_step += 1

    def overlaps(self) -> bool:
        """Whether the backward of the one call in this step may average gradients as it goes.

        With several calls the last of their backwards is not known in advance, and what a penalty
        on remote parameters adds comes later; then the gradients are averaged when
        `loss.backward()` is over. Counting calls, and not open ones, gives all replicas the same
        answer.
        """
        alone = not self.remote.in_graph and not self._borrowing
        return self.synchronize and self._calls_in_step == 1 and alone

    def note_gradients(self, network: int, *, averaged: bool) -> None:
        """A backward has added to the gradients of a network."""
        self._borrowing.note_backward()
        if not averaged:
            self._stale.add(network)

    def before_backward(self) -> None:
        """`loss.backward()` comes. Without stages its gradients are final as they come."""
        if self.synchronize and not self._workers:
            self._rest.arm()

    def _settle_gradients(self) -> None:
        """Have the gradients where they belong: those of penalties and of tied parameters."""
        self.remote.flush()
        self._borrowing.settle()

    @signals_deferred
    def after_backward(self) -> None:
        """Average over the replicas what the backward passes have not averaged on their way."""
        self._settle_gradients()
        if not self.synchronize:
            return
        for network in sorted(self._stale):
            self.tell(Reduce(network))
            self._networks[network].engine.copies.reduce()
        self._stale.clear()
        if self._workers:
            self._rest.arm()
        self._rest.finish()

    @signals_deferred
    def broadcast_buffers(self, *, state: bool = False) -> None:
        """Give every replica the buffers of replica 0 (collective over the drivers).

        Args:
            state: only those that training steps read.
        """
        self.tell(SynchronizeBuffers(state))
        for network in self._networks:
            network.engine.copies.broadcast_buffers(state=state)
        if self._networks or self._settled or not self._workers:
            self._rest.broadcast_buffers(state=state)

    # ------------------------------------------------------------------ optimizers

    def connect_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Take charge of the user's optimizers."""
        for link in self._optimizers:
            link.close()
        self._optimizers = [
            OptimizerLink(
                optimizer,
                self._names,
                lambda changed, index=index: self._stepped(index, changed),  # type: ignore[misc]
                lambda set_to_none, index=index: self._tell_optimizer(  # type: ignore[misc]
                    ZeroGrad(index, set_to_none)
                ),
                self._settle_gradients,
                lambda index=index: self._remote_state(index),  # type: ignore[misc]
                self.ship_optimizers,
                lambda optimizer=optimizer: self._at_hand(optimizer),  # type: ignore[misc]
            )
            for index, optimizer in enumerate(optimizers)
        ]
        self.ship_optimizers(fresh=_ALL)

    @signals_deferred
    def ship_optimizers(self, *, fresh: int = 0) -> None:
        """Give the workers the optimizers as they are now, and drop the state they need here.

        Args:
            fresh: bit k: optimizer k has the state that is sent; else the workers keep the state
                that they have already.
        """
        if not self._networks:
            return
        self._ship_optimizers(fresh)

    def _ship_optimizers(self, fresh: int) -> None:
        # what a hook has added on this rank, the others do not have
        parameters = {n: p for n, p in self.module.named_parameters() if id(p) in self._names}
        optimizers = [link.optimizer for link in self._optimizers]
        self._try_optimizers()
        whole = [link.whole for link in self._optimizers]
        # what a state that is here does not hold, the optimizer has no more
        fresh |= sum(link.is_back << index for index, link in enumerate(self._optimizers))
        for link in self._optimizers:
            link.ship_quietly()
        for worker in self._workers:
            owned = {name for network in self._networks for name in network.remote[worker - 1]}
            data = ship(optimizers, parameters, owned, whole)
            self._channels[worker].send(TakeOptimizers(fresh, data))
            for link in self._optimizers:
                link.leave(parameters[name] for name in owned & parameters.keys())
        for link in self._optimizers:
            link.shipped()

    def _try_optimizers(self) -> None:
        """Find out which optimizers step whole, here, if that is not known yet."""
        for link in self._optimizers:
            tried = link.try_once(lambda o: why_whole(o, self._names, self.device))
            if tried and link.reason:
                self._say(announce(link.optimizer, link.reason))
            if link.reason:
                refuse_deferred(link.optimizer, link.reason)

    @contextmanager
    def _at_hand(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, this rank has all parameters and gradients of an optimizer, on its device."""
        with as_they_are():
            ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
        remote = [name for name in (self._names.get(i) for i in ids) if name in self._owner]
        self.remote.move(remote, self.device)
        with self.remote.at_hand(remote):
            yield

    def _tell_optimizer(self, command: OptimizerCommand) -> None:
        """Before the first network is cut, workers have neither optimizers nor gradients."""
        if self._networks:
            self._send_new_groups(command.optimizer)
            self.tell(command)

    def _send_new_groups(self, index: int) -> None:
        """Groups mostly change with a step; `add_param_group` may come in between."""
        groups = self._optimizers[index].new_groups()
        if groups is not None:
            self.tell(TakeGroups(index, groups))

    def _stepped(self, index: int, changed: list[Hyperparameters] | None) -> None:
        self._tell_optimizer(Step(index, changed))

    @signals_deferred
    def clip_norm(self, optimizer: Optimizer, max_norm: float, order: float = 2.0) -> None:
        """Scale the gradients of all stages so that their common norm is at most ``max_norm``."""
        index = self._index(optimizer)
        self.remote.flush()
        with as_they_are():
            norms = gradient_norms(optimizer, self._names, order)
        if self._networks:
            self._send_new_groups(index)
            for answer in self._ask(GradientNorm(index, order)):
                norms |= answer.value
        factor = clip_factor(norms, self._names.values(), max_norm, order)
        self._tell_optimizer(ScaleGradients(index, factor))
        with as_they_are():
            for gradient in gradients_of(optimizer):
                gradient.mul_(factor)

    @signals_deferred
    def unscale(self, optimizer: Optimizer, factor: Tensor) -> bool:
        """Multiply the gradients of all stages with ``factor``; whether one is not finite.

        Replicas agree on it: what they hold are averages over all of them.
        """
        index = self._index(optimizer)
        self.remote.flush()
        answers = self._ask(Unscale(index, factor.cpu())) if self._networks else []
        remote = [answer.value for answer in answers]
        with as_they_are():
            return any([unscale(gradients_of(optimizer), factor), *remote])

    def clip_values(self, optimizer: Optimizer, bound: float) -> None:
        """Clamp the gradients of all stages to [-bound, bound]."""
        self._tell_optimizer(ClipValues(self._index(optimizer), bound))
        with as_they_are():
            for gradient in gradients_of(optimizer):
                gradient.clamp_(-bound, bound)

    def _remote_state(self, index: int) -> dict[str, dict[str, Any]]:
        """The state of an optimizer by parameter name on the workers, tensors on the CPU."""
        remote: dict[str, dict[str, Any]] = {}
        if self._networks:
            for answer in self._ask(GiveOptimizer(index)):
                remote |= answer.value
        return remote

    def _index(self, optimizer: Optimizer) -> int:
        known = [link.optimizer for link in self._optimizers]
        if optimizer not in known:  # an optimizer of the user's may have this attribute, too
            wrapper: Any = optimizer
            optimizer = wrapper.optimizer  # Lightning's
        return known.index(optimizer)

    # ------------------------------------------------------------------ weights

    def gather_weights(self) -> None:
        """Bring the weights of the workers' stages into the module, where it has room for them."""
        tensors = tensors_of(self.module)
        self._fetch([name for name in self._owner if not is_unmade(tensors[name])])

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the module holds the weights of all stages."""
        with whole(self.module, self._fetch(list(self._owner))):
            yield

    @signals_deferred
    def _fetch(self, names: list[str]) -> dict[str, Tensor]:
        """Weights of workers, written into the module where it has room for them."""
        if not self._networks:
            return {}
        self.remote.adopt_replaced()
        values = self.give(Kind.PARAMETER, names)
        write_tensors(self.module, values.items())
        self.remote.adopt_fetched()
        return values

    @signals_deferred
    def scatter_weights(self) -> None:
        """Give the workers the weights of their stages as they stand in the module."""
        tensors = tensors_of(self.module)
        for worker in self._workers if self._networks else ():
            owned = [name for network in self._networks for name in network.remote[worker - 1]]
            with as_they_are():
                self._send_weights(worker, to_send(tensors, owned))
            leave_to_worker(tensors, owned, self._mesh.coordinates, worker)
        self.remote.adopt_fetched()

    # ------------------------------------------------------------------ what windows ask for

    @signals_deferred
    def give(self, kind: Kind, names: list[str]) -> dict[str, Tensor]:
        """Remote tensors as they are now."""
        command = GiveGradients if kind is Kind.GRADIENT else GiveWeights
        requests = {worker: command(mine) for worker, mine in self._by_worker(names).items()}
        return {
            name: value for answer in self._ask_some(requests) for name, value in answer.tensors
        }

    def take(self, kind: Kind, values: Mapping[str, Tensor], *, add: bool = False) -> None:
        """Set remote tensors, or add to them."""
        self._refuse_in_pass()
        receivers = self._by_worker(values)
        for name in values:
            for worker in self._sharers.get(name, ()):
                receivers.setdefault(worker, []).append(name)
        for worker, names in receivers.items():
            mine = {name: values[name] for name in names}
            if kind is Kind.GRADIENT:
                self._channels[worker].send(TakeGradients(add, mine.items()))
            else:
                self._send_weights(worker, mine)
        if add:
            for name in values:
                self.note_gradients(self._owner[name][0], averaged=False)

    def clear_gradients(self, names: list[str]) -> None:
        """Of remote parameters."""
        self._refuse_in_pass()
        for worker, mine in self._by_worker(names).items():
            self._channels[worker].send(ClearGradients(mine))

    def gradient_names(self) -> set[str]:
        """Of remote parameters that have a gradient."""
        return {name for answer in self._ask(NameGradients()) for name in answer.value}

    def _by_worker(self, names: Iterable[str]) -> dict[int, list[str]]:
        sorted_names: dict[int, list[str]] = {}
        for name in names:
            sorted_names.setdefault(self._owner[name][1], []).append(name)
        return sorted_names

    @signals_deferred
    def check(self) -> None:
        """See to it that no stage of any replica has failed (collective over the drivers).

        A stage that fails in a backward keeps its appointments, so that its driver hears of it
        only with the next question; until then the other replicas train on with what it sent.
        Nothing may leave the replicas, into a checkpoint or at the end of a fit, before this.

        Raises:
            Exception: of the first that has.
        """
        failure = None
        try:
            self._ask(Check())
        except Exception as error:
            failure = error
        assert self._mesh.drivers is not None
        if not meet(self._mesh.drivers, failed=failure is not None):
            raise failure or read_fault(self._mesh).exception()

    @signals_deferred
    def reports(self, name: str) -> list[Any]:
        """What each worker, in the order of their stages, answers to a question of this name."""
        return [answer.value for answer in self._ask(Report(name))]

    # ------------------------------------------------------------------ the end

    @signals_deferred
    def end(self, results: Any, *, weights: bool) -> None:
        """End the run: the workers get the results and, after a fit, the whole module.

        Of the optimizers they get the groups; the states stay where they are.

        Raises:
            Exception: of a worker that has failed since it was last heard of.
        """
        if weights and self._channels:
            self._hand_out_all()
            self._ship_optimizers(fresh=0)
        self._ask(End(results))
        for channel in self._channels.values():
            channel.flush()
        self._stop_heartbeat()

    def _hand_out_all(self) -> None:
        """Give every worker the weights of all stages."""
        everyones = {
            name: tensor
            for name, tensor in tensors_of(self.module).items()
            if name in self._shared and not is_deferred(tensor)
        }
        for worker in self._workers:
            with as_they_are():
                self._send_weights(worker, everyones)

    @signals_deferred
    def salvage(self) -> None:
        """Before :meth:`abort`: have the weights of all stages in the module, here and on workers.

        A script that catches the error finds there what its training has made, as on one device.
        """
        if self._networks:
            self.tell(ForgetFailure())
            self.gather_weights()
            self._hand_out_all()

    def abort(self, failure: Failure) -> None:
        """Tell the workers that this replica has failed: all that are still there."""
        self._stop_heartbeat()
        self._mesh.say_goodbye(failure)

    def __deepcopy__(self, memo: object) -> "Driver":
        """Copies of a Trainer, and of what it has patched, drive the same workers."""
        return self

    def _stop_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()

    def close(self) -> None:
        """Leave the optimizers and the parameters as they were."""
        self._trace.write()
        self.remote.close()
        for link in self._optimizers:
            link.close()
        self._rest.close()
        for network in self._networks:
            network.engine.copies.close()


class DrivenNetwork(StagedNetwork):
    """A network as its driver sees it: it can be called.

    Args:
        driver: the driver.
        number: of the network.
        name: dotted name in the LightningModule.
        module: the network.
        engine: this rank's stages at work.
        graph: of its first call.
        parts: into how many slices a batch is split in calls of that graph.
        remote: per worker, names in the LightningModule of the tensors that it owns.
        borrowed: names in the network of what this rank uses and another one owns.
    """

    def __init__(
        self,
        driver: Driver,
        number: int,
        name: str,
        module: nn.Module,
        engine: Engine,
        graph: NetworkGraph,
        parts: int,
        remote: Sequence[tuple[str, ...]],
        borrowed: frozenset[str],
    ) -> None:
        super().__init__(number, name, module, engine, borrowed)
        self.driver, self.remote = driver, tuple(remote)
        self.graphs: list[NetworkGraph] = []
        self._parts: list[int] = []
        self.owned_by_stage: list[frozenset[str]] = []
        self.devices: tuple[int, ...] = ()
        self.schedule = ""
        self.continues = False
        self.add_graph(graph, parts)
        self._numbers: dict[CallKey, int] = {}
        self._shapes: dict[Any, tuple[int, tuple[tuple[int | float, ...], ...]]] = {}
        self._patterns: dict[tuple[Any, ...], int] = {}
        self._count = self._pattern_count = 0
        # calls whose outputs were dropped; a finaliser may run anywhere, so it only notes them
        self._dropped: deque[int] = deque()
        # Tells "do parameters want gradients?": not a leaf (torch.autograd.grad refuses those),
        # and a view, which keeps nothing and so survives any number of backward passes.
        leaf = torch.zeros((), requires_grad=True)
        self._anchor = leaf.view_as(leaf)

    def add_graph(self, graph: NetworkGraph, parts: int) -> None:
        """Another way to call the network, with a batch in at most so many micro-batches."""
        self.graphs.append(graph)
        self._parts.append(parts)

    @property
    def owned_names(self) -> frozenset[str]:
        """Names in the network of the tensors that stages own."""
        return frozenset[str]().union(*self.owned_by_stage)

    def knows(self, graph: NetworkGraph) -> bool:
        """Whether all ranks have their stages of a graph."""
        return any(known is graph for known in self.graphs)

    def tensors(self) -> list[Tensor]:
        """The parameters and buffers that the network's stages own, here and on workers."""
        named = tensors_of(self.driver.module)
        return [named[name] for owned in (*self.remote, self.owned()) for name in owned]

    def __call__(self, graph: NetworkGraph, values: Sequence[Any]) -> list[Any]:
        """Call the network.

        Args:
            graph: of the call.
            values: the arguments of the graph.

        Returns:
            What the graph returns.
        """
        variant = next(n for n, known in enumerate(self.graphs) if known is graph)
        leaves = graph.bind(values)
        if torch.is_grad_enabled() and self._differentiable(leaves):
            outputs = _NetworkCall.apply(  # type: ignore[no-untyped-call]
                self, variant, self._anchor_if_trained(), *leaves
            )
        else:
            _, parts = self.forward(variant, leaves, grad=False)
            outputs = _join(parts)
        found = dict(zip((*graph.tensor_outputs, *graph.scalar_outputs), outputs))
        if graph.written_leaves:
            self._write_back(graph, leaves, found)
        if graph.numbers:
            found |= zip(graph.numbers, graph.values_of_numbers(graph.sizes(leaves)))
        return [found[n] if isinstance(n, fx.Node) else n for n in graph.outputs]

    def _write_back(
        self, graph: NetworkGraph, leaves: Sequence[Tensor], found: Mapping[Any, Any]
    ) -> None:
        """What the network has changed in place, in tensors that are not its own."""
        for leaf, tensor in zip(graph.leaves, leaves):
            if leaf in graph.written_leaves:
                with torch.no_grad():
                    tensor.copy_(found[leaf.node].detach())

    def _differentiable(self, leaves: Sequence[Tensor]) -> bool:
        return any(leaf.requires_grad for leaf in leaves) or self._trained()

    def _trained(self) -> bool:
        with as_they_are():
            return any(parameter.requires_grad for parameter in self._parameters)

    def _anchor_if_trained(self) -> Tensor | None:
        return self._anchor if self._trained() else None

    @signals_deferred
    def forward(
        self, variant: int, leaves: Sequence[Tensor], *, grad: bool
    ) -> tuple[Call, list[Values]]:
        """Run the pipeline forward. Returns the call and, per micro-batch, the outputs."""
        while self._dropped:
            self._free(self._dropped.popleft())
        self.driver.remote.adopt_replaced()
        self.driver.refresh_borrowed(grad=grad)
        if self.graphs[variant].writes_parameters:
            self.driver.remote.outdate(Kind.PARAMETER)
        parts, numbers = self._split(variant, leaves)
        slices = self.graphs[variant].split(leaves, parts)
        continues = self.continues and self.graphs[variant].draws
        if continues:
            slices = [[*slices[0], *random_state(self.engine.device)]]
        key = self._key(variant, slices, numbers, grad, continues)
        index = self._numbers.get(key)
        exchange = index is None
        if index is None:
            index = self.add_key(key)
        draws = exchange or continues or self.draws(index)
        self._count += 1
        draw = self.driver.draw_number(grad)
        call = self.open(self._count, draw, index, exchange=exchange, draws=draws)
        new_key = key if exchange else None
        self.driver.tell(Forward(self.number, call.number, draw, index, exchange, draws, new_key))
        try:
            with self.driver.passing(self.engine):
                outputs = self.engine.forward(call, slices)
        except Exception:
            self._free(call.number)
            raise
        if continues:
            set_random_state(call.states, self.engine.device)
        # known from here on: a call that fails half-way has taught nobody its shapes
        self._numbers[key] = index
        if grad:
            self.driver.note_call()
        return call, outputs

    @signals_deferred
    def backward(
        self,
        call: Call,
        gradients: Sequence[Gradients],
        *,
        parameters: bool,
        keep: bool,
        input_gradient: bool,
    ) -> list[Gradients]:
        """Run the pipeline backward. Returns, per micro-batch, the gradients of the inputs."""
        pattern_key = (
            call.key,
            tuple(gradient is not None for gradient in gradients[0]),
            parameters,
            input_gradient,
        )
        pattern = self._patterns.get(pattern_key)
        exchange = pattern is None
        if pattern is None:
            pattern = self._pattern_count
            self._pattern_count += 1
        reduce = parameters and self.driver.overlaps()
        mode = Backward(
            self.number,
            call.number,
            pattern,
            exchange,
            parameters,
            keep,
            input_gradient,
            reduce,
        )
        self.driver.tell(mode)
        if not keep:
            self.calls.pop(call.number, None)
        if parameters:
            self.driver.note_gradients(self.number, averaged=reduce)
        with self.driver.passing(self.engine):
            found = self.engine.backward(call, mode, gradients)
        # known from here on: a pass that fails has told that nothing gets a gradient
        self._patterns[pattern_key] = pattern
        return found

    def drop(self, number: int) -> None:
        """The output of a call was dropped without a backward."""
        self._dropped.append(number)

    def _free(self, number: int) -> None:
        if self.calls.pop(number, None) is not None:
            self.driver.tell(Free(self.number, number))

    def _split(
        self, variant: int, leaves: Sequence[Tensor]
    ) -> tuple[int, tuple[tuple[int | float, ...], ...]]:
        """Into how many micro-batches these go, and the numbers of each."""
        shapes = variant, tuple([leaf.shape for leaf in leaves])
        known = self._shapes.get(shapes)
        if known is None:
            graph, parts = self.graphs[variant], self._parts[variant]
            if parts > 1 and not fits(graph, leaves, parts):
                parts = 1  # its code takes another way for parts of this size
            slices = graph.split(leaves, parts)
            numbers = tuple(graph.values_of_numbers(graph.sizes(part)) for part in slices)
            known = self._shapes[shapes] = parts, numbers
        return known

    def _key(
        self,
        variant: int,
        slices: Sequence[Sequence[Tensor]],
        numbers: tuple[tuple[int | float, ...], ...],
        grad: bool,
        continues: bool,
    ) -> CallKey:
        specs = tuple(
            tuple(TensorSpec(tuple(t.shape), t.dtype, grad and t.requires_grad) for t in leaves)
            for leaves in slices
        )
        precision = Precision.current(self.engine.device)
        training = self.module.training
        trainable = self.trainable()
        return CallKey(variant, specs, numbers, grad, training, trainable, precision, continues)


class _NetworkCall(torch.autograd.Function):
    """A call of the network as one node of the graph of the user's code."""

    @staticmethod
    def forward(
        ctx: Any, network: DrivenNetwork, variant: int, anchor: Tensor | None, *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        with forward_derivatives():
            call, parts = network.forward(variant, leaves, grad=True)
        ctx.network, ctx.call = network, call
        ctx.trained = anchor is not None
        ctx.sizes = [[len(v) if isinstance(v, Tensor) and v.dim() else 1 for v in p] for p in parts]
        ctx.wanted = [leaf.requires_grad for leaf in leaves]
        ctx.split = [leaf.batched for leaf in network.graphs[variant].leaves]
        ctx.finaliser = weakref.finalize(ctx, network.drop, call.number)
        ctx.finaliser.atexit = False
        ctx.set_materialize_grads(False)
        outputs = _join(
            [[v.detach() if isinstance(v, Tensor) else v for v in part] for part in parts]
        )
        ctx.mark_non_differentiable(
            *(
                output
                for output, value in zip(outputs, parts[0])
                if isinstance(value, Tensor) and not value.requires_grad
            )
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise NetworkError(
                f"create_graph=True, in a backward or torch.autograd.grad ({place_now()}): "
                "gradients of gradients cannot pass through a network that is cut into stages. "
                "Compute the penalty with a network that is not cut "
                "(HybridGabraStrategy(network=...)), or train with strategy='ddp'."
            )
        network: DrivenNetwork = ctx.network
        parts: list[Gradients] = []
        split = (
            [
                None if gradient is None else gradient.split([s[i] for s in ctx.sizes])
                for i, gradient in enumerate(gradients)
            ]
            if len(ctx.sizes) > 1
            else [None if g is None else (g,) for g in gradients]
        )
        for m in range(len(ctx.sizes)):
            parts.append([None if slices is None else slices[m] for slices in split])
        keep = graph_is_kept()
        if ctx.call.number not in network.calls:
            raise RuntimeError(
                "Trying to backward through a call of the network a second time. Specify "
                "retain_graph=True in the first backward."
            )
        inputs = network.backward(
            ctx.call,
            parts,
            parameters=ctx.trained and backward_reaches(ctx, 0),
            keep=keep,
            input_gradient=any(ctx.wanted),
        )
        if not keep:
            ctx.finaliser.detach()
        return None, None, None, *_join_gradients(inputs, ctx.wanted, ctx.split)


def _join(parts: Sequence[Sequence[Any]]) -> list[Any]:
    """The outputs of the whole batch from those of its micro-batches."""
    if len(parts) == 1:
        return list(parts[0])
    # numbers are the same in all of them
    return [torch.cat(s) if isinstance(s[0], Tensor) else s[0] for s in zip(*parts)]


def _join_gradients(
    inputs: Sequence[Gradients], wanted: Sequence[bool], split: Sequence[bool]
) -> Gradients:
    """The gradients of the inputs of the whole batch; of one that was passed whole, their sum."""
    joined: Gradients = []
    for index, (wants, is_split) in enumerate(zip(wanted, split)):
        slices = [part[index] for part in inputs if part] if wants else []
        present = [piece for piece in slices if piece is not None]
        if not present:
            joined.append(None)
        else:
            joined.append(torch.cat(present) if is_split else torch.stack(present).sum(0))
    return joined
