"""A worker: it owns stages of each network, not the last one, and obeys its driver."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_hybrid.network import Stage
from lightning_hybrid.runtime.calls import BackwardMode, CallKey
from lightning_hybrid.runtime.clipping import gradient_norms, gradients_of
from lightning_hybrid.runtime.commands import Cut, Op
from lightning_hybrid.runtime.engine import Engine, StageOptions
from lightning_hybrid.runtime.failure import Failure
from lightning_hybrid.runtime.heartbeat import Heartbeat
from lightning_hybrid.runtime.large import Claim, share_optimizers
from lightning_hybrid.runtime.links import control_of, link_stages
from lightning_hybrid.runtime.mesh import Mesh
from lightning_hybrid.runtime.optimizers import Hyperparameters, state_of, take_groups, unship
from lightning_hybrid.runtime.performance import Stopwatch
from lightning_hybrid.runtime.replicas import Copies, state_buffers
from lightning_hybrid.runtime.scaling import unscale
from lightning_hybrid.runtime.signals import left_to_the_driver
from lightning_hybrid.runtime.staged import (
    StagedNetwork,
    names_of,
    own_buffers,
    own_parameters,
    tensors_of,
    write_tensors,
)
from lightning_hybrid.runtime.trace import Trace
from lightning_hybrid.runtime.transport import ConnectionLost

DRIVER = 0
_ANSWERED = {
    Op.CUT,
    Op.CHECK,
    Op.GRADIENT_NORM,
    Op.UNSCALE,
    Op.GIVE_WEIGHTS,
    Op.GIVE_OPTIMIZER,
    Op.NAME_GRADIENTS,
    Op.GIVE_GRADIENTS,
    Op.REPORT,
    Op.GIVE_BORROWED,
    Op.END,
}


class Worker:
    """Serves the commands of one run.

    Args:
        module: the LightningModule of this rank. Its training flags and weights follow the
            driver's for the stages that this rank owns.
        mesh: the groups.
        device: where the stages go.
        options: how they compute.
        watch: adds up the time in which this rank computes.
        reports: what the driver may ask this rank for, by name.

    Attributes:
        optimizers: the user's, with the state of what this rank owns.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        device: torch.device,
        options: StageOptions,
        watch: Stopwatch | None = None,
        reports: Mapping[str, Callable[[], Any]] = MappingProxyType({}),
    ) -> None:
        self._options = options
        self._module, self._mesh, self._device = module, mesh, device
        self._control = control_of(mesh)
        self._trace = Trace(mesh.place.rank, str(mesh.place), watch)
        self._reports = reports
        self._networks: list[StagedNetwork] = []
        self.optimizers: list[Optimizer] = []
        self._parameters = dict(module.named_parameters())
        self._names = {id(p): name for name, p in self._parameters.items()}
        self._modes: tuple[int, int] | None = None
        self._failure: Failure | None = None
        self._claim: Claim | None = None

    def serve(self) -> Any:
        """Obey until the run ends.

        Returns:
            What the driver sends at the end: its results.

        Raises:
            Exception: the driver's, which has failed; caused by a RemoteError.
            ConnectionLost: the driver was lost.
        """
        self._heartbeat = Heartbeat(self._control, [DRIVER], self._mesh.timeout)
        with left_to_the_driver():
            try:
                return self._serve()
            finally:
                self._heartbeat.close()
                self._trace.write()
                for network in self._networks:
                    network.engine.copies.close()

    def _serve(self) -> Any:
        while True:
            self._heartbeat.on = False
            number, arguments, payload = self._control.hear(DRIVER)
            operation = Op(number)
            self._heartbeat.on = operation in _ANSWERED
            if operation is Op.ABORT:
                raise payload.exception()
            answer = None
            try:
                answer = getattr(self, f"_{operation.name.lower()}")(payload, *arguments)
            except ConnectionLost:
                raise
            except Exception as error:
                self._failure = self._failure or Failure.of(error, str(self._mesh.place))
            if operation in _ANSWERED:
                self._control.tell(DRIVER, 0, payload=(self._failure, answer))
            if operation in (Op.GIVE_WEIGHTS, Op.GIVE_GRADIENTS) and self._failure is None:
                self._send_asked(operation, payload)
            if operation is Op.GIVE_BORROWED and self._failure is None:
                self._send_borrowed()
            if operation is Op.END and self._failure is None:
                self._control.flush()
                return payload

    # -- the network

    def _cut(self, order: Cut, *_: int) -> None:
        # first of all: the others wait for this rank in it
        known = order.network < len(self._networks)
        links = {} if known else link_stages(
            self._mesh, order.devices, self._control, self._device
        )  # fmt: skip
        network = self._module.get_submodule(order.name)
        stages = {n: Stage(code, network, self._device) for n, code in order.stages.items()}
        if known:
            self._networks[order.network].engine.add_variant(stages)
            return
        mine = [stages[number] for number in links]
        prefix = f"{order.name}." if order.name else ""
        names = [prefix + n for n in names_of(mine)]
        whole = [*network.named_parameters(), *network.named_buffers()]
        self._claim = Claim(self._module, names, (prefix + n for n, _ in whole), self._mesh.place)
        for stage in mine:
            stage.move(self._device)
        own = own_parameters(mine, order.borrowed)
        state, buffers = partial(state_buffers, network), partial(own_buffers, mine)
        copies = Copies(own, buffers, self._mesh.copies, self._trace, state)
        engine = Engine(
            stages,
            order.devices,
            self._mesh.place,
            links,
            copies,
            self._device,
            order.schedule,
            order.seed,
            self._trace,
            self._options,
        )
        staged = StagedNetwork(order.network, order.name, network, engine, order.borrowed)
        self._networks.append(staged)

    def _forward(self, key: CallKey | None, *arguments: int) -> None:
        number, call, draw, index, exchange, draws = arguments
        network = self._networks[number]
        if key is not None:
            network.add_key(key, index)
        opened = network.open(call, draw, index, exchange=bool(exchange), draws=bool(draws))
        if self._modes != (number, index):
            try:
                network.set_trainable(opened.key)
                self._modes = (number, index)
            except Exception as error:  # the other stages wait for this one all the same
                self._failure = self._failure or Failure.of(error, str(self._mesh.place))
        network.engine.failure = self._failure
        with opened.key.precision.applied(), torch.set_grad_enabled(opened.key.grad):
            network.engine.forward(opened)
        self._failure = network.engine.failure

    def _backward(
        self, _: None, number: int, call: int, pattern: int, flags: int, *__: int
    ) -> None:
        network = self._networks[number]
        mode = BackwardMode.of_flags(pattern, flags)
        opened = network.calls[call] if mode.keep else network.calls.pop(call)
        network.engine.failure = self._failure
        network.engine.backward(opened, mode)
        self._failure = network.engine.failure

    def _free(self, _: None, number: int, call: int, *__: int) -> None:
        self._networks[number].calls.pop(call, None)

    def _reduce(self, _: None, number: int, *__: int) -> None:
        self._networks[number].engine.copies.reduce()

    def _buffers(self, _: None, state: int, *__: int) -> None:
        for network in self._networks:
            network.engine.copies.broadcast_buffers(state=bool(state))

    # -- the optimizers

    def _take_optimizers(self, data: bytes, fresh: int, *_: int) -> None:
        before, self.optimizers = self.optimizers, unship(data, self._parameters)
        for index, (old, new) in enumerate(zip(before, self.optimizers)):
            for parameter, state in () if fresh >> index & 1 else old.state.items():
                new.state.setdefault(parameter, state)

    def _zero_grad(self, _: None, index: int, set_to_none: int, *__: int) -> None:
        self.optimizers[index].zero_grad(bool(set_to_none))

    def _step(self, groups: list[Hyperparameters] | None, index: int, *_: int) -> None:
        if self._failure is not None:
            return
        if groups is not None:
            take_groups(self.optimizers[index], groups, self._parameters)
        self.optimizers[index].step()

    def _gradient_norm(self, order: float, index: int, *_: int) -> dict[str, torch.Tensor]:
        return gradient_norms(self.optimizers[index], self._names, order)

    def _unscale(self, factor: torch.Tensor, index: int, *_: int) -> bool:
        return unscale(gradients_of(self.optimizers[index]), factor)

    def _scale_gradients(self, factor: float, index: int, *_: int) -> None:
        for gradient in gradients_of(self.optimizers[index]):
            gradient.mul_(factor)

    def _clip_values(self, bound: float, index: int, *_: int) -> None:
        for gradient in gradients_of(self.optimizers[index]):
            gradient.clamp_(-bound, bound)

    def _take_groups(self, groups: list[Hyperparameters], index: int, *_: int) -> None:
        take_groups(self.optimizers[index], groups, self._parameters)

    # -- gradients, as the driver's windows show and change them

    def _name_gradients(self, *_: Any) -> list[str]:
        owned = [name for network in self._networks for name in network.owned()]
        return [n for n in owned if n in self._parameters and self._parameters[n].grad is not None]

    def _give_gradients(self, *_: Any) -> None:
        """Answered with word that all is well; the tensors follow."""

    def _take_gradients(self, _: None, add: int, *__: int) -> None:
        for name, value in self._control.receive_tensors(DRIVER).items():
            parameter = self._parameters[name]
            if parameter.grad is None:
                parameter.grad = value.to(parameter.device)
            elif add:
                parameter.grad.add_(value.to(parameter.device))
            else:
                parameter.grad.copy_(value)

    def _give_borrowed(self, *_: Any) -> None:
        """Answered with word that all is well; the tensors follow."""

    def _send_borrowed(self) -> None:
        gradients: dict[str, torch.Tensor] = {}
        for network in self._networks:
            prefix = f"{network.name}." if network.name else ""
            for name in sorted(network.borrowed):
                parameter = self._parameters[prefix + name]
                if parameter.grad is not None:
                    gradients[prefix + name], parameter.grad = parameter.grad, None
        self._control.send_tensors(DRIVER, gradients)

    def _clear_gradients(self, names: list[str], *_: int) -> None:
        for name in names:
            self._parameters[name].grad = None

    # -- weights

    def _forget_failure(self, *_: Any) -> None:
        self._failure = None

    def _give_weights(self, *_: Any) -> None:
        """Answered with word that all is well; the tensors follow."""

    def _send_asked(self, operation: Op, requests: dict[int, list[str]] | None) -> None:
        """Tensors of the names asked for, which may all be other workers'; by default all."""
        named: dict[str, Any] = tensors_of(self._module)
        if operation is Op.GIVE_GRADIENTS:
            named = {name: parameter.grad for name, parameter in self._parameters.items()}
        if requests is None:
            asked = [name for network in self._networks for name in network.owned()]
        else:
            asked = requests.get(self._mesh.place.position, [])
        if asked or requests is None:
            self._control.send_tensors(DRIVER, {name: named[name] for name in asked})

    def _take_weights(self, *_: Any) -> None:
        arrived: list[str] = []

        def each() -> Iterator[tuple[str, torch.Tensor]]:
            for name, value in self._control.receive_each(DRIVER):
                yield name, value
                arrived.append(name)

        write_tensors(self._module, each())
        if self._claim is not None:
            claim, self._claim = self._claim, None
            claim.settle(arrived)

    def _share(self, _: None, number: int, optimizers: int, *__: int) -> None:
        self._networks[number].engine.copies.broadcast_weights()
        if optimizers:
            share_optimizers(self.optimizers, self._names, self._mesh.copies, self._device)

    def _give_optimizer(self, _: None, index: int, *__: int) -> dict[str, dict[str, Any]]:
        return state_of(self.optimizers[index], self._names)

    def _report(self, name: str, *_: int) -> Any:
        return self._reports[name]()

    def _check(self, *_: Any) -> None:
        """Answered with word that all went well up to here."""

    def _end(self, *_: Any) -> None:
        """Answered with word that all went well up to here."""
