"""The user's optimizers on the driver: they step, clip and unscale on all ranks of its replica."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.comm import Mesh, Precision, TensorSpec, gather_objects, signals_deferred
from lightning_hybrid.comm.protocol import (
    ClipValues,
    GiveOptimizer,
    GradientNorm,
    Hyperparameters,
    OptimizerCommand,
    OutlineStates,
    ScaleGradients,
    Step,
    TakeGroups,
    TakeOptimizers,
    Unscale,
    ZeroGrad,
)
from lightning_hybrid.driver.commands import Commands
from lightning_hybrid.driver.optimizer_link import OptimizerLink
from lightning_hybrid.driver.optimizer_trial import (
    announce,
    announce_undivided,
    refuse_deferred,
    why_whole,
)
from lightning_hybrid.driver.ownership import Ownership
from lightning_hybrid.driver.weights import FilesOfWorkers
from lightning_hybrid.driver.when_to_average import ReplicaGradients
from lightning_hybrid.errors import HybridError, PlanError
from lightning_hybrid.remote import Kind
from lightning_hybrid.state import (
    Division,
    OtherReplicas,
    Owned,
    Replicas,
    States,
    StateShares,
    clip_factor,
    complete,
    gather_states,
    gradient_norms,
    gradients_of,
    let_go_of_checkpoints,
    outlined,
    refuse_later,
    ship,
    total_norm,
    unread_there,
    unscale,
)

ALL = -1
"""Every bit of ``fresh``."""


class DrivenOptimizers:
    """The optimizers of one run, on the driver.

    Args:
        module: the LightningModule.
        names: names of its parameters by identity, those that all ranks have.
        mesh: the groups.
        commands: to the workers.
        ownership: which worker owns what.
        gradients: of this replica.
        files: of the workers.
        say: tells the user something, in one line.
        shards: whether states are divided over the replicas.

    Attributes:
        optimizers: the user's.
        streamed_by: the schedule, if it begins with later batches early; then no optimizer may step
            whole.
        before_step: called before an optimizer steps.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Mapping[int, str],
        mesh: Mesh,
        commands: Commands,
        ownership: Ownership,
        gradients: ReplicaGradients,
        files: FilesOfWorkers,
        *,
        say: Callable[[str], None],
        shards: bool,
    ) -> None:
        self._module, self._names, self._say = module, names, say
        self._device = commands.remote.device
        self._commands, self._ownership, self._gradients = commands, ownership, gradients
        self._files = files
        self.optimizers: list[Optimizer] = []
        self._links: list[OptimizerLink] = []
        self._precision: Precision | None = None  # that the workers know of
        self.streamed_by, self._stays = "", ""
        self.before_step: Callable[[], None] = lambda: None
        self._mesh, self._replica = mesh, mesh.coordinates.dp_rank
        # one table for all ranks of the replica: a division notes in it which replica has a state
        replicas, self._replica_of = mesh.coordinates.replicas, Replicas()
        self._divisions = {
            worker: Division(replicas, self._replica_of) for worker in commands.workers.ranks
        }
        self._all_here = not commands.workers.ranks
        self._shares: StateShares | None = None
        self._others: OtherReplicas | None = None
        if shards and replicas > 1:
            self._shares = StateShares(mesh.data_parallel, names, self._replica_of)
            self._others = OtherReplicas(names, self._replica_of, self._replica)

    def __deepcopy__(self, memo: object) -> "DrivenOptimizers":
        """Copies of a Trainer, and of what it has patched, drive the same workers."""
        return self

    def connect(self, optimizers: Sequence[Optimizer]) -> None:
        """Take charge of the user's optimizers."""
        if self._all_here and (self._shares is None or self.optimizers == list(optimizers)):
            self.optimizers = list(optimizers)  # they have no counterparts, or are connected
            return
        self.close()
        self.optimizers, self._links = list(optimizers), []
        self._links = [
            OptimizerLink(optimizer, self._names, index, self, self._others)
            for index, optimizer in enumerate(optimizers)
        ]
        self.ship(fresh=ALL)

    def follow(self, before: "DrivenOptimizers") -> None:
        """Take charge of what was connected for other stages.

        Args:
            before: to what it was connected; closed.
        """
        self.connect(before.optimizers)
        for link, old in zip(self._links, before._links):
            link.follow(old)

    def close(self) -> None:
        """Leave the optimizers as they were."""
        for link in self._links:
            link.close()

    # ------------------------------------------------------------------ shipping

    @signals_deferred
    def ship(self, *, fresh: int = 0) -> None:
        """Give the workers the optimizers as they are now, and drop the state they need here.

        Before the first network is cut, workers need none.

        Args:
            fresh: bit k: optimizer k has the state that is sent; else the workers keep the state
                that they have already.
        """
        if self._steps_all:
            self.ship_in_any_case(fresh)

    @property
    def _steps_all(self) -> bool:
        """Whether it is known which rank steps what: a network is cut, or there is none to cut."""
        return self._ownership.any_network or self._all_here

    def stay_here(self) -> None:
        """No network will be cut: this rank steps all, or its share of it."""
        if self._shares is not None and not self._all_here:
            self._all_here = True
            self.ship(fresh=ALL)

    def ship_in_any_case(self, fresh: int) -> None:
        """The same, also where no network has been cut."""
        parameters = self._parameters()
        # first of all: one that steps whole keeps all of its states on this rank
        self._try_all()
        whole = [link.whole for link in self._links]
        # what a state that is here does not hold, the optimizer has no more
        fresh |= sum(link.is_back << index for index, link in enumerate(self._links))
        for link in self._links:
            link.ship_quietly()
        self._divide(parameters)
        for worker in self._commands.workers.ranks:
            owned = {*self._ownership.tensors_of(worker)}
            theirs = {n for n in owned if self._replica_of.get(n, self._replica) == self._replica}
            shipped = ship(self.optimizers, parameters, theirs, whole)
            self._commands.workers.send(worker, TakeOptimizers(fresh, *shipped, self._replica_of))
            later = (
                self._ownership.tensors_of(w) for w in self._commands.workers.ranks if w > worker
            )
            left = (owned & parameters.keys()).difference(*later)  # copies of a stage need it, too
            for link in self._links:
                link.leave(parameters[name] for name in left)
            # what was loaded is mapped from its file: pages that were sent give their memory back
            let_go_of_checkpoints()
        for link in self._links:
            link.shipped()

    def _parameters(self) -> dict[str, Parameter]:
        # what a hook has added on this rank, the others do not have; and names that have changed
        # since layers changed places, they do not know
        here = (p for p in self._module.parameters() if id(p) in self._names)
        return {self._names[id(p)]: p for p in here}

    def _divide(self, parameters: Mapping[str, Parameter]) -> None:
        """Divide what is known to be of one rank and not divided yet, and drop other states here.

        What this rank owns is known where there are no workers, else when it steps.
        """
        if self._shares is None:
            return
        divided = [link.optimizer for link in self._links if link.divided]
        known = {id(p) for o in divided for group in o.param_groups for p in group["params"]}
        with as_they_are():
            mine = {name: p for name, p in parameters.items() if id(p) in known}
            # those that are frozen have no states for a while, or for ever
            for trained in (True, False):
                now = {n: p for n, p in mine.items() if p.requires_grad is trained}
                for worker, division in self._divisions.items():
                    owned = now.keys() & {*self._ownership.tensors_of(worker)}
                    division.add({name: p.nbytes for name, p in now.items() if name in owned})
                if not self._divisions:
                    self._shares.add(now.values())
        for optimizer in divided:
            self._shares.drop(optimizer)

    def _try_all(self) -> None:
        """Find out of each optimizer whether every rank can step its own parameters.

        One that cannot steps as a whole on the driver, as a line says.

        Raises:
            PlanError: it would have to, under a streamed schedule.
        """
        for link in self._links:
            tried = link.try_once(lambda o: why_whole(o, self._names, self._device))
            if link.reason and self.streamed_by:
                raise PlanError(
                    f"{type(link.optimizer).__name__} steps on the driver, as on one device: "
                    f"{link.reason}. Under schedule={self.streamed_by!r}, which begins with later "
                    "batches before a step is over, it cannot. Use schedule='gpipe', or another "
                    "optimizer."
                )
            # (a trial comes once, and again for other hyper-parameters;
            # links are shipped much more often)
            if tried and link.reason and self._commands.workers.ranks:
                self._say(announce(link.optimizer, link.reason))
            if tried and link.reason and self._shares is not None:
                self._say(announce_undivided(link.optimizer, link.reason))
            if link.reason:
                refuse_deferred(link.optimizer, link.reason)
            if link.reason and link.was_divided:
                raise HybridError(
                    f"{type(link.optimizer).__name__} cannot be stepped in parts any more: "
                    f"{link.reason}. Its states are divided over the replicas, so that none can "
                    "step it as a whole. Leave shard_optimizer_states=True out."
                )

    def gather_states(self) -> None:
        """Have the states of all ranks here."""
        for link in self._links:
            link.gather_state()

    def bring_states(self) -> None:
        """After the run: as :meth:`gather_states`, for good."""
        for link in self._links:
            link.bring_state()

    # -------------------------------------------- what an optimizer link asks for, and states

    @signals_deferred
    def step(self, index: int, changed: list[Hyperparameters] | None) -> None:
        """Have the workers step."""
        self.before_step()
        if self._ownership.any_network:  # else nobody would hear of the precision
            precision = Precision.current(self._device)
            self._tell(Step(index, changed, None if precision == self._precision else precision))
            self._precision = precision
        if self._shares is not None:
            self._shares.exchange()

    def share(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Inside, this rank steps its share of what it owns, if states are divided."""
        if self._shares is None or not self._steps_all:
            return nullcontext()
        return self._shares.alone(optimizer)

    def zero_grad(self, index: int, set_to_none: bool) -> None:
        """Have the workers clear their gradients."""
        if set_to_none:
            groups = self.optimizers[index].param_groups
            known = (self._names.get(id(p), "") for group in groups for p in group["params"])
            # code here may hold a gradient that is cleared: it keeps the numbers, as on one device
            self._commands.remote.release_gradients(known)
        self._tell(ZeroGrad(index, set_to_none))

    def settle(self) -> None:
        """Gradients are about to be used."""
        self._gradients.settle()
        self._ownership.settle()

    def state(self, index: int) -> dict[str, dict[str, Any]]:
        """The state of an optimizer by parameter name on the workers, tensors on the CPU."""
        if not self._ownership.any_network:
            return {}
        if self._stays == "always":
            return self._states_there(index)
        if (kept := self._files.states(index)) is not None:
            return kept
        if self._stays:
            return self._states_there(index)
        remote: dict[str, dict[str, Any]] = {}
        for answer in self._commands.ask(GiveOptimizer(index)):
            remote |= answer.value
        return remote

    @signals_deferred
    def state_dict(
        self, optimizer: Optimizer, *, here: bool, unread: bool, at_once: bool
    ) -> dict[str, Any]:
        """The state dict of one device; collective over the drivers, if states are divided.

        Args:
            optimizer: the user's.
            here: whether this rank gets it; the others get nothing.
            unread: see :meth:`unread`.
            at_once: it is written before the next step, so that tensors may be unread where files
                of workers cannot be read here, too.
        """
        divides = self._others is not None and bool(self._links)
        link = self._links[self._index(optimizer)] if divides else None
        if self._others is None or link is None or link.divided is None:
            with self.unread(always=unread) if unread or at_once else nullcontext():
                return optimizer.state_dict() if here else {}
        with self.unread() if unread else nullcontext():
            # collective: every driver sends its states, and replica 0 alone has the whole
            others = self._states_of_others(link)
            if not here:
                return {}
            with self._others.gathered():
                return complete(link.optimizer, optimizer.state_dict(), self._names, others)

    def left(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state dict of one device after a failed run.

        Where replicas divide the states it has none: the others can no longer be asked.
        """
        if self._others is None:
            return optimizer.state_dict()
        with self._others.gathered():
            found = optimizer.state_dict()
        if self._links[self._index(optimizer)].divided is None:
            return found
        self._say(
            "hybrid_gabra: the run has failed, and shard_optimizer_states=True leaves each replica "
            f"a part of the states of {type(optimizer).__name__}: what is saved now has none of "
            "them, and a run that goes on from it begins with new ones."
        )
        return {**found, "state": {}}

    def share_of(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        """A checkpoint without the states that are known to be for other replicas.

        (What is loaded goes to the devices of the parameters, which may have no room for more.)
        """
        others = self._others
        if others is None:
            return checkpoint
        left = []
        for link, state in zip(self._links, checkpoint["optimizer_states"]):
            if link.divided is None:  # it may have a form of its own
                left.append(state)
                continue
            numbers = [number for group in state["param_groups"] for number in group["params"]]
            parameters = [p for group in link.optimizer.param_groups for p in group["params"]]
            away = {number for number, p in zip(numbers, parameters) if others.have(p)}
            mine = {number: s for number, s in state["state"].items() if number not in away}
            left.append({**state, "state": mine})
        return {**checkpoint, "optimizer_states": left}

    def _states_of_others(self, link: OptimizerLink) -> States:
        """On the driver of replica 0, by name the states that other replicas have."""
        index = self._links.index(link)
        mine = link.states_here() | ({} if link.is_back else self.state(index))
        if not self._stays:
            return gather_states(self._mesh.drivers, mine, self._files.folder)
        with as_they_are():
            outlines = {name: outlined(state) for name, state in mine.items()}
        everyones = gather_objects(self._mesh.drivers, outlines)
        return {
            name: self._unread_all(index, replica, name, state)
            for replica, states in enumerate(everyones)
            for name, state in states.items()
            if replica
        }

    @contextmanager
    def unread(self, *, always: bool = True) -> Iterator[None]:
        """Inside, state dicts have tensors of workers unread, which stay where they are.

        Args:
            always: else where files of workers cannot be read here.
        """
        self._stays = "always" if always else "without files"
        try:
            yield
        finally:
            self._stays = ""

    def _states_there(self, index: int) -> dict[str, dict[str, Any]]:
        answers = self._commands.ask(OutlineStates(index))
        return {
            name: self._unread_all(index, self._replica, name, state)
            for answer in answers
            for name, state in answer.value.items()
        }

    def _unread_all(
        self, index: int, replica: int, name: str, state: Mapping[str, Any]
    ) -> dict[str, Any]:
        # ranks are numbered replica by replica, and within one the driver is the first
        rank = replica * self._mesh.coordinates.ranks_per_replica
        rank += self._ownership.rank_of(name) if name in self._ownership.network_of else 0
        return {
            key: self._unread_one(index, Owned(rank, name, index, key), value)
            if isinstance(value, TensorSpec)
            else value
            for key, value in state.items()
        }

    def _unread_one(self, index: int, owned: Owned, spec: TensorSpec) -> Tensor:
        remote = self._commands.remote
        before = remote.state(Kind.PARAMETER)  # a step changes both

        def read() -> Tensor:
            replica, rank = divmod(owned.rank, self._mesh.coordinates.ranks_per_replica)
            if replica != self._replica:
                raise HybridError(
                    f"The state {owned.state!r} of {owned.name!r} is on replica {replica}, "
                    "which writes it to this checkpoint by itself (checkpoint='sharded' and "
                    "shard_optimizer_states=True). Leave it as it is, or use checkpoint='full'."
                )
            refuse_later(f"{owned.state} of {owned.name}", remote.state(Kind.PARAMETER) == before)
            self._commands.workers.send(rank, GiveOptimizer(index, owned.name))
            [answer] = self._commands.workers.hear([rank])
            found: Tensor = answer.value[owned.name][owned.state]
            return found

        return unread_there(spec, owned, read)

    def find(self, owned: Owned) -> Tensor:
        """A state that this rank has."""
        assert owned.optimizer is not None
        found: Tensor = self._links[owned.optimizer].states_here()[owned.name][owned.state]
        return found

    @contextmanager
    def at_hand(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, this rank has all parameters and gradients of an optimizer, on its device."""
        with as_they_are():
            ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
        names = (self._names.get(i) for i in ids)
        remote = [name for name in names if name in self._ownership.network_of]
        with self._commands.remote.at_hand(remote):
            yield

    def _tell(self, command: OptimizerCommand) -> None:
        """Before the first network is cut, workers have neither optimizers nor gradients."""
        if self._ownership.any_network:
            self._send_new_groups(command.optimizer)
            self._commands.tell(command)

    def _send_new_groups(self, index: int) -> None:
        """Groups mostly change with a step; `add_param_group` may come in between."""
        groups = self._links[index].new_groups()
        if groups is not None:
            # (a group that was added may hold parameters that nobody steps yet)
            self._divide(self._parameters())
            self._commands.tell(TakeGroups(index, groups, self._replica_of))

    # ------------------------------------------------------------------ gradients of one

    @signals_deferred
    def clip_norm(
        self,
        optimizer: Optimizer,
        max_norm: float,
        order: float = 2.0,
        *,
        finite: bool = False,
    ) -> Tensor:
        """Scale the gradients of all stages so that their common norm is at most ``max_norm``.

        Args:
            optimizer: the user's.
            max_norm: the bound.
            order: of the norm.
            finite: whether a norm that is not finite is an error.

        Returns:
            Their norm before.

        Raises:
            RuntimeError: it is not finite; nothing was scaled.
        """
        index = self._index(optimizer)
        self._commands.remote.flush()
        with as_they_are():
            # a norm for each parameter, not for each rank: their sum is rounded as on one device
            norms = gradient_norms(optimizer, self._names, order)
        if self._ownership.any_network:
            self._send_new_groups(index)
            for answer in self._commands.ask(GradientNorm(index, order)):
                norms |= answer.value
        total = total_norm(norms, self._names.values(), order)
        if finite and not total.isfinite():
            raise RuntimeError(
                f"The total norm of order {order} for gradients is {total.item()}, so it cannot be "
                "clipped. To scale the gradients all the same, give error_if_nonfinite=False."
            )
        factor = clip_factor(total, max_norm)
        self._tell(ScaleGradients(index, factor))
        with as_they_are():
            for gradient in gradients_of(optimizer):
                gradient.mul_(factor)
        return total

    @signals_deferred
    def unscale(self, optimizer: Optimizer, factor: Tensor) -> bool:
        """Multiply the gradients of all stages with ``factor``; whether one is not finite.

        Replicas agree on it: what they hold are averages over all of them.
        """
        index = self._index(optimizer)
        self._commands.remote.flush()
        answers = []
        if self._ownership.any_network:
            answers = self._commands.ask(Unscale(index, factor.cpu()))
        remote = [answer.value for answer in answers]
        with as_they_are():
            # (a list: what is here must be scaled even where a worker has found an infinite number)
            return any([unscale(gradients_of(optimizer), factor), *remote])

    def clip_values(self, optimizer: Optimizer, bound: float) -> None:
        """Clamp the gradients of all stages to [-bound, bound]."""
        self._tell(ClipValues(self._index(optimizer), bound))
        with as_they_are():
            for gradient in gradients_of(optimizer):
                gradient.clamp_(-bound, bound)

    def _index(self, optimizer: Optimizer) -> int:
        known = self.optimizers
        if optimizer not in known:  # an optimizer of the user's may have this attribute, too
            wrapper: Any = optimizer
            optimizer = wrapper.optimizer  # Lightning's
        return known.index(optimizer)
