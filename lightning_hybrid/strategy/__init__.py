"""What Lightning sees."""

from lightning_hybrid.strategy.strategy import NAMES, HybridGabraStrategy

__all__ = ["NAMES", "HybridGabraStrategy"]
