"""Finds the network: the outermost module with parameters that the user's code calls.

Until it is found, a `WatchedForward` replaces ``forward`` of every module that owns parameters. The
first call of one of them, from outside of any other, tells which module the user's code calls:
``self(x)``, ``self.net(x)`` and ``self.net.forward(x)`` alike.
"""

import copy
import inspect
from collections.abc import Callable, Iterable
from types import CodeType, MethodType
from typing import Any

import torch
from torch import nn

from lightning_hybrid.errors import NetworkNotFoundError

CallHandler = Callable[..., Any]


class WatchedForward:
    """Replaces ``forward`` on an instance of a module, and calls a handler instead.

    Copies and pickles of the module have the original ``forward``.

    Args:
        handler: called with four arguments: the module's name, the module, the positional arguments
            of the call as a tuple, the keyword arguments as a dictionary. What it returns, the call
            returns.
        name: dotted name of the module.
        module: the module.
        own: the ``forward`` that the user has put on the instance, if there is one.
    """

    def __init__(
        self, handler: CallHandler, name: str, module: nn.Module, own: Callable[..., Any] | None
    ) -> None:
        self._handler = handler
        self._name = name
        self._module = module
        self.own = own

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the module's own ``forward``: libraries leave out arguments that it lacks."""
        return inspect.signature(own_forward(self._module))

    @property
    def __code__(self) -> CodeType:
        """That of the module's own ``forward``, for which ``torch.export`` asks."""
        code: CodeType = own_forward(self._module).__code__
        return code

    # a torch.compile of the user's around the call must not look into the handler
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._handler(self._name, self._module, arguments, keywords)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy of the module (an average of weights, say) is an ordinary module.
        if self.own is not None:
            return copy.deepcopy(self.own, memo)
        copied = memo.get(id(self._module))
        if copied is None:
            return self
        return MethodType(type(self._module).forward, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.own is not None:
            return _same, (self.own,)
        # the method of the class: pickle makes the module before it has attributes
        return getattr, (self._module, "forward")


def _same(value: Any) -> Any:
    return value


def watch(module: nn.Module, name: str, handler: CallHandler) -> None:
    """Have calls of ``module`` go to ``handler`` until `unwatch`; replaces an earlier handler.

    Args:
        module: the module; a `WatchedForward` is put on the instance.
        name: its dotted name, for the handler.
        handler: see `WatchedForward`.
    """
    # (in the instance's own dictionary, so that its class and other instances stay as they are)
    before = module.__dict__.get("forward")
    own = before.own if isinstance(before, WatchedForward) else before
    module.__dict__["forward"] = WatchedForward(handler, name, module, own)


def unwatch(module: nn.Module) -> None:
    """Have calls of ``module`` go to its own ``forward`` again; no effect if it is not watched."""
    before = module.__dict__.get("forward")
    if not isinstance(before, WatchedForward):
        return
    if before.own is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = before.own


def is_watched(module: nn.Module) -> bool:
    """Whether calls of ``module`` go to a handler (see `watch`)."""
    return isinstance(module.__dict__.get("forward"), WatchedForward)


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """The ``forward`` of a module as the user has it, also while the module is watched.

    It is the one that the user has put on the instance, else that of the class.
    """
    found = module.__dict__.get("forward")
    own = found.own if isinstance(found, WatchedForward) else found
    return own if own is not None else MethodType(type(module).forward, module)


def candidates(module: nn.Module, names: Iterable[str] | None = None) -> dict[str, nn.Module]:
    """The modules, by dotted name, that may be the network: those whose calls are to be watched.

    They may lie inside of each other, and the LightningModule itself, named "", may be among them.

    Args:
        module: the LightningModule.
        names: dotted names that the user has chosen (``network=...``), for these modules alone;
            ``None``: every module that has a parameter, its own or of a module inside of it.

    Raises:
        NetworkNotFoundError: no module owns a parameter, or there is no module of a chosen name.
    """
    everything = dict(module.named_modules())
    if names is not None:
        for name in names:
            if name not in everything:
                known = ", ".join(repr(n) for n, _ in module.named_children()) or "none"
                raise NetworkNotFoundError(
                    f"network={name!r}: {type(module).__name__} has no module of that name. "
                    f"Its own are: {known}."
                )
        return {name: everything[name] for name in names}
    found = {n: m for n, m in everything.items() if next(m.parameters(), None) is not None}
    if not found:
        raise NetworkNotFoundError(
            f"{type(module).__name__} owns no module with parameters, so there is no network to "
            "cut into stages. Make the network an attribute of the LightningModule, or use "
            "strategy='ddp'."
        )
    return found
