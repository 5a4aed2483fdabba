"""A worker in a thread of this process, and the driver's end of its channel."""

from datetime import timedelta
from threading import Thread
from types import SimpleNamespace
from typing import Any

import torch
from in_memory import memory_channels
from torch import nn

from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.comm.protocol import Answer, Command, GiveWeights
from lightning_hybrid.stage.rank_stages import StageOptions
from lightning_hybrid.worker.worker import Worker

GRADIENTS = {"weight": torch.full((2, 3), 3.0), "bias": torch.tensor([4.0, -1.0])}


class Service:
    """A worker in a thread, and the driver's end of its channel.

    Args:
        module: that the worker has a part of; a linear layer by default.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self.driver, there = memory_channels(("driver", "worker"))
        torch.manual_seed(0)
        self.module: Any = module or nn.Linear(3, 2)
        mesh: Any = SimpleNamespace(
            coordinates=Coordinates(1, 1, 2),
            device=torch.device("cpu"),
            channel=lambda _: there,
            timeout=timedelta(minutes=1),
            backend="gloo",
        )
        reports = {"name": lambda: "said", "broken": lambda: 1 / 0}
        self.worker = Worker(self.module, mesh, StageOptions())
        self.worker._reports |= reports
        self.error: Exception | None = None
        self._thread = Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self.worker.serve()
        except Exception as error:
            self.error = error

    def ask(self, command: Command) -> Answer:
        self.driver.send(command)
        return self.driver.receive(Answer)

    def weights(self) -> dict[str, torch.Tensor]:
        """What its parameters are."""
        return dict(self.ask(GiveWeights(["weight", "bias"])).tensors)

    @property
    def is_alive(self) -> bool:
        """Whether the worker serves."""
        return self._thread.is_alive()

    def close(self) -> Exception | None:
        """Wait for the end. Returns what `serve` has raised."""
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.error
