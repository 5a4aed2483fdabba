"""What Lightning sees."""

from lightning_hybrid.strategy.ranks import NAMES
from lightning_hybrid.strategy.strategy import HybridGabraStrategy

__all__ = ["NAMES", "HybridGabraStrategy"]
