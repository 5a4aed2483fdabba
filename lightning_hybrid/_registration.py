"""Register the names of the strategies with each package of Lightning, when it is imported.

Lightning exists as ``lightning`` and as ``pytorch_lightning`` with ``lightning_fabric``. This
package imports one of them when a strategy is made and not before, since
``lightning_hybrid.allocation`` needs NumPy alone. A package of Lightning that is imported later is
noticed by a finder on ``sys.meta_path``. Lightning's registries get functions, which import the
strategies when they are called.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

from lightning_hybrid._package import Package, chosen
from lightning_hybrid.errors import HybridError

NAMES = {
    "hybrid_gabra": "popen",
    "hybrid_gabra_spawn": "spawn",
    "hybrid_gabra_fork": "fork",
    "hybrid_gabra_notebook": "fork",
}
"""Registered names, and how each starts its processes."""


class _Registry(NamedTuple):
    """Where names of strategies are registered.

    Attributes:
        package: of Lightning.
        name: of the registry in the module ``strategies``.
        strategy: name of the class of this package that belongs there.
    """

    package: Package
    name: str
    strategy: str


_OF_TRAINERS = "StrategyRegistry", "HybridGabraStrategy"
_OF_FABRIC = "STRATEGY_REGISTRY", "HybridGabraFabricStrategy"
_REGISTRIES = {
    "lightning.pytorch": _Registry("lightning", *_OF_TRAINERS),
    "lightning.fabric": _Registry("lightning", *_OF_FABRIC),
    "pytorch_lightning": _Registry("pytorch_lightning", *_OF_TRAINERS),
    "lightning_fabric": _Registry("pytorch_lightning", *_OF_FABRIC),
}


def register_everywhere() -> None:
    """Register with what is imported of Lightning now, and with what will be."""
    sys.meta_path.insert(0, _Registering())
    for module in _REGISTRIES:
        if module in sys.modules:
            register(module)


def register(module: str) -> None:
    """Register the names with a part of Lightning.

    Args:
        module: dotted name of the part. In the package that is not used the names are refused with
            advice; without them its Trainer would only say that it does not know the names.
    """
    package, name, strategy = _REGISTRIES[module]
    registry = getattr(import_module(f"{module}.strategies"), name)
    for each, start_method in NAMES.items():
        registry.register(
            each,
            partial(_make, strategy) if package == chosen() else _refuse,
            description=f"Stages placed by GABRA, in replicas (start method {start_method})",
            override=True,
            start_method=start_method,
        )


def _make(strategy: str, **options: Any) -> Any:
    return getattr(import_module("lightning_hybrid.strategy"), strategy)(**options)


def _refuse(**_: Any) -> None:
    # (imported here: it imports Lightning)
    raise HybridError(import_module("lightning_hybrid._lightning").OTHER_PACKAGE)


class _Registering(MetaPathFinder):
    """Finds nothing by itself; registers with parts of Lightning once others have loaded them."""

    def __init__(self) -> None:
        self._asks_others = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _REGISTRIES or self._asks_others:
            return None
        self._asks_others = True
        try:
            spec = find_spec(fullname)
        finally:
            self._asks_others = False
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = partial(_load, fullname, loader, loader.exec_module)
        return spec


def _load(name: str, loader: Any, load: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Load a part of Lightning by its own loader, and register with it."""
    del loader.exec_module
    load(module)
    register(name)
