"""What Lightning sees."""

from lightning_hybrid.strategy.fabric import HybridGabraFabricStrategy
from lightning_hybrid.strategy.replica_ranks import NAMES
from lightning_hybrid.strategy.strategy import HybridGabraStrategy

__all__ = ["NAMES", "HybridGabraFabricStrategy", "HybridGabraStrategy"]
