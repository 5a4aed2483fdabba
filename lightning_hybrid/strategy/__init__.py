"""What Lightning sees: the strategies for its Trainer and for Fabric."""

from lightning_hybrid.strategy.fabric import HybridGabraFabricStrategy
from lightning_hybrid.strategy.strategy import HybridGabraStrategy

__all__ = ["HybridGabraFabricStrategy", "HybridGabraStrategy"]
