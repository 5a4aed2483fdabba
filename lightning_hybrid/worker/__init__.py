"""The worker: it carries out its driver's commands."""

from lightning_hybrid.worker.worker import BUSY, Worker, serve
