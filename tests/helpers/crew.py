"""The workers of a replica as their driver reaches them, without any worker: the test answers."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from in_memory import memory_channels

from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.comm.message_channel import Channel
from lightning_hybrid.comm.protocol import Answer, Command, TakeSwitches
from lightning_hybrid.driver.commands import Workers


class Crew:
    """The driver's channels to some workers, and the workers' ends of them.

    Args:
        count: how many workers.

    Attributes:
        workers: as the driver has them.
        ends: the workers' ends, by ``pp_rank``.
    """

    def __init__(self, count: int) -> None:
        pairs = {rank: memory_channels() for rank in range(1, count + 1)}
        self.ends: dict[int, Channel] = {rank: there for rank, (_, there) in pairs.items()}
        mesh: Any = SimpleNamespace(
            coordinates=Coordinates(0, 1, count + 1),
            channel=lambda rank: pairs[rank][0],
            timeout=timedelta(minutes=10),
            backend="gloo",
        )
        self.workers = Workers(mesh)

    def answer(self, rank: int, answer: Answer) -> None:
        """Send, before it is asked for."""
        self.ends[rank].send(answer)

    def heard(self, rank: int) -> Command:
        """The next command that a worker gets, but for settings of torch."""
        command = self.heard_all(rank)
        return self.heard(rank) if isinstance(command, TakeSwitches) else command

    def heard_all(self, rank: int) -> Command:
        """The next command that a worker gets."""
        return self.ends[rank].receive(Command)
