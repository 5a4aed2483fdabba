"""Carries out a driver's commands to read and set the weights and gradients of a worker."""

from collections.abc import Sequence

import torch
from torch import nn

from lightning_hybrid.comm import Answer, protocol
from lightning_hybrid.remote import FileOfTensors, occupy
from lightning_hybrid.stage import LendingLine, StagedNetwork, tensors_of, write_tensors
from lightning_hybrid.state import FilesOfWorker


class WorkerWeights:
    """Reads and sets weights, buffers and gradients of a worker when its driver commands it.

    Args:
        module: the LightningModule of this rank.
        parameters: all of its parameters by name, a tied one under each of its names.
        networks: the networks that are cut; the list may grow.
        files: makes answers with tensors in files that the driver maps.
        line: takes tensors to the driver and back, from device to device.

    Attributes:
        lent: names of the parameters that this rank owns and the driver uses too; the worker adds
            them when it cuts a network.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: dict[str, nn.Parameter],
        networks: Sequence[StagedNetwork],
        files: FilesOfWorker,
        line: LendingLine,
    ) -> None:
        self._files = files
        self._line = line
        self._module = module
        self._parameters = parameters
        self._networks = networks
        self.lent: list[str] = []

    def _give_weights(self, command: protocol.GiveWeights) -> Answer:
        tensors = tensors_of(self._module)
        return Answer(tensors=[(name, tensors[name]) for name in command.names])

    def _lend_tensors(self, command: protocol.LendTensors) -> None:
        parameters = [self._parameters[name] for name in command.names or self.lent]
        found: list[torch.Tensor] = [*parameters]
        if command.gradients:
            found = [g for parameter in parameters if (g := parameter.grad) is not None]
        # the driver waits for all of them
        assert len(found) == len(parameters), command
        types = command.types or [tensor.dtype for tensor in found]
        self._line.to_driver([tensor.to(kind) for tensor, kind in zip(found, types)])

    def _take_lent_gradients(self, _: protocol.TakeLentGradients) -> None:
        with torch.no_grad():
            gradients = {name: torch.empty_like(self._parameters[name]) for name in self.lent}
        self._line.to_owner([*gradients.values()])
        self._take_gradients(protocol.TakeGradients(add=True, tensors=gradients.items()))

    def _take_weights(self, command: protocol.TakeWeights) -> None:
        # (each is written as it arrives, since there may be no room for all of them at once)
        write_tensors(self._module, command.tensors)

    def _find_files(self, command: protocol.FindFiles) -> Answer:
        same = {file for file in command.files if FileOfTensors.at(file.path) == file}
        return Answer(value=same)

    def _read_weights(self, command: protocol.ReadWeights) -> None:
        tensors = tensors_of(self._module)
        with torch.no_grad():
            for name, part in command.parts.items():
                occupy(tensors[name])
                part.read_into(tensors[name])

    def _write_tensors(self, command: protocol.WriteTensors) -> Answer:
        """Write the weights and buffers that this rank owns to a file, or send them.

        At the end of a run (``command.at_end``) their gradients are added. Tensors that
        ``command.but`` names are left out.

        Returns:
            The answer of :meth:`FilesOfWorker.answer`, for two dictionaries of tensors by name:
            ``weights`` and ``gradients``.
        """
        tensors, owned = tensors_of(self._module), self._owned()
        kept = {name: tensors[name] for name in owned if name not in command.but}
        gradients: dict[str, torch.Tensor] = {}
        if command.at_end:
            gradients = {name: g for name in kept if (g := kept[name].grad) is not None}
        value = {"weights": kept, "gradients": gradients}
        return self._files.answer(value, command.folder)

    def _owned(self) -> list[str]:
        """Return the names of the parameters and buffers of all networks that this rank owns.

        They are names in the LightningModule.
        """
        return [name for network in self._networks for name in network.owned()]

    def _name_gradients(self, _: protocol.NameGradients) -> Answer:
        named = self._parameters
        gradients = ((name, named[name].grad) for name in self._owned() if name in named)
        dense = {name: g.layout is torch.strided for name, g in gradients if g is not None}
        return Answer(value=dense)

    def _give_gradients(self, command: protocol.GiveGradients) -> Answer:
        gradients: dict[str, torch.Tensor] = {}
        for name in command.names:
            parameter = self._parameters[name]
            if parameter.grad is not None:
                gradients[name] = parameter.grad
                if command.take:
                    parameter.grad = None
        return Answer(tensors=gradients.items())

    def _take_gradients(self, command: protocol.TakeGradients) -> None:
        for name, value in command.tensors:
            parameter = self._parameters[name]
            if parameter.grad is None:
                parameter.grad = value.to(parameter.device)
            elif command.add:
                parameter.grad.add_(value.to(parameter.device))
            else:
                # (in place, so that code which refers to this gradient sees the change)
                parameter.grad.copy_(value)

    def _clear_gradients(self, command: protocol.ClearGradients) -> None:
        for name in command.names:
            self._parameters[name].grad = None
