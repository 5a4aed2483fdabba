"""What a worker obeys."""

from lightning_hybrid.worker.worker import Worker

__all__ = ["Worker"]
