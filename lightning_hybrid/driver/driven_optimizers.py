"""The user's optimizers on the driver, whose steps and states are those of all ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.comm import (
    Answer,
    CallPrecision,
    Mesh,
    TensorSpec,
    signals_deferred,
)
from lightning_hybrid.comm.protocol import (
    Hyperparameters,
    OptimizerCommand,
    OutlineStates,
    StepOptimizer,
    TakeOptimizers,
    ZeroGrad,
)
from lightning_hybrid.driver.commands import Commands
from lightning_hybrid.driver.network_options import DriverOptions
from lightning_hybrid.driver.optimizer_kinds import (
    line_about_undivided,
    line_about_whole,
    refuse_deferred,
)
from lightning_hybrid.driver.optimizer_link import OptimizerLink
from lightning_hybrid.driver.ownership import Ownership
from lightning_hybrid.driver.weights import FilesOfWorkers
from lightning_hybrid.driver.when_to_average import ReplicaGradients
from lightning_hybrid.errors import PlanError
from lightning_hybrid.state import (
    OtherReplicas,
    ReplicaOfState,
    StateShares,
    TensorAddress,
    let_go_of_checkpoints,
    ship,
)

T = TypeVar("T")


class DrivenOptimizers:
    """The optimizers of one run, on the driver: what they do, the workers do with their copies.

    Args:
        module: the LightningModule, with the parts that it had at the start.
        mesh: the process groups and channels of this rank.
        commands: sends commands to the workers.
        ownership: which worker owns which tensor.
        gradients: averages the gradients of this replica over the replicas.
        files: reads the files that workers write their states to.
        options: what the run has decided.

    Attributes:
        optimizers: the user's optimizers.
        streamed_by: name of the schedule, if it begins with later batches early; then no optimizer
            may step as a whole on the driver. Empty: no network has such a schedule.
        before_step: called before the workers step.
        links: for each of the optimizers what has the workers do the same; empty: none is
            connected.
        names: by ``id``, the names of the parameters that all ranks have.
        others: which states other replicas have; ``None``: replicas do not divide them.
        stays: whether workers' states stay there until they are read, see :meth:`unread`.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        commands: Commands,
        ownership: Ownership,
        gradients: ReplicaGradients,
        files: FilesOfWorkers,
        options: DriverOptions,
    ) -> None:
        self._module = module
        self._say = options.say
        # of the parameters that all ranks have (not of those that a hook adds on this rank)
        self._parameters = {
            name: p
            for name, p in module.named_parameters()
            if options.shared is None or name in options.shared
        }
        self.names = {id(p): name for name, p in self._parameters.items()}
        self._device = commands.remote.device
        self._commands = commands
        self._ownership = ownership
        self._gradients = gradients
        self._files = files
        self.optimizers: list[Optimizer] = []
        self.links: list[OptimizerLink] = []
        self._precision: CallPrecision | None = None  # the one that was last sent to the workers
        self.streamed_by = ""
        self.stays = False
        self.before_step: Callable[[], None] = lambda: None
        self._mesh = mesh
        self._replica = mesh.coordinates.dp_rank
        self._all_here = not commands.workers.ranks
        replicas, self._replica_of = mesh.coordinates.replicas, ReplicaOfState()
        self._shares: StateShares | None = None
        self.others: OtherReplicas | None = None
        if options.shards and replicas > 1:
            self.others = OtherReplicas(self.names, self._replica, replicas)
            self._replica_of = self.others.replica_of
            self._shares = StateShares(mesh.data_parallel, self.names, self._replica_of)

    def __deepcopy__(self, memo: object) -> "DrivenOptimizers":
        """The object itself: a copy of a Trainer that refers to it drives the same workers."""
        return self

    def connect(self, optimizers: Sequence[Optimizer]) -> None:
        """Take charge of the user's optimizers, in place of those of before.

        From then on, what the user's code does with them reaches the workers, until :meth:`close`.
        They are sent as by :meth:`ship`.

        Args:
            optimizers: all optimizers of the run; their positions are their numbers.

        Raises:
            PlanError: see :meth:`_begin_sending`.
            HybridError: see there.
        """
        if self._all_here and (self._shares is None or self.optimizers == list(optimizers)):
            self.optimizers = list(optimizers)  # workers step none, or they are connected already
            return
        self.close()
        self.optimizers = list(optimizers)
        self.links = []
        self.links = [
            OptimizerLink(optimizer, self.names, index, self, self.others)
            for index, optimizer in enumerate(optimizers)
        ]
        self.ship()

    def close(self) -> None:
        """Take hooks and replaced methods off the optimizers.

        Afterwards the optimizers have the states of this rank alone; :meth:`bring_states` adds
        those of the workers.
        """
        for link in self.links:
            link.close()

    # ------------------------------------------------------------------ shipping

    @signals_deferred
    def ship(self) -> None:
        """Send the optimizers to the workers, and drop the states of workers' parameters here.

        Nothing is sent as long as no network is cut, and it is open whether one will be: until then
        workers need no optimizers.

        Raises:
            PlanError: see :meth:`_begin_sending`.
            HybridError: see there.
        """
        if self._steps_all:
            self.ship_in_any_case()

    @property
    def _steps_all(self) -> bool:
        """Whether it is known which rank steps each parameter: a network is cut, or none will be.

        Before that, this rank steps all of them.
        """
        return self._ownership.any_network or self._all_here

    def stay_here(self) -> None:
        """Register that no network will be cut: this rank steps all parameters.

        Where states are divided over the replicas, it steps those whose states this replica has.
        """
        if self._shares is not None and not self._all_here:
            self._all_here = True
            self.ship()

    def ship_in_any_case(self) -> None:
        """Send the optimizers to the workers like :meth:`ship`, also before a network is cut.

        Where states are to be divided over the replicas, those that other replicas get are dropped
        here too. An optimizer that steps as a whole keeps all of its states here.

        Raises:
            PlanError: see :meth:`_begin_sending`.
            HybridError: see there.
        """
        parameters = self._parameters
        # first of all: one that steps whole keeps all of its states on this rank
        for link in self.links:
            self._begin_sending(link)
        whole = [link.whole for link in self.links]
        # where all states are here, they replace those of the workers
        fresh = tuple([index for index, link in enumerate(self.links) if link.is_back])
        for link in self.links:
            link.silence_state()
        self._divide(parameters)
        for worker in self._commands.workers.ranks:
            owned = {*self._ownership.tensors_of(worker)}
            theirs = {n for n in owned if self._replica_of.get(n, self._replica) == self._replica}
            shipped = ship(self.optimizers, parameters, theirs, whole)
            self._commands.workers.send(worker, TakeOptimizers(fresh, *shipped, self._replica_of))
            later = (
                self._ownership.tensors_of(w) for w in self._commands.workers.ranks if w > worker
            )
            # (a state stays here until all workers that have copies of its stage have got it)
            left = (owned & parameters.keys()).difference(*later)
            for link in self.links:
                link.drop_states(parameters[name] for name in left)
            # loaded states are mapped from the checkpoint's file: free the pages that were sent
            let_go_of_checkpoints()
        for link in self.links:
            link.shipped()

    def _divide(self, parameters: Mapping[str, Parameter]) -> None:
        """Divide the states of parameters over the replicas, if this is asked and owners are known.

        States that other replicas get are dropped here. Replicas exchange no message for this: each
        one divides in the same way.

        Args:
            parameters: by name, the parameters that all ranks have.
        """
        if self._shares is None or self.others is None or not self._steps_all:
            return
        divided = [link.optimizer for link in self.links if link.divided]
        known = {id(p) for o in divided for group in o.param_groups for p in group["params"]}
        # frozen ones apart, so that those that have states are divided evenly
        sizes: dict[tuple[bool, int], dict[str, int]] = {}
        with as_they_are():
            for name, parameter in parameters.items():
                if id(parameter) in known:
                    kind = not parameter.requires_grad, self._ownership.rank_of(name)
                    sizes.setdefault(kind, {})[name] = parameter.nbytes
        for (_, owner), named in sorted(sizes.items()):
            self.others.divide(owner, named)
        for optimizer in divided:
            self._shares.drop(optimizer)

    def _begin_sending(self, link: OptimizerLink) -> None:
        """Note that an optimizer is being sent; if it steps as a whole, tell the user so once.

        Args:
            link: the link of the optimizer.

        Raises:
            PlanError: it steps as a whole, which a streamed schedule does not allow.
            HybridError: it steps as a whole, but no rank has all of its parameters.
        """
        first, link.sent = not link.sent, True
        if not link.whole:
            return
        if self.streamed_by:
            raise PlanError(
                f"{type(link.optimizer).__name__} steps on the driver, as on one device: "
                f"{link.reason}. Under schedule={self.streamed_by!r}, which begins with later "
                "batches before a step is over, it cannot. Use schedule='gpipe', or another "
                "optimizer."
            )
        if first and self._commands.workers.ranks:
            self._say(line_about_whole(link.optimizer, link.reason))
        if first and self._shares is not None:
            self._say(line_about_undivided(link.optimizer, link.reason))
        refuse_deferred(link.optimizer, link.reason)

    def gather_states(self) -> None:
        """Fetch the workers' states into the optimizers, which are still connected.

        It is for a run that has failed, as long as the workers can be asked. (After a run that has
        ended well see :meth:`bring_states`.)
        """
        for link in self.links:
            link.gather_state()

    def bring_states(self) -> None:
        """After :meth:`close`: put the states of all ranks of the replica into the optimizers."""
        for link in self.links:
            link.bring_state()

    def forget(self) -> None:
        """After the run: drop the optimizers, which a reference to this object would keep alive."""
        for link in self.links:
            link.forget()
        self.optimizers = []
        self.links = []

    # -------------------------------------------- what an optimizer link asks for, and states

    @signals_deferred
    def step(self, index: int, changed: list[Hyperparameters] | None) -> None:
        """Have the workers step, after the driver's optimizer has stepped.

        Where states are divided over the replicas, each rank then gets the new weights of the other
        replicas' shares (collective over the replicas).

        Args:
            index: number of the optimizer.
            changed: its parameter groups, for their options; ``None``: they are as in the last
                step.
        """
        self.before_step()
        if self._ownership.any_network:  # else nobody would hear of the precision
            precision = CallPrecision.current(self._device)
            self.tell(
                StepOptimizer(index, changed, None if precision == self._precision else precision)
            )
            self._precision = precision
        if self._shares is not None:
            self._shares.exchange()

    def share(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Make the context of a step: inside, the optimizer steps this replica's share alone.

        The share is of the parameters that this rank owns: those whose states this replica has.
        Where states are not divided, nothing is changed. :meth:`step` must follow.
        """
        if self._shares is None or not self._steps_all:
            return nullcontext()
        return self._shares.alone(optimizer)

    def zero_grad(self, index: int, set_to_none: bool) -> None:
        """Have the workers clear the gradients of an optimizer; those on this rank are left.

        Args:
            index: number of the optimizer.
            set_to_none: drop the gradients; else they are filled with zeros.
        """
        if set_to_none:
            groups = self.optimizers[index].param_groups
            known = (self.names.get(id(p), "") for group in groups for p in group["params"])
            # a gradient that code here still refers to keeps its numbers, as on one device
            self._commands.remote.release_gradients(known)
        self.tell(ZeroGrad(index, set_to_none))

    def bring_gradients_to_owners(self) -> None:
        """Bring all gradients to the owners of their parameters, before they are used."""
        self._gradients.bring_to_owners()
        self._ownership.add_copied_gradients()

    def state(self, index: int) -> dict[str, dict[str, Any]]:
        """Ask the workers for their states of an optimizer.

        Args:
            index: number of the optimizer.

        Returns:
            By name of the parameter, its state by key. Tensors are on the CPU, mapped from files;
            inside of :meth:`unread` they stay on the workers until they are read. Empty: no network
            is cut.

        Raises:
            OSError: there is no room for a file.
        """
        if not self._ownership.any_network:
            return {}
        return self._states_there(index) if self.stays else self._files.states(index)

    @contextmanager
    def unread(self) -> Iterator[None]:
        """Inside, workers' states in state dicts are unread tensors, fetched when they are read."""
        self.stays = True
        try:
            yield
        finally:
            self.stays = False

    def _states_there(self, index: int) -> dict[str, dict[str, Any]]:
        """Outline the workers' states of an optimizer: tensors stay there until they are read.

        Args:
            index: number of the optimizer.

        Returns:
            By name of the parameter, its state by key, with unread tensors.
        """
        answers = self._commands.ask(OutlineStates(index))
        return {
            name: self.unread_state(index, self._replica, name, state)
            for answer in answers
            for name, state in answer.value.items()
        }

    def unread_state(
        self, index: int, replica: int, name: str, state: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The state of one parameter, with unread tensors for those that another rank has.

        Args:
            index: number of the optimizer.
            replica: number of the replica that has the state.
            name: name of the parameter.
            state: the state by key, with a `TensorSpec` in the place of each of these tensors.
        """
        # ranks are numbered replica by replica, and within one the driver is the first
        rank = replica * self._mesh.coordinates.ranks_per_replica + self._ownership.rank_of(name)
        return {
            key: self._files.unread(TensorAddress(rank, name, index, key), value)
            if isinstance(value, TensorSpec)
            else value
            for key, value in state.items()
        }

    def find(self, owned: TensorAddress) -> Tensor:
        """The tensor of an optimizer's state that this rank has.

        Args:
            owned: its address, with the number of the optimizer.
        """
        assert owned.optimizer is not None
        found: Tensor = self.links[owned.optimizer].states_here()[owned.name][owned.state]
        return found

    @contextmanager
    def at_hand(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, all parameters and gradients of an optimizer are on this rank's device.

        At the end, parameters and changed gradients of workers are sent back to them.
        """
        with as_they_are():
            ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
        names = (self.names.get(i) for i in ids)
        remote = [name for name in names if name in self._ownership.network_of]
        with self._commands.remote.at_hand(remote):
            yield

    def tell(self, command: OptimizerCommand) -> None:
        """Send the workers a command about an optimizer, after its new groups, if there are any.

        Before the first network is cut nothing is sent: workers have no optimizers then.
        """
        if self._ownership.any_network:
            self._ship_new_groups(command.optimizer)
            self._commands.tell(command)

    def _ship_new_groups(self, index: int) -> None:
        """Send the optimizers if this one was not sent, or was given groups or parameters since.

        Args:
            index: number of the optimizer.
        """
        if not self.links[index].sent or self.links[index].has_new_groups:
            self.ship()

    def ask_beside(
        self, command: OptimizerCommand, compute: Callable[[], T]
    ) -> tuple[list[Answer], T]:
        """Have the workers carry out a command about an optimizer, and compute something meanwhile.

        Before the first network is cut no worker is asked: workers have no optimizers then.

        Args:
            command: the command, which workers answer.
            compute: what is called here meanwhile; it must not send commands.

        Returns:
            Their answers, in the order of ``pp_rank``, and what ``compute`` has returned.
        """
        if self._ownership.any_network:
            self._ship_new_groups(command.optimizer)
            return self._commands.ask_beside(command, compute)
        self._commands.remote.flush()
        return [], compute()

    def knows(self, parameter: Tensor) -> bool:
        """Whether all ranks have a parameter, as it is not one that a hook has added here."""
        return id(parameter) in self.names

    def index_of(self, optimizer: Optimizer) -> int:
        """Return the number of an optimizer of the user's, or of Lightning's wrapper around it."""
        known = self.optimizers
        # (not `hasattr(optimizer, "optimizer")`: a class of the user's may have that attribute too)
        if optimizer not in known:
            wrapper: Any = optimizer
            optimizer = wrapper.optimizer  # Lightning's wrapper around one of them
        return known.index(optimizer)
