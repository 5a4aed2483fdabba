"""The worker: it carries out its driver's commands, in a process that is a server."""

from lightning_hybrid.worker.server import Server, serve_here
from lightning_hybrid.worker.worker import BUSY
