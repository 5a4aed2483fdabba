"""Calls the user's hooks on gradients of weights once per backward pass, as on one device.

The gradient of a weight comes in pieces: of each micro-batch and call of the network, of a penalty,
of other ranks that use the weight too. Autograd calls a hook for each piece, but the user's are to
get the sum, which they may change (`Tensor.register_hook`) or step with and free
(`Tensor.register_post_accumulate_grad_hook`). So before a backward pass every rank takes the hooks
off its weights, and puts aside the gradients that are there already; when all pieces are there it
puts the hooks back and calls them.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
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


class WeightHooks:
    """The user's hooks on the weights of one network, on one rank.

    Args:
        module: the network.

    Attributes:
        held: whether the hooks are taken off now.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names = {weight: name for name, weight in module.named_parameters()}
        self._taken: list[_TakenHooks] = []
        self.held, self._everywhere = False, False

    def __bool__(self) -> bool:
        """Whether a weight has a hook of the user's."""
        with as_they_are():
            return any(True for _ in self._hooked())

    def names(self) -> list[str]:
        """Names of the weights that have a hook of the user's."""
        with as_they_are():
            return [name for name, _ in self._hooked()]

    def late(self) -> list[str]:
        """Names of the weights with post-accumulate hooks of the user's, which may step."""
        with as_they_are():
            found = [(name, gradient_hooks(weight, late=True)) for name, weight in self._hooked()]
        return [name for name, hooks in found if any(map(is_of_the_user, hooks))]

    def hold(self, *, everywhere: bool = False) -> None:
        """Take hooks off for a backward pass, and put aside the gradients that are there.

        Args:
            everywhere: whether this rank holds and calls the hooks on weights of other ranks too,
                whose gradients it then fetches and sets.
        """
        # (a hook sees the gradient of this pass alone, and not what had accumulated before it)
        self.held, self._everywhere = True, everywhere
        with as_they_are():
            taken = [(weight, take_hooks(weight)) for _, weight in self._hooked()]
        with self._gradients():
            for weight, hooks in taken:
                self._taken.append(_TakenHooks(weight, hooks, _kept(weight.grad)))
                weight.grad = None

    def _gradients(self) -> AbstractContextManager[None]:
        """Inside, gradients are those of this rank, or those that the user's code sees."""
        return nullcontext() if self._everywhere else as_they_are()

    def _hooked(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The weights that have hooks of the user's, with their names."""
        for weight in with_gradient_hooks(self._names):
            if any(map(is_of_the_user, gradient_hooks(weight))):
                yield self._names[weight], weight

    def release(self, *, call: bool = True) -> None:
        """Put the hooks back after a backward pass, and call them on its summed gradients.

        Args:
            call: whether to call them; else the gradients are added as they are.

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
        with self._gradients():
            arisen = [(held, _kept(held.weight.grad)) for held in taken]
            for held in taken:
                held.weight.grad = held.gradient
        # 2. The hooks, each with the whole gradient of the pass.
        with torch.no_grad():  # (not `as_they_are`: hooks see proxies of other ranks' weights)
            for held, gradient in reversed(arisen):  # backward begins at the last layers
                if gradient is not None:
                    _add(held, gradient, call=call)


def _kept(gradient: Tensor | None) -> Tensor | None:
    """A gradient as it is now; that of another rank's weight would show later ones too."""
    if gradient is None or type(gradient) is Tensor:
        return gradient
    with torch.no_grad():
        return gradient.detach().clone()


def _add(held: _TakenHooks, gradient: Tensor, *, call: bool) -> None:
    weight, (before, after) = held.weight, held.hooks if call else (None, None)
    for hook in [*(before or {}).values()]:
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    if weight.grad is None:
        weight.grad = gradient
    elif weight.grad.layout is gradient.layout is torch.strided:
        weight.grad += gradient  # in place, as autograd does: others may hold this tensor
    else:
        weight.grad = weight.grad + gradient
    for hook in [*(after or {}).values()]:
        if hook(weight) is not None:
            raise RuntimeError("Tensor post accumulate grad hooks should return None.")


def is_of_the_user(hook: object) -> bool:
    """Whether a hook on a gradient is not one of this package's."""
    ours = __name__.partition(".")[0] + "."
    return not (getattr(hook, "__module__", "") or "").startswith(ours)
