"""What joins a stage with the two beside it on the ring of its replica."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightning_hybrid.comm.mesh import Mesh
from lightning_hybrid.comm.transport import Control, Link, TensorSpec

_CONTROLS: WeakKeyDictionary[Mesh, Control] = WeakKeyDictionary()
_FRAME = 0  # headers and status lines need no operation: who waits knows for what


class Coming(Protocol):
    """Tensors on their way."""

    def wait(self) -> list[Tensor]:
        """The tensors, when they are here."""


class Neighbour(Protocol):
    """A stage beside one of this rank's: tensors and words go there, and come from there."""

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send without waiting; the tensors must not be changed before :meth:`flush`."""

    def post(self, specs: Sequence[TensorSpec]) -> Coming:
        """Get ready to receive tensors of these shapes, in this order."""

    def flush(self) -> None:
        """Wait until everything sent has left."""

    def tell(self, word: Any = None) -> None:
        """Send an object, without waiting."""

    def hear(self) -> Any:
        """Wait for an object."""


class _OnAnotherRank:
    """A neighbour in another process.

    Args:
        control: the control link of the replica.
        peer: position of that rank in the replica.
        out: for tensors that go there.
        back: for tensors that come from there.
    """

    def __init__(self, control: Control, peer: int, out: Link, back: Link) -> None:
        self._control, self._peer = control, peer
        self.send, self.flush, self.post = out.send, out.flush, back.post

    def tell(self, word: Any = None) -> None:
        self._control.tell(self._peer, _FRAME, payload=word)

    def hear(self) -> Any:
        return self._control.hear(self._peer)[2]


class _Mailbox:
    """What one stage has for another one of the same rank."""

    def __init__(self) -> None:
        self.tensors: deque[list[Tensor]] = deque()
        self.words: deque[Any] = deque()

    def wait(self) -> list[Tensor]:
        """The oldest tensors. A rank does one thing after the other: they lie here already."""
        return self.tensors.popleft()


class _OnThisRank:
    """A neighbour in the same process: tensors are handed on as they are, without their graph."""

    def __init__(self, out: _Mailbox, back: _Mailbox) -> None:
        self._out, self._back = out, back

    def send(self, tensors: Sequence[Tensor]) -> None:
        self._out.tensors.append([tensor.detach() for tensor in tensors])

    def post(self, specs: Sequence[TensorSpec]) -> Coming:
        return self._back

    def flush(self) -> None:
        """Nothing is on its way."""

    def tell(self, word: Any = None) -> None:
        self._out.words.append(word)

    def hear(self) -> Any:
        return self._back.words.popleft()


@dataclass(frozen=True)
class Links:
    """The two neighbours of one stage.

    Attributes:
        previous: where its activations come from and its gradients go; of stage 0 the driver, with
            the inputs.
        next: where its activations go and its gradients come from; of the last stage stage 0.
    """

    previous: Neighbour
    next: Neighbour


def control_of(mesh: Mesh) -> Control:
    """The control link of this rank's replica; one per mesh, as it keeps what is being sent."""
    if mesh not in _CONTROLS:
        names = [str(mesh.place.at(position)) for position in range(mesh.place.stages)]
        _CONTROLS[mesh] = Control(mesh.control, names)
    return _CONTROLS[mesh]


def link_stages(
    mesh: Mesh, devices: Sequence[int], control: Control, device: torch.device
) -> dict[int, Links]:
    """Link the stages of this rank; all ranks of the replica call it together.

    Args:
        mesh: the groups.
        devices: of each stage the position of its rank.
        control: the control link.
        device: where received tensors live.

    Returns:
        The links of each stage that is here, in the order of the stages.
    """
    here, stages = mesh.place.position, len(devices)
    groups = mesh.ring(devices)
    after: dict[int, Neighbour] = {}
    before: dict[int, Neighbour] = {}
    for edge in range(stages):
        ends = [devices[edge], devices[(edge + 1) % stages]]
        if here not in ends:
            continue
        following = (edge + 1) % stages
        if ends[0] == ends[1]:
            along, against = _Mailbox(), _Mailbox()
            after[edge] = _OnThisRank(along, against)
            before[following] = _OnThisRank(against, along)
            continue
        me = ends.index(here)  # the sender of the activations has index 0 in each group
        peer = ends[1 - me]
        activations, gradients = (
            Link(group, me, str(mesh.place.at(peer)), device) for group in groups[edge]
        )
        if me == 0:
            after[edge] = _OnAnotherRank(control, peer, activations, gradients)
        else:
            before[following] = _OnAnotherRank(control, peer, gradients, activations)
    return {stage: Links(before[stage], after[stage]) for stage in sorted(after)}
