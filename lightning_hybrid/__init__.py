"""Pipeline and data parallelism for any LightningModule, unchanged.

Importing this package registers ``Trainer(strategy="hybrid_gabra")`` and its variants
``hybrid_gabra_spawn``, ``hybrid_gabra_fork`` and ``hybrid_gabra_notebook``.
"""

from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.strategy import HybridGabraStrategy

__all__ = ["HybridGabraStrategy", "Plan"]
