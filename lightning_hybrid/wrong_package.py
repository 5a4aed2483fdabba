"""``pytorch_lightning`` has a registry and base classes of its own: our names there say so.

Without this its Trainer would only answer that the name is unknown.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from lightning_hybrid.errors import HybridError

_MODULE = "pytorch_lightning.strategies"


def refuse_in_pytorch_lightning(names: Iterable[str]) -> None:
    """Register ``names`` with ``pytorch_lightning``, now or when it is imported, to refuse them."""
    names = tuple(names)
    if _MODULE in sys.modules:
        _register(sys.modules[_MODULE], names)
    else:
        sys.meta_path.insert(0, _WhenImported(names))


def _register(strategies: ModuleType, names: Iterable[str]) -> None:
    for name in names:
        strategies.StrategyRegistry.register(name, _refuse, "refused", override=True)


def _refuse(**_: Any) -> NoReturn:
    raise HybridError(
        "strategy='hybrid_gabra' is made for `lightning`, and this Trainer is of "
        "`pytorch_lightning`, which has other base classes. Replace `import pytorch_lightning as "
        "pl` by `import lightning.pytorch as pl` everywhere (LightningModule, callbacks, loggers)."
    )


class _WhenImported(importlib.abc.MetaPathFinder):
    """Lets the usual finders find the module, and registers when it has been run."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                _register(module, self._names)

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec
