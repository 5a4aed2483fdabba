"""What joins a stage with the two beside it on the ring of its replica."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from lightning_hybrid.comm.connections import Transfer, Wire
from lightning_hybrid.comm.message_channel import Channel
from lightning_hybrid.comm.protocol import Word
from lightning_hybrid.comm.replica_channels import Lines
from lightning_hybrid.comm.tensor_specs import TensorSpec, bytes_of
from lightning_hybrid.errors import HybridError

W = TypeVar("W", bound=Word)

Devices = Sequence[int | tuple[int, ...]]
"""Of each stage the ``pp_rank`` of its rank; where a stage has copies, those of all."""


class Arriving(Protocol):
    """Tensors on their way."""

    def wait(self) -> list[Tensor]:
        """The tensors, when they are here.

        Raises:
            ConnectionLost: the peer is gone, or late.
        """


class Link(Protocol):
    """A stage beside one of this rank's: messages of tensors, and words, both ways.

    Words have a queue of their own, which nothing else uses: neither commands and answers nor the
    words of another edge between the same two ranks.
    """

    def send(self, tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> None:
        """Send a message without waiting, for a peer that posts these specs.

        It is kept, and must not be changed, until the peer has taken it and :meth:`flush` has
        noticed.
        """

    def post(self, specs: Sequence[TensorSpec]) -> Arriving:
        """Begin to take the next message, which has these tensors."""

    def flush(self, left: int = 0) -> None:
        """Wait until the peer has taken all messages but the last ``left``.

        A sender that calls it bounds the queue, and with it the memory of what is on its way.
        """

    def send_word(self, word: Word) -> None:
        """Send a word, without waiting."""

    def receive_word(self, kind: type[W]) -> W:
        """Wait for the next word, which is of this kind."""


class PeerLink:
    """A link to a stage on another rank.

    Args:
        words: channel for words.
        out: for tensors that go there.
        back: for tensors that come from there. Two wires, since two directions on one NCCL
            communicator wait for each other.
        host: both ways, for tensors on the CPU where ``device`` is another one.
        device: where received tensors live that are not on the CPU.
    """

    def __init__(
        self, words: Channel, out: Wire, back: Wire, host: Wire, device: torch.device
    ) -> None:
        self._words, self._out, self._back = words, out, back
        self._host, self._device = host, device
        self._sent: deque[list[tuple[Transfer, Tensor]]] = deque()

    def send(self, tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> None:
        laid_out = [bytes_of(spec.laid_out(tensor)) for tensor, spec in zip(tensors, specs)]
        self._sent.append(
            [
                (self._wire(spec, self._out).send(memory), memory)
                for memory, spec in zip(laid_out, specs)
                if memory.numel()
            ]
        )

    def post(self, specs: Sequence[TensorSpec]) -> Arriving:
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
        while len(self._sent) > left:
            for transfer, _ in self._sent.popleft():
                transfer.wait()

    def send_word(self, word: Word) -> None:
        self._words.send(word)

    def receive_word(self, kind: type[W]) -> W:
        return self._words.receive(kind)


class _Posted:
    def __init__(self, tensors: list[Tensor], transfers: list[Transfer]) -> None:
        self._tensors, self._transfers = tensors, transfers

    def wait(self) -> list[Tensor]:
        for transfer in self._transfers:
            transfer.wait()
        return self._tensors


class _Mailbox:
    """What one stage has for another one of the same rank."""

    def __init__(self) -> None:
        self.tensors: deque[list[Tensor]] = deque()
        self.words: deque[Word] = deque()

    def wait(self) -> list[Tensor]:
        """The oldest message. A rank does one thing after the other: it is here already."""
        return self.tensors.popleft()


class LocalLink:
    """A link to a stage of the same rank: copies of tensors, without their graph."""

    def __init__(self, out: _Mailbox, back: _Mailbox) -> None:
        self._out, self._back = out, back

    @classmethod
    def pair(cls) -> tuple["LocalLink", "LocalLink"]:
        """The two ends of a link."""
        along, against = _Mailbox(), _Mailbox()
        return cls(along, against), cls(against, along)

    def send(self, tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> None:
        # a copy, as over a wire: who receives it may write into it
        copies = [
            spec.empty(tensor.device).copy_(tensor.detach()) for tensor, spec in zip(tensors, specs)
        ]
        self._out.tensors.append(copies)

    def post(self, specs: Sequence[TensorSpec]) -> Arriving:
        return self._back

    def flush(self, left: int = 0) -> None:
        """Nothing is on its way: the receiver has its copies already."""

    def send_word(self, word: Word) -> None:
        self._out.words.append(word)

    def receive_word(self, kind: type[W]) -> W:
        word = self._back.words.popleft()
        if not isinstance(word, kind):
            raise HybridError(
                f"Expected {kind.__name__} from another stage of this rank, and found "
                f"{type(word).__name__}. This is an error in lightning_hybrid."
            )
        return word


@dataclass(frozen=True)
class Links:
    """The two neighbours of one stage.

    Attributes:
        previous: where its activations come from and its gradients go; of stage 0 the driver, with
            the inputs.
        next: where its activations go and its gradients come from; of the last stage stage 0.
    """

    previous: Link
    next: Link


@dataclass(frozen=True)
class Dealt:
    """The neighbours of a stage, or of a copy of it, by micro-batch.

    Copies of a stage take micro-batches in turn. A micro-batch goes around the ring of those that
    it is dealt to, and what holds for messages of a chain of stages holds for each ring by itself.

    Attributes:
        count: number of rings.
        rings: the links of the rings that this stage is in, by number of the ring.
    """

    count: int
    rings: Mapping[int, Links]

    def ring(self, microbatch: int) -> int:
        """Number of the ring of a micro-batch."""
        return microbatch % self.count

    def at(self, microbatch: int) -> Links:
        """The links of a micro-batch that is dealt here."""
        return self.rings[self.ring(microbatch)]

    def __iter__(self) -> Iterator[Links]:
        return iter(self.rings.values())


def copies_of(device: int | tuple[int, ...]) -> tuple[int, ...]:
    """The ranks of a stage, as :data:`Devices` has it."""
    return device if isinstance(device, tuple) else (device,)


def rings_of(devices: Devices) -> list[tuple[int, ...]]:
    """The rings that micro-batches go around in turn: of each stage the copy that they are for."""
    stages = [copies_of(device) for device in devices]
    count = lcm(*map(len, stages))
    return [tuple([copies[ring % len(copies)] for copies in stages]) for ring in range(count)]


def link_copies(lines: Lines, devices: Devices, device: torch.device) -> dict[int, Dealt]:
    """Link the stages of this rank, which may be copies; all ranks of the replica call it together.

    Args:
        lines: of this rank.
        devices: of each stage.
        device: where received tensors live that are not on the CPU.

    Returns:
        The links of each stage that is here, in the order of the stages.
    """
    rings = rings_of(devices)
    found: dict[int, dict[int, Links]] = {}
    for number, ring in enumerate(rings):
        linked = link_stages(lines, ring, device, first_tag=1 + number * len(devices))
        for stage, links in linked.items():
            found.setdefault(stage, {})[number] = links
    return {stage: Dealt(len(rings), found[stage]) for stage in sorted(found)}


def link_stages(
    lines: Lines, devices: Sequence[int], device: torch.device, first_tag: int = 1
) -> dict[int, Links]:
    """Link the stages of this rank; all ranks of the replica call it together.

    Args:
        lines: of this rank.
        devices: ``pp_rank`` of each stage.
        device: where received tensors live that are not on the CPU.
        first_tag: of the channels for words, one for each edge.

    Returns:
        The links of each stage that is here, in the order of the stages.
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
    return {stage: Links(before[stage], after[stage]) for stage in sorted(after)}
