"""Pipeline and data parallelism for any LightningModule, unchanged.

Importing this package registers ``Trainer(strategy="hybrid_gabra")`` and its variants
``hybrid_gabra_spawn``, ``hybrid_gabra_fork`` and ``hybrid_gabra_notebook``, with ``lightning`` or,
if that is what is imported first, with ``pytorch_lightning``; and for ``Fabric``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_hybrid._registration import register_everywhere

if TYPE_CHECKING:
    from lightning_hybrid.driver import register_optimizer as register_optimizer
    from lightning_hybrid.options import Asynchronous as Asynchronous
    from lightning_hybrid.options import BySpeed as BySpeed
    from lightning_hybrid.options import Delayed as Delayed
    from lightning_hybrid.options import Equal as Equal
    from lightning_hybrid.options import Search as Search
    from lightning_hybrid.options import Sharded as Sharded
    from lightning_hybrid.planning import Plan as Plan
    from lightning_hybrid.strategy import HybridGabraFabricStrategy as HybridGabraFabricStrategy
    from lightning_hybrid.strategy import HybridGabraStrategy as HybridGabraStrategy

_ROOMS = {
    "HybridGabraStrategy": "strategy",
    "HybridGabraFabricStrategy": "strategy",
    "Plan": "planning",
    "Delayed": "options",
    "Search": "options",
    "Equal": "options",
    "BySpeed": "options",
    "Asynchronous": "options",
    "Sharded": "options",
    "register_optimizer": "driver",
}
__all__ = [*_ROOMS]

register_everywhere()


def __getattr__(name: str) -> Any:
    """Import a public name from its subpackage when it is first used.

    Until then torch is not imported: some subpackages, such as ``planning``, work without it.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
