"""Calls the user's hooks on gradients of weights once per backward pass, as on one device.

The gradient of a weight comes in pieces: of each micro-batch, of each call of the network, of a
penalty, of other ranks that use the weight too. Autograd calls a hook for each piece, but the
user's hooks are to get the sum, which they may change (`Tensor.register_hook`), or use for a step
and free (`Tensor.register_post_accumulate_grad_hook`). So before a backward pass the driver takes
the hooks off the weights, and puts aside the gradients that the weights have already. When all
pieces are there, it puts the hooks back and calls them. Gradients of weights that workers own are
taken there, and set there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.tensors import (
    HookTables,
    as_they_are,
    gradient_hooks,
    put_hooks,
    take_hooks,
    with_gradient_hooks,
)
from lightning_hybrid.driver.commands import Commands
from lightning_hybrid.driver.ownership import Ownership
from lightning_hybrid.remote import RemoteKind
from lightning_hybrid.stage import StagedNetwork


@dataclass(frozen=True)
class _TakenHooks:
    """The hooks and the gradient that were taken off one weight for a backward pass.

    Attributes:
        weight: the parameter that the hooks are put back on.
        hooks: tables of the hooks that are called before, and after, the gradient is accumulated.
        gradient: what was in ``weight.grad`` before the pass; ``None``: nothing.
    """

    weight: nn.Parameter
    hooks: HookTables
    gradient: Tensor | None


class WorkersGradients:
    """Takes and sets gradients at the workers that own the weights.

    Args:
        networks: the networks that are cut; the list may grow.
        commands: sends commands to the workers.
        ownership: knows who owns which weight.
    """

    def __init__(
        self, networks: Sequence[StagedNetwork], commands: Commands, ownership: Ownership
    ) -> None:
        self._networks = networks
        self._commands = commands
        self._ownership = ownership

    def _name(self, weight: Tensor) -> str:
        for network in self._networks:
            for name, parameter in network.module.named_parameters():
                if parameter is weight:
                    return network.full_names([name])[0]
        return ""

    def has(self, weight: Tensor) -> bool:
        """Whether a worker owns a weight."""
        return self._name(weight) in self._ownership.network_of

    def take(self, weight: Tensor) -> Tensor | None:
        """Take the gradient off a weight at its owner, and bring it to this device.

        Returns:
            The gradient; ``None``: the weight has none.
        """
        remote, name = self._commands.remote, self._name(weight)
        remote.flush()
        if name not in self._ownership.gradient_names():
            return None
        gradient = self._ownership.give(RemoteKind.GRADIENT, [name])[name].to(remote.device)
        self._ownership.clear_gradients([name])
        remote.outdate(RemoteKind.GRADIENT)
        return gradient

    def put(self, weight: Tensor, gradient: Tensor | None) -> None:
        """Set the gradient of a weight at its owner; ``None`` clears it."""
        name = self._name(weight)
        self._commands.remote.flush()
        self._ownership.clear_gradients([name])
        if gradient is not None:
            self._ownership.take(RemoteKind.GRADIENT, {name: gradient})
        self._commands.remote.outdate(RemoteKind.GRADIENT)


class WeightHooks:
    """The user's hooks on the weights of one network.

    Before a backward pass call :meth:`hold`, after it :meth:`release`.

    Args:
        module: the network.

    Attributes:
        held: whether the hooks are taken off now.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names = {weight: name for name, weight in module.named_parameters()}
        self._taken: list[_TakenHooks] = []
        self.held = False

    def __bool__(self) -> bool:
        """Whether any weight has a hook of the user's on its gradient."""
        with as_they_are():
            return any(True for _ in self._hooked())

    def names(self) -> list[str]:
        """Names in the network of the weights that have a hook of the user's on their gradient."""
        with as_they_are():
            return [name for name, _ in self._hooked()]

    def late(self) -> list[str]:
        """Names in the network of the weights with post-accumulate hooks of the user's.

        Such a hook may step an optimizer.
        """
        with as_they_are():
            found = [(name, gradient_hooks(weight, late=True)) for name, weight in self._hooked()]
        return [name for name, hooks in found if any(map(is_of_the_user, hooks))]

    def hold(self, there: WorkersGradients) -> None:
        """Take hooks off the weights for a backward pass, and put the weights' gradients aside.

        Args:
            there: takes and sets gradients at workers.
        """
        # (a hook sees the gradient of this pass alone, and not what had accumulated before it)
        self.held = True
        with as_they_are():
            taken = [(weight, take_hooks(weight)) for _, weight in self._hooked()]
        self._taken += [_TakenHooks(weight, hooks, _take(weight, there)) for weight, hooks in taken]

    def _hooked(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The weights that have hooks of the user's, each with its name in the network."""
        for weight in with_gradient_hooks(self._names):
            if any(map(is_of_the_user, gradient_hooks(weight))):
                yield self._names[weight], weight

    def release(self, there: WorkersGradients, *, call: bool = True) -> None:
        """After a backward pass, put the hooks back, and call them on the pass's summed gradients.

        Their results are added to the gradients that :meth:`hold` has put aside.

        Args:
            there: as for :meth:`hold`.
            call: whether to call the hooks; else the summed gradients are added as they are.

        Raises:
            Exception: a hook has raised it.
        """
        # 1. Everything is in its place again before the first hook, which may raise, or look.
        taken = self._taken
        self._taken = []
        self.held = False
        with as_they_are():
            for held in taken:
                put_hooks(held.weight, held.hooks)
        arisen = [(held, _take(held.weight, there)) for held in taken]
        for held in taken:
            _put(held.weight, held.gradient, there)
        # 2. The hooks, each with the whole gradient of the pass.
        with torch.no_grad():  # (not `as_they_are`: hooks see proxies of other ranks' weights)
            for held, gradient in reversed(arisen):  # backward begins at the last layers
                if gradient is not None:
                    _add(held, gradient, there, call=call)


def _take(weight: nn.Parameter, there: WorkersGradients) -> Tensor | None:
    """Return the gradient of a weight, here or at its owner, and set it to ``None`` there."""
    if there.has(weight):
        return there.take(weight)
    with as_they_are():
        gradient, weight.grad = weight.grad, None
    return gradient


def _put(weight: nn.Parameter, gradient: Tensor | None, there: WorkersGradients) -> None:
    """Set the gradient of a weight, here or at its owner."""
    if there.has(weight):
        there.put(weight, gradient)
        return
    with as_they_are():
        weight.grad = gradient


def _add(held: _TakenHooks, gradient: Tensor, there: WorkersGradients, *, call: bool) -> None:
    weight, (before, after) = held.weight, held.hooks if call else (None, None)
    for hook in [*(before or {}).values()]:
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    if there.has(weight):
        former = held.gradient
        there.put(weight, gradient if former is None else former + gradient)
    elif weight.grad is None:
        weight.grad = gradient
    elif weight.grad.layout is gradient.layout is torch.strided:
        weight.grad += gradient  # in place, as autograd does: others may hold this tensor
    else:
        weight.grad = weight.grad + gradient
    for hook in [*(after or {}).values()]:
        if hook(weight) is not None:
            raise RuntimeError("Tensor post accumulate grad hooks should return None.")


def is_of_the_user(hook: object) -> bool:
    """Whether a hook on a gradient was set by the user's code, not by this package."""
    ours = __name__.partition(".")[0] + "."
    return not (getattr(hook, "__module__", "") or "").startswith(ours)
