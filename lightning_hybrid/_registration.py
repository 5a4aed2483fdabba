"""Register the names of the strategies with each package of Lightning, when it is imported.

Lightning exists as ``lightning`` and as ``pytorch_lightning`` with ``lightning_fabric``. This
package imports one of them when a strategy is made and not before, since
``lightning_hybrid.allocation`` and ``lightning_hybrid.planning`` work without torch. A package of
Lightning that is imported later is noticed by a finder on ``sys.meta_path``. Lightning's registries
get functions, which import the strategies when they are called.
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

from lightning_hybrid._which_lightning import Package, chosen
from lightning_hybrid.errors import HybridError

NAMES = {
    "hybrid_gabra": "popen",
    "hybrid_gabra_spawn": "spawn",
    "hybrid_gabra_fork": "fork",
    "hybrid_gabra_notebook": "fork",
}
"""Names of strategies that are registered, and the start method that each stands for."""


class _Registry(NamedTuple):
    """One of Lightning's registries of strategies, and what this package registers there.

    Attributes:
        package: the package of Lightning that has the registry.
        name: name of the registry in the submodule ``strategies``.
        strategy: name of the class in `lightning_hybrid.strategy` that is registered.
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
    """Register our strategies with Lightning: with what is imported now, and what is later.

    Puts a finder on ``sys.meta_path``, which notices later imports of Lightning.
    """
    sys.meta_path.insert(0, _Registering())
    for module in _REGISTRIES:
        if module in sys.modules:
            register(module)


def register(module: str) -> None:
    """Register the names of our strategies in the registry of a module of Lightning.

    In a package of Lightning that this process does not use, the names raise an error with advice.
    (Unregistered, they would only be called unknown by its Trainer.)

    Args:
        module: dotted name of the module, a key of `_REGISTRIES`.
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
    """An import finder that registers our strategies when a module of Lightning is imported.

    It has the other finders find the module, and wraps the loader that they return (`_load`).
    """

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
    """Execute a module of Lightning, as its loader would, then register our strategies with it.

    Stands in for the loader's ``exec_module`` once, and gives the loader its own back.

    Args:
        name: dotted name of the module, a key of `_REGISTRIES`.
        loader: the loader of the module.
        load: the loader's own ``exec_module``.
        module: the module to execute.
    """
    del loader.exec_module
    load(module)
    register(name)
