"""Links between neighbouring stages, for activations and gradients.

The stages of a replica form a ring: driver -> stage 0 -> ... -> last stage, which is on the driver.
A link packs and orders messages; the send and receive of the process group are
:class:`~lightning_hybrid.comm.connections.GroupWire`'s.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import TypeVar

import torch
from torch import Tensor

from lightning_hybrid.comm.connections import Transfer, Wire
from lightning_hybrid.comm.mesh import Mesh
from lightning_hybrid.comm.message_channel import Channel
from lightning_hybrid.comm.protocol import StageMessage
from lightning_hybrid.comm.replica_channels import ReplicaWires
from lightning_hybrid.comm.tensor_specs import TensorSpec, bytes_of
from lightning_hybrid.errors import HybridError

W = TypeVar("W", bound=StageMessage)

Devices = Sequence[int | tuple[int, ...]]
"""For each stage, in order, the ``pp_rank`` of the rank that has it; if the stage has copies, a
tuple with the ``pp_rank`` of each copy."""


class PeerLink:
    """A link to a stage on another rank: tensors and words, both ways.

    A word is a small message, a :class:`~lightning_hybrid.comm.protocol.StageMessage`. Words have a
    queue of their own: they mix neither with commands and answers, nor with the words of another
    pair of stages on the same two ranks.

    Args:
        words: channel for words.
        out: wire for the tensors that are sent.
        back: wire for the tensors that are received. It must not be ``out``: the two directions on
            one NCCL communicator wait for each other.
        host: wire, in both directions, for tensors that stay on the CPU if ``device`` is a GPU.
        device: device of the received tensors, except those whose spec has ``on_cpu``.
    """

    def __init__(
        self, words: Channel, out: Wire, back: Wire, host: Wire, device: torch.device
    ) -> None:
        self._words = words
        self._out = out
        self._back = back
        self._host = host
        self._device = device
        self._sent: deque[list[tuple[Transfer, Tensor]]] = deque()

    def send(self, tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> None:
        """Begin to send tensors to the peer, which must call :meth:`post` with equal specs.

        Does not wait. The link keeps the tensors, and the caller must not change them, until a
        :meth:`flush` has waited for the peer to receive them.

        Args:
            tensors: the tensors.
            specs: the spec of each tensor.
        """
        laid_out = [bytes_of(spec.laid_out(tensor)) for tensor, spec in zip(tensors, specs)]
        self._sent.append(
            [
                (self._wire(spec, self._out).send(memory), memory)
                for memory, spec in zip(laid_out, specs)
                if memory.numel()
            ]
        )

    def post(self, specs: Sequence[TensorSpec]) -> "Arriving":
        """Begin to receive the next message of tensors; the result's ``wait()`` returns them.

        Args:
            specs: the spec of each tensor of the message.
        """
        tensors = [spec.empty(self._device) for spec in specs]
        transfers = [
            self._wire(spec, self._back).receive(bytes_of(tensor))
            for tensor, spec in zip(tensors, specs)
            if tensor.numel()
        ]
        return _Posted(tensors, transfers)

    def _wire(self, spec: TensorSpec, of_the_device: Wire) -> Wire:
        return self._host if spec.on_cpu and self._device.type != "cpu" else of_the_device

    def flush(self, left: int = 0) -> None:
        """Wait until the peer has received all messages of tensors but the last ``left``.

        The sender calls it to limit the memory of messages that are not received yet, or before it
        changes tensors that it has sent.
        """
        while len(self._sent) > left:
            for transfer, _ in self._sent.popleft():
                transfer.wait()

    def send_word(self, word: StageMessage) -> None:
        """Send a word, without waiting."""
        self._words.send(word)

    def receive_word(self, kind: type[W]) -> W:
        """Wait for the peer's next word, and return it.

        Args:
            kind: class that the word must have.

        Raises:
            ConnectionLost: the peer is gone, or has not answered within the time-out.
            HybridError: the word is of another class.
        """
        return self._words.receive(kind)


class _Posted:
    """Tensors that :meth:`PeerLink.post` receives, with the transfers that fill them."""

    def __init__(self, tensors: list[Tensor], transfers: list[Transfer]) -> None:
        self._tensors = tensors
        self._transfers = transfers

    def wait(self) -> list[Tensor]:
        """Wait until the tensors have arrived, and return them.

        Raises:
            ConnectionLost: the peer is gone, or has not answered within the time-out.
        """
        for transfer in self._transfers:
            transfer.wait()
        return self._tensors


class _Mailbox:
    """Queues of the tensors and words that one stage has sent to a neighbour on the same rank."""

    def __init__(self) -> None:
        self.tensors: deque[list[Tensor]] = deque()
        self.words: deque[StageMessage] = deque()

    def wait(self) -> list[Tensor]:
        """Take the oldest message, which must be there.

        (The sender is in the same thread, and comes earlier in the list of instructions.)
        """
        return self.tensors.popleft()


Arriving = _Posted | _Mailbox
"""A message of tensors whose receive has begun; its method ``wait()`` returns the tensors."""


class LocalLink:
    """A link to a stage on the same rank; tensors are passed on as detached copies.

    Args:
        out: where this end puts what it sends.
        back: where the other end puts what it sends.
    """

    def __init__(self, out: _Mailbox, back: _Mailbox) -> None:
        self._out = out
        self._back = back

    @classmethod
    def pair(cls) -> tuple["LocalLink", "LocalLink"]:
        """Make the two ends of a link: what one sends, the other receives."""
        along, against = _Mailbox(), _Mailbox()
        return cls(along, against), cls(against, along)

    def send(self, tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> None:
        # copies, as over a wire, since the receiver may write into them
        copies = [
            spec.empty(tensor.device).copy_(tensor.detach()) for tensor, spec in zip(tensors, specs)
        ]
        self._out.tensors.append(copies)

    def post(self, specs: Sequence[TensorSpec]) -> Arriving:
        return self._back

    def flush(self, left: int = 0) -> None:
        """Return at once: the receiver has its copies already."""

    def send_word(self, word: StageMessage) -> None:
        self._out.words.append(word)

    def receive_word(self, kind: type[W]) -> W:
        word = self._back.words.popleft()
        if not isinstance(word, kind):
            raise HybridError(
                f"Expected {kind.__name__} from another stage of this rank, and found "
                f"{type(word).__name__}. This is an error in lightning_hybrid."
            )
        return word


Link = PeerLink | LocalLink
"""One end of the connection of two neighbouring stages."""


@dataclass(frozen=True)
class StageLinks:
    """The links of one stage to its two neighbours in the ring.

    Attributes:
        previous: link from which activations come and to which gradients go; for stage 0 the link
            to the driver, which sends the inputs.
        next: link to which activations go and from which gradients come; for the last stage, on the
            driver, the link to stage 0, to which the driver sends the inputs.
    """

    previous: Link
    next: Link


@dataclass(frozen=True)
class LinksByMicrobatch:
    """The links of one stage on this rank (or of one copy of it), for each micro-batch.

    Copies of a stage on several ranks take micro-batches in turn. A ring is the ranks that a
    micro-batch passes, one copy of each stage; ring k has the micro-batches k, k + ``count``, and
    so on. Messages within one ring keep their order as in a chain of stages without copies.

    Attributes:
        count: number of rings of the replica; 1 if no stage has copies.
        rings: by number of the ring, this stage's links in it; only rings that this copy is in.
    """

    count: int
    rings: Mapping[int, StageLinks]

    def ring(self, microbatch: int) -> int:
        """Number of the ring that a micro-batch passes; also for rings that this copy is not in."""
        return microbatch % self.count

    def at(self, microbatch: int) -> StageLinks:
        """Return the links for a micro-batch, which this copy of the stage must compute."""
        return self.rings[microbatch % self.count]

    def __iter__(self) -> Iterator[StageLinks]:
        return iter(self.rings.values())


def copies_of(device: int | tuple[int, ...]) -> tuple[int, ...]:
    """The ``pp_rank`` of each copy of a stage, from its entry in :data:`Devices`."""
    return device if isinstance(device, tuple) else (device,)


def stages_of(devices: Devices, pp_rank: int) -> list[int]:
    """Numbers of the stages that a rank has, or has a copy of, in rising order."""
    return [stage for stage, device in enumerate(devices) if pp_rank in copies_of(device)]


def rings_of(devices: Devices) -> list[tuple[int, ...]]:
    """List the rings of a replica in the order in which micro-batches take them.

    Returns:
        For each ring, the ``pp_rank`` of the copy of each stage that it passes, stage by stage.
    """
    stages = [copies_of(device) for device in devices]
    count = lcm(*map(len, stages))
    return [tuple([copies[ring % len(copies)] for copies in stages]) for ring in range(count)]


def connect(mesh: Mesh, devices: Devices) -> None:
    """Make the process groups that a placement needs and the mesh lacks.

    These are two for each pair of neighbouring stages (activations and gradients); and, if this
    rank's stage has copies, one of all ranks with that stage in all replicas, for its gradients.
    All ranks of all replicas call this together, when a network is cut.

    Args:
        mesh: the process groups of this rank.
        devices: the ranks of each stage.
    """
    for ring in rings_of(devices):
        mesh.wires(ring)
    first, *_ = stages_of(devices, mesh.coordinates.pp_rank)
    mesh.owners(copies_of(devices[first]))


def link_copies(
    lines: ReplicaWires, devices: Devices, device: torch.device
) -> dict[int, LinksByMicrobatch]:
    """Make the links of all stages that this rank has, or has copies of.

    If all ranks of the replica have called :func:`connect` for ``devices`` before, this rank waits
    for nobody here; else they must call this function together.

    Args:
        lines: this rank's wires and channels.
        devices: ranks of each stage.
        device: device of received tensors, except those whose spec has ``on_cpu``.

    Returns:
        By number of the stage, in rising order, the links of each stage of this rank.
    """
    rings = rings_of(devices)
    found: dict[int, dict[int, StageLinks]] = {}
    for number, ring in enumerate(rings):
        linked = link_stages(lines, ring, device, first_tag=1 + number * len(devices))
        for stage, links in linked.items():
            found.setdefault(stage, {})[number] = links
    return {stage: LinksByMicrobatch(len(rings), found[stage]) for stage in sorted(found)}


def link_stages(
    lines: ReplicaWires, devices: Sequence[int], device: torch.device, first_tag: int = 1
) -> dict[int, StageLinks]:
    """Make the links of this rank's stages in one ring; see :func:`link_copies` for who calls it.

    Args:
        lines: this rank's wires and channels.
        devices: ``pp_rank`` of each stage in the ring.
        device: device of received tensors, except those whose spec has ``on_cpu``.
        first_tag: tag of the channel for words between stages 0 and 1; each further pair of
            neighbours has the next tag.

    Returns:
        By number of the stage, in rising order, the links of each stage of this rank.
    """
    here, stages = lines.coordinates.pp_rank, len(devices)
    wires = lines.wires(devices)
    after: dict[int, Link] = {}
    before: dict[int, Link] = {}
    for edge in range(stages):
        following = (edge + 1) % stages
        ends = [devices[edge], devices[following]]
        if here not in ends:
            continue
        if ends[0] == ends[1]:
            after[edge], before[following] = LocalLink.pair()
            continue
        activations, gradients, host = wires[edge]
        if ends[0] == here:
            words = lines.channel(ends[1], tag=first_tag + edge)
            after[edge] = PeerLink(words, activations, gradients, host, device)
        else:
            words = lines.channel(ends[0], tag=first_tag + edge)
            before[following] = PeerLink(words, gradients, activations, host, device)
    return {stage: StageLinks(before[stage], after[stage]) for stage in sorted(after)}
