"""The wires and channels between a rank and the others of its replica."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from lightning_hybrid.comm.connections import Wire
from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.comm.message_channel import Channel
from lightning_hybrid.comm.protocol import Leaving
from lightning_hybrid.comm.travelling_errors import Failure


class EdgeWires(NamedTuple):
    """The wires between two neighbouring stages on different ranks.

    Attributes:
        activations: wire for tensors on the stages' device, from the stage before to the stage
            behind.
        gradients: wire for tensors on the stages' device, from the stage behind to the stage
            before.
        host: wire, in both directions, for tensors that stay on the CPU if that device is a GPU.
    """

    activations: Wire
    gradients: Wire
    host: Wire


class ReplicaWires(ABC):
    """The wires and channels of one rank to the others of its replica.

    Args:
        coordinates: coordinates of this rank.

    Attributes:
        coordinates: coordinates of this rank.
    """

    def __init__(self, coordinates: Coordinates) -> None:
        self.coordinates = coordinates
        self._channels: dict[tuple[int, int], Channel] = {}

    @abstractmethod
    def wires(self, devices: Sequence[int]) -> Mapping[int, EdgeWires]:
        """Return the wires of the ring driver -> stage 0 -> ... -> last stage = driver.

        Edge k leads from stage k to the next stage; the last edge leads from the last stage to
        stage 0. All ranks of a replica call this together; wires that are made already are returned
        without a wait.

        Args:
            devices: ``pp_rank`` of each stage.

        Returns:
            By number of the edge, the wires of each edge between this rank and another one.
        """

    @abstractmethod
    def wire(self, pp_rank: int, tag: int) -> Wire:
        """Make a wire to another rank of this replica, for CPU tensors, without waiting.

        Args:
            pp_rank: ``pp_rank`` of the other rank.
            tag: must be the same on both ranks. Wires with different tags are independent.
        """

    def channel(self, pp_rank: int, tag: int = 0) -> Channel:
        """Return the channel to another rank of this replica; the first call makes it.

        No call waits for the other rank.

        Args:
            pp_rank: ``pp_rank`` of the other rank.
            tag: 0 for commands and answers; each other tag has a separate queue of messages.
        """
        # kept: two channels on one wire would receive each other's messages
        if (pp_rank, tag) not in self._channels:
            self._channels[pp_rank, tag] = Channel(self.wire(pp_rank, tag))
        return self._channels[pp_rank, tag]

    def say_goodbye(self, failure: Failure) -> None:
        """Send the failure of this rank to its peers in the replica, which raise it on receipt.

        Peers are the ranks to which this rank has a channel; a worker's driver, and a driver's
        workers, in any case. Does not wait for them. Peers that are gone are skipped, and so are
        channels over groups that this rank has closed already.
        """
        # (also channels not used yet: a worker possibly waits for its first command, or the driver
        # for a first answer)
        ranks = self.coordinates.ranks_per_replica
        for pp_rank in range(1, ranks) if self.coordinates.is_driver else [0]:
            self.channel(pp_rank)
        for channel in self._channels.values():
            with suppress(RuntimeError):  # ConnectionLost, or the error of a closed group
                channel.send(Leaving(failure), last=True)
