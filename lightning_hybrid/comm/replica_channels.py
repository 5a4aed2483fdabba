"""Over which wires and channels a rank speaks to the others of its replica."""

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
    """The wires between two stages on different ranks.

    Attributes:
        activations: for tensors on the device, from the stage to the next one.
        gradients: likewise, from the next one.
        host: for tensors on the CPU where the device is another one, both ways.
    """

    activations: Wire
    gradients: Wire
    host: Wire


class Lines(ABC):
    """The lines of one rank.

    Args:
        coordinates: this rank.

    Attributes:
        coordinates: this rank.
    """

    def __init__(self, coordinates: Coordinates) -> None:
        self.coordinates = coordinates
        self._channels: dict[tuple[int, int], Channel] = {}

    @abstractmethod
    def wires(self, devices: Sequence[int]) -> Mapping[int, EdgeWires]:
        """The wires of the ring driver -> stage 0 -> ... -> last stage = driver, for a placement.

        Edge k leads from stage k to the next one, or from the last to stage 0. All ranks of a
        replica call this together.

        Args:
            devices: ``pp_rank`` of each stage.

        Returns:
            By number, the wires of the edges between this rank and another one.
        """

    @abstractmethod
    def wire(self, pp_rank: int, tag: int) -> Wire:
        """A wire to another rank of this replica; those of different tags do not mix."""

    def channel(self, pp_rank: int, tag: int = 0) -> Channel:
        """A channel to another rank of this replica: the same one whenever it is asked for.

        Args:
            pp_rank: of the other rank.
            tag: 0 for commands and answers; channels of other tags to the same rank are queues of
                their own.
        """
        # two channels on one wire would take each other's messages
        if (pp_rank, tag) not in self._channels:
            self._channels[pp_rank, tag] = Channel(self.wire(pp_rank, tag))
        return self._channels[pp_rank, tag]

    def say_goodbye(self, failure: Failure) -> None:
        """This rank has failed: peers of this replica that wait for a message of it raise that.

        Nobody is waited for. Peers that are gone themselves are passed over, and nothing is said
        where this rank has left before.
        """
        if self.coordinates.ranks_per_replica > 1 and not self.coordinates.is_driver:
            self.channel(0)  # the driver may wait for its first answer
        for channel in self._channels.values():
            with suppress(RuntimeError):  # ConnectionLost, or that of a group that is given up
                channel.send_last(Leaving(failure))
