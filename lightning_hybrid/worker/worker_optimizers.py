"""The user's optimizers on a worker: it steps, clips and unscales what it owns, on command."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.comm import Answer, CallPrecision, Group, protocol
from lightning_hybrid.state import (
    FilesOfWorker,
    StateShares,
    TensorAddress,
    gradient_norms,
    gradients_of,
    parameters_of,
    take_groups,
    unscale,
    unship,
)


class WorkerOptimizers:
    """The user's optimizers on a worker, with the states of the parameters that it owns.

    Args:
        parameters: all parameters of the LightningModule by name, a tied one under each of its
            names.
        files: makes answers with tensors in files that other ranks map.
        shares_over: the process group of the ranks with the same stages, if these divide the states
            of optimizers; ``None``: they do not.

    Attributes:
        all: this rank's copies of the optimizers, in the user's order; empty until the driver has
            sent them.
        names: by ``id``, the names of the parameters; of a tied one the first, as on the driver.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        files: FilesOfWorker,
        shares_over: Group | None = None,
    ) -> None:
        self._files = files
        self.all: list[Optimizer] = []
        self._parameters = parameters
        self._precision: CallPrecision | None = None  # the driver's, in which steps compute
        self.names: dict[int, str] = {}
        for name, parameter in parameters.items():
            self.names.setdefault(id(parameter), name)
        self._shares = shares_over and StateShares(shares_over, self.names, {})

    def _take_optimizers(self, command: protocol.TakeOptimizers) -> None:
        """Replace the optimizers of this rank by those that the driver sends.

        This rank's states of an optimizer are dropped if ``command.fresh`` has its number. Other
        states stay, unless the driver sends one for the same parameter.
        """
        before = self.all
        for index in command.fresh:  # (the states that come replace these)
            if index < len(before):
                before[index].state.clear()
        self.all = unship(command.data, command.tensors, self._parameters)
        for old, new in zip(before, self.all):
            for parameter, state in old.state.items():
                # (a state that does not come with the command is this rank's own, and newer)
                new.state.setdefault(parameter, state)
        if self._shares:
            self._shares.replica_of.update(command.replica_of)

    def states(self, index: int) -> dict[str, dict[str, Any]]:
        """Return the states that this rank has of one optimizer.

        Args:
            index: number of the optimizer in :attr:`all`.

        Returns:
            By name of the parameter, its state by key; parameters without a state are left out.
        """
        states = self.all[index].state.items()
        return {self.names[id(parameter)]: dict(state) for parameter, state in states if state}

    def find(self, owned: TensorAddress) -> Tensor:
        """Return a tensor of this rank's states of optimizers.

        Args:
            owned: which one: it names an optimizer, a parameter and a key in the parameter's state.
        """
        assert owned.optimizer is not None
        parameter = self._parameters[owned.name]
        found: Tensor = self.all[owned.optimizer].state[parameter][owned.state]
        return found

    def _write_states(self, command: protocol.WriteStates) -> Answer:
        return self._files.answer(self.states(command.optimizer), command.folder)

    def _zero_grad(self, command: protocol.ZeroGrad) -> None:
        self.all[command.optimizer].zero_grad(command.set_to_none)

    def _step_optimizer(self, command: protocol.StepOptimizer) -> None:
        """Step an optimizer, with the groups and the precision of the driver.

        If replicas divide the states, this rank steps its share alone, and gets the weights of the
        others (collective over the ranks that have the same stages).
        """
        optimizer = self.all[command.optimizer]
        if command.groups is not None:
            take_groups(optimizer, command.groups, self._parameters)
        # (a step under autocast runs under autocast on each rank; sent when it has changed)
        self._precision = command.precision or self._precision
        if self._shares is None:
            self._compute(optimizer)
            return
        try:
            with self._shares.alone(optimizer):
                self._compute(optimizer)
        finally:  # (also after an error, since the other replicas wait in it)
            self._shares.exchange()

    def _compute(self, optimizer: Optimizer) -> None:
        with self._precision.applied() if self._precision else nullcontext():
            optimizer.step()

    def attend(self, command: protocol.StepOptimizer) -> None:
        """Take part in the exchange of weights of a step, without stepping.

        Called on a rank that has failed, in place of a step. If replicas divide states, the others
        wait for this rank in the exchange; if they do not, nothing happens.
        """
        if self._shares:
            with self._shares.alone(self.all[command.optimizer]):
                pass
            self._shares.exchange()

    def _gradient_norm(self, command: protocol.GradientNorm) -> Answer:
        known = [p for p in parameters_of(self.all[command.optimizer]) if id(p) in self.names]
        return Answer(tensors=(("norms", gradient_norms(known, command.order)),))

    def _clip_norm(self, command: protocol.ClipNorm) -> None:
        parameters = parameters_of(self.all[command.optimizer])
        total = torch.tensor(command.total, dtype=command.dtype)
        nn.utils.clip_grads_with_norm_(parameters, command.max_norm, total)

    def _clip_values(self, command: protocol.ClipValues) -> None:
        nn.utils.clip_grad_value_(parameters_of(self.all[command.optimizer]), command.bound)

    def _unscale(self, command: protocol.Unscale) -> Answer:
        gradients = gradients_of(self.all[command.optimizer])
        return Answer(holds=unscale(gradients, torch.tensor(command.factor)))
