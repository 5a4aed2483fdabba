"""Pipeline and data parallelism for any LightningModule, unchanged.

Importing this package registers ``Trainer(strategy="hybrid_gabra")`` and its variants
``hybrid_gabra_spawn``, ``hybrid_gabra_fork`` and ``hybrid_gabra_notebook``, with ``lightning`` or,
if that is what is imported by then, with ``pytorch_lightning``; and for ``Fabric``.
"""

from lightning_hybrid._lightning import FabricStrategyRegistry, StrategyRegistry
from lightning_hybrid.planning import Plan
from lightning_hybrid.process import refuse_in_other_package
from lightning_hybrid.strategy import NAMES, HybridGabraFabricStrategy, HybridGabraStrategy

__all__ = ["HybridGabraFabricStrategy", "HybridGabraStrategy", "Plan"]

HybridGabraStrategy.register_strategies(StrategyRegistry)
HybridGabraFabricStrategy.register_strategies(FabricStrategyRegistry)
refuse_in_other_package(NAMES)
