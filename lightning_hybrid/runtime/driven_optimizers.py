"""The user's optimizers on the driver: they step, clip and unscale on all ranks of its replica."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.comm import Precision, TensorSpec, signals_deferred
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
from lightning_hybrid.errors import PlanError
from lightning_hybrid.runtime.clipping import clip_factor, gradient_norms, gradients_of
from lightning_hybrid.runtime.commands import Commands
from lightning_hybrid.runtime.files import FilesOfWorkers
from lightning_hybrid.runtime.gradients import ReplicaGradients
from lightning_hybrid.runtime.loss_scaling import unscale
from lightning_hybrid.runtime.mapped_checkpoint import let_go_of_checkpoints
from lightning_hybrid.runtime.optimizer_link import OptimizerLink
from lightning_hybrid.runtime.optimizer_trial import announce, refuse_deferred, why_whole
from lightning_hybrid.runtime.optimizers import ship
from lightning_hybrid.runtime.ownership import Ownership
from lightning_hybrid.runtime.sharded_checkpoint import Owned, refuse_later, unread_there
from lightning_hybrid.tensors import Kind

ALL = -1
"""Every bit of ``fresh``."""


class DrivenOptimizers:
    """The optimizers of one run, on the driver.

    Args:
        module: the LightningModule.
        names: names of its parameters by identity, those that all ranks have.
        device: the driver's.
        commands: to the workers.
        ownership: which worker owns what.
        gradients: of this replica.
        files: of the workers.
        say: tells the user something, in one line.

    Attributes:
        streamed_by: the schedule, if it begins with later batches early; then no optimizer may step
            whole.
        before_step: called before an optimizer steps.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Mapping[int, str],
        device: torch.device,
        commands: Commands,
        ownership: Ownership,
        gradients: ReplicaGradients,
        files: FilesOfWorkers,
        say: Callable[[str], None],
    ) -> None:
        self._module, self._names, self._device, self._say = module, names, device, say
        self._commands, self._ownership, self._gradients = commands, ownership, gradients
        self._files = files
        self._optimizers: list[Optimizer] = []
        self._links: list[OptimizerLink] = []
        self._precision: Precision | None = None  # that the workers know of
        self.streamed_by, self._stays = "", ""
        self.before_step: Callable[[], None] = lambda: None

    def __deepcopy__(self, memo: object) -> "DrivenOptimizers":
        """Copies of a Trainer, and of what it has patched, drive the same workers."""
        return self

    @property
    def optimizers(self) -> list[Optimizer]:
        """The user's."""
        return self._optimizers

    def connect(self, optimizers: Sequence[Optimizer]) -> None:
        """Take charge of the user's optimizers."""
        self.close()
        self._optimizers, self._links = list(optimizers), []
        if not self._commands.workers.ranks:  # they have no counterparts, and stay as they are
            return
        self._links = [
            OptimizerLink(optimizer, self._names, index, self)
            for index, optimizer in enumerate(optimizers)
        ]
        self.ship(fresh=ALL)

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
        if self._ownership.any_network:
            self.ship_in_any_case(fresh)

    def ship_in_any_case(self, fresh: int) -> None:
        """The same, also where no network has been cut."""
        # what a hook has added on this rank, the others do not have; and names that have changed
        # since layers changed places, they do not know
        here = (p for p in self._module.parameters() if id(p) in self._names)
        parameters = {self._names[id(p)]: p for p in here}
        self._try_all()
        whole = [link.whole for link in self._links]
        # what a state that is here does not hold, the optimizer has no more
        fresh |= sum(link.is_back << index for index, link in enumerate(self._links))
        for link in self._links:
            link.ship_quietly()
        for worker in self._commands.workers.ranks:
            owned = {*self._ownership.tensors_of(worker)}
            shipped = ship(self.optimizers, parameters, owned, whole)
            self._commands.workers.send(worker, TakeOptimizers(fresh, *shipped))
            for link in self._links:
                link.leave(parameters[name] for name in owned & parameters.keys())
            let_go_of_checkpoints()
        for link in self._links:
            link.shipped()

    def _try_all(self) -> None:
        """Find out which optimizers step whole, here, if that is not known yet."""
        for link in self._links:
            tried = link.try_once(lambda o: why_whole(o, self._names, self._device))
            if link.reason and self.streamed_by:
                raise PlanError(
                    f"{type(link.optimizer).__name__} steps on the driver, as on one device: "
                    f"{link.reason}. Under schedule={self.streamed_by!r}, which begins with later "
                    "batches before a step is over, it cannot. Use schedule='gpipe', or another "
                    "optimizer."
                )
            if tried and link.reason:
                self._say(announce(link.optimizer, link.reason))
            if link.reason:
                refuse_deferred(link.optimizer, link.reason)

    def gather_states(self) -> None:
        """Have the states of all ranks here."""
        for link in self._links:
            link.gather_state()

    def bring_states(self) -> None:
        """After the run: as :meth:`gather_states`, for good."""
        for link in self._links:
            link.bring_state()

    # ------------------------------------------------------------------ as counterparts of one

    def step(self, index: int, changed: list[Hyperparameters] | None) -> None:
        """Have the workers step."""
        self.before_step()
        if not self._ownership.any_network:  # nobody would hear of the precision
            return
        precision = Precision.current(self._device)
        self._tell(Step(index, changed, None if precision == self._precision else precision))
        self._precision = precision

    def zero_grad(self, index: int, set_to_none: bool) -> None:
        """Have the workers clear their gradients."""
        if set_to_none:
            groups = self._optimizers[index].param_groups
            known = (self._names.get(id(p), "") for group in groups for p in group["params"])
            self._commands.remote.release_gradients(known)
        self._tell(ZeroGrad(index, set_to_none))

    def settle(self) -> None:
        """Gradients are about to be used."""
        self._gradients.settle()

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
        found: dict[str, dict[str, Any]] = {}
        ranks = self._commands.workers.ranks
        for rank, answer in zip(ranks, self._commands.ask(OutlineStates(index))):
            for name, state in answer.value.items():
                found[name] = {
                    key: self._unread_one(index, Owned(rank, name, index, key), value)
                    if isinstance(value, TensorSpec)
                    else value
                    for key, value in state.items()
                }
        return found

    def _unread_one(self, index: int, owned: Owned, spec: TensorSpec) -> Tensor:
        remote = self._commands.remote
        before = remote.state(Kind.PARAMETER)  # a step changes both

        def read() -> Tensor:
            refuse_later(f"{owned.state} of {owned.name}", remote.state(Kind.PARAMETER) == before)
            workers = self._commands.workers
            workers.send(owned.rank, GiveOptimizer(index, owned.name))
            found: Tensor = workers.hear([owned.rank])[0].value[owned.name][owned.state]
            return found

        return unread_there(spec, owned, read)

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
            self._commands.tell(TakeGroups(index, groups))

    # ------------------------------------------------------------------ gradients of one

    @signals_deferred
    def clip_norm(self, optimizer: Optimizer, max_norm: float, order: float = 2.0) -> None:
        """Scale the gradients of all stages so that their common norm is at most ``max_norm``."""
        index = self._index(optimizer)
        self._commands.remote.flush()
        with as_they_are():
            norms = gradient_norms(optimizer, self._names, order)
        if self._ownership.any_network:
            self._send_new_groups(index)
            for answer in self._commands.ask(GradientNorm(index, order)):
                norms |= answer.value
        factor = clip_factor(norms, self._names.values(), max_norm, order)
        self._tell(ScaleGradients(index, factor))
        with as_they_are():
            for gradient in gradients_of(optimizer):
                gradient.mul_(factor)

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
