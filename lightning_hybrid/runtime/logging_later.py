"""What a captured ``forward`` logs is logged when the call is over.

``self.log`` looks at the state of the loops, which a graph cannot hold. While a call is captured,
its arguments are kept in a list (which TorchDynamo fills after each call, tensors included), and
Lightning gets them afterwards, in their order and within the same hook.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class LoggingLater:
    """The logging of one LightningModule.

    Args:
        module: the LightningModule.
    """

    def __init__(self, module: nn.Module) -> None:
        kept: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

        def log(*args: Any, **kwargs: Any) -> None:
            kept.append(("log", args, kwargs))

        def log_dict(*args: Any, **kwargs: Any) -> None:
            kept.append(("log_dict", args, kwargs))

        self._module, self._kept = module, kept
        # TorchDynamo looks at their identities
        self._instead: dict[str, Callable[..., None]] = {"log": log, "log_dict": log_dict}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, calls are kept; at the end they are made, unless there was an error."""
        own = {name: vars(self._module).get(name) for name in self._instead}
        vars(self._module).update(self._instead)
        try:
            yield
            calls = self._kept.copy()
        finally:
            self._kept.clear()
            for name, value in own.items():
                del vars(self._module)[name]
                if value is not None:
                    vars(self._module)[name] = value
        for name, args, kwargs in calls:
            getattr(self._module, name)(*args, **kwargs)

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Inside, calls of `log` are dropped, and not kept for later."""
        count = len(self._kept)
        try:
            yield
        finally:
            del self._kept[count:]
