"""A network that has been cut, as one rank sees it."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.comm import CallKey
from lightning_hybrid.comm.protocol import Forward
from lightning_hybrid.graph import Stage
from lightning_hybrid.remote import is_deferred, occupy
from lightning_hybrid.stage.calls import Call, SavedForward, Traffic
from lightning_hybrid.stage.engine import Engine
from lightning_hybrid.stage.recomputation import Recipe


class StagedNetwork:
    """One network on one rank: the module, this rank's stages of it, its calls.

    Args:
        number: number of the network, the same on all ranks.
        name: dotted name in the LightningModule; empty for the LightningModule itself.
        module: the whole network. Only the tensors of this rank's stages are up to date.
        engine: runs this rank's stages.

    Attributes:
        calls: differentiable calls that still have a backward to come, by number.
        keys: keys of calls, by number.
    """

    def __init__(self, number: int, name: str, module: nn.Module, engine: Engine) -> None:
        self.number = number
        self.name = name
        self.module = module
        self.engine = engine
        self.calls: dict[int, Call] = {}
        self.keys: dict[int, CallKey] = {}
        self._traffic: dict[int, list[Traffic]] = {}
        self._parameters = list(module.parameters())

    def add_key(self, key: CallKey, number: int | None = None) -> int:
        """Register a key of calls: from then on :meth:`open` takes commands that have its number.

        Args:
            key: the key.
            number: on a worker, the driver's number for it; on the driver ``None``: the next
                number. (Some numbers never come to a worker: their call has failed on the driver
                before.)

        Returns:
            Its number.
        """
        number = len(self.keys) if number is None else number
        self.keys[number] = key
        self._traffic[number] = [Traffic() for _ in self.engine.owned]
        return number

    def uses_rng(self, key: int) -> bool:
        """Whether calls with this key draw random numbers in this rank's last stage or before it.

        Known after the first call with the key; false before.

        Args:
            key: number of the key.
        """
        return self._traffic[key][-1].uses_rng

    def open(self, command: Forward) -> Call:
        """Make the call that a command describes. A differentiable one is kept in :attr:`calls`.

        The caller removes it there when its last backward has run, or when no backward will follow.

        Args:
            command: the command; its key must be registered.
        """
        saved: list[dict[int, SavedForward | Recipe]] = [{} for _ in self.engine.owned]
        key, traffic = self.keys[command.key], self._traffic[command.key]
        travels = command.exchange, command.uses_rng
        call = Call(command.call, command.draw, key, *travels, traffic, saved, ahead=command.ahead)
        call.again = command.again
        call.averages = command.averages
        if call.key.grad:
            self.calls[command.call] = call
        return call

    def trainable(self) -> tuple[bool, ...]:
        """Read ``requires_grad`` of every parameter, in the order of ``module.parameters()``."""
        with as_they_are():
            return tuple([parameter.requires_grad for parameter in self._parameters])

    def set_trainable(self, flags: Sequence[bool]) -> None:
        """On a worker: freeze and thaw every parameter as on the driver (``requires_grad``).

        Args:
            flags: for each parameter, in the order of ``module.parameters()``: from
                :meth:`trainable` on the driver.
        """
        for parameter, trainable in zip(self._parameters, flags):
            parameter.requires_grad_(trainable)

    def owned(self) -> list[str]:
        """Names, in the LightningModule, of the parameters and buffers that this rank owns."""
        names = names_of([own.specializations[0] for own in self.engine.owned])
        return self.full_names(name for name in names if name not in self.engine.borrowed)

    def full_names(self, names: Iterable[str]) -> list[str]:
        """Turn names of tensors in the network into their names in the LightningModule."""
        return [f"{self.name}.{name}" if self.name else name for name in names]


def names_of(stages: Sequence[Stage]) -> list[str]:
    """List the names in the network of the parameters and buffers that stages use, each once."""
    named = (pair for s in stages for pair in (*s.named_parameters(), *s.named_buffers()))
    return list(dict.fromkeys(name for name, _ in named))


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Look up every parameter and buffer by name; a tied one is there under each of its names.

    Look up again for each use: code may replace a buffer.
    """
    named: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    return named | dict(module.named_buffers(remove_duplicate=False))


def write_tensors(module: nn.Module, values: Iterable[tuple[str, Tensor]]) -> None:
    """Copy values into a module's parameters and buffers, in place; deferred ones are skipped.

    A tensor that was left without memory gets memory. A buffer whose new value has another shape,
    or is sparse, takes over the value's memory.

    Args:
        module: the module.
        values: name of each parameter or buffer in the module, and its new value.
    """
    tensors = tensors_of(module)
    # in place, so that optimizers and stages that know a tensor see its new numbers
    with torch.no_grad(), as_they_are():
        for name, value in values:
            tensor = tensors[name]
            if is_deferred(tensor):
                continue
            if tensor.shape == value.shape and value.layout is torch.strided:
                occupy(tensor)
                tensor.copy_(value)
            else:  # a buffer of another size now, or a sparse one
                tensor.data = value.to(tensor.device, tensor.dtype)
