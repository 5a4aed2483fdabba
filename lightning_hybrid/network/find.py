"""Find the network: the outermost call of a module that owns parameters.

Until it is found, every module that owns parameters carries a watch in place of its ``forward``.
The first call of one of them, from outside of any other, tells which module the user's code calls:
``self(x)``, ``self.net(x)`` and ``self.net.forward(x)`` alike.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

from lightning_hybrid.errors import NetworkNotFoundError

Handler = Callable[..., Any]


class Watch:
    """Stands in for ``forward`` on an instance; copies and pickles of the module lose it.

    Args:
        handler: called with the module's name, the module, and the arguments of the call.
        name: dotted name of the module.
        module: the module.
    """

    def __init__(self, handler: Handler, name: str, module: nn.Module) -> None:
        self._handler, self._name, self._module = handler, name, module

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._handler(self._name, self._module, arguments, keywords)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy of the module (an average of weights, say) is an ordinary module.
        copied = memo.get(id(self._module))
        if copied is None:
            return self
        return MethodType(type(self._module).forward, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "forward")  # likewise, since pickle makes it bare first


def watch(module: nn.Module, name: str, handler: Handler) -> None:
    """Have calls of ``module`` go to ``handler``."""
    module.__dict__["forward"] = Watch(handler, name, module)


def unwatch(module: nn.Module) -> None:
    """Have calls of ``module`` go to its own ``forward`` again."""
    if isinstance(module.__dict__.get("forward"), Watch):
        del module.__dict__["forward"]


@contextmanager
def unwatched(module: nn.Module) -> Iterator[None]:
    """Inside, ``module`` and all in it run their own ``forward``."""
    watches = [(m, m.__dict__["forward"]) for m in module.modules() if "forward" in m.__dict__]
    watches = [(m, w) for m, w in watches if isinstance(w, Watch)]
    for part, _ in watches:
        del part.__dict__["forward"]
    try:
        yield
    finally:
        for part, handler in watches:
            part.__dict__["forward"] = handler


def candidates(module: nn.Module, names: Iterable[str] | None = None) -> dict[str, nn.Module]:
    """The modules, by name, whose call may be the network's.

    Args:
        module: the LightningModule.
        names: the user's choice; ``None`` for every module that owns a parameter.

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
