"""Under a streamed schedule the driver launches the forwards of later batches early.

A worker carries out commands in order, and the driver does not wait for most of them. So the driver
*launches* the forward of a later batch early: it tells stage k to run up to ``a_k`` batches ahead
(:mod:`lightning_hybrid.schedules.streamed`) and sends the inputs to stage 0. When the user's
``training_step`` then calls the network on that batch, the call *collects* the results: outputs,
loss, logs and step are those of the batch, in its turn.

**Which inputs?** The inputs of later batches are known before their ``training_step`` has run only
if the network is called on tensors of the batch itself. In each step the driver finds out which
tensors of the batch these are; when a later batch has its turn, the inputs of the real call are
compared with those that were sent. Numbers that the network's Python passes
(``self.current_epoch``) are assumed not to change between a launch and its turn; if one does, that
is refused. (A delayed schedule, which launches calls across steps, refuses such numbers at once.)

**What interrupts the stream.** A stage that has run ahead has sent activations that the next stage
was not told to receive yet. Whatever else is to run through the stages would come behind them on
the link. So these calls are given up first, and launched again in the next step: before a
validation, before a checkpoint (a run that is resumed from it starts with no calls under way, and
the run that wrote it goes on equally), and before a change of weights by hand. An interruption
costs time; under a delayed schedule it also lets the stages catch up with the newest weights. It
happens at the same places in every run.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from lightning_hybrid._torch.tensors import version as version_of
from lightning_hybrid.comm import CallKey, copies_of
from lightning_hybrid.comm.protocol import DropEarlyForward, Forward
from lightning_hybrid.driver.commands import Commands
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph import Leaf, NetworkGraph
from lightning_hybrid.schedules import STREAMED
from lightning_hybrid.stage import Call, Values

if TYPE_CHECKING:
    from lightning_hybrid.driver.driven_network import DrivenNetwork


class Batch(Protocol):
    """A training batch as ``training_step`` gets it."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All tensors in it, in a fixed order."""


class Batches:
    """The training batches of a run whose schedule is not streamed: none is fetched early.

    Under a streamed schedule a subclass is used, which fetches them.
    """

    def ahead(self, count: int) -> Batch | None:
        """The batch that comes ``count`` batches after the current one; in this class ``None``.

        Args:
            count: 0 for the current batch itself.

        Returns:
            The batch; ``None``: there is no current batch, or the later one must not begin early.
        """
        return None


@dataclass(eq=False)
class EarlyCall:
    """A call of a later batch that was launched early.

    Attributes:
        batch: the later batch.
        call: the call.
        command: the command that has the stage of a worker begin it.
        graph: the captured graph that is called.
        leaves: the inputs, as tensors of the batch.
        versions: the version counters of the inputs when their values were sent.
        told: how many stages, from the first on, have got the command.
    """

    batch: Batch
    call: Call
    command: Forward
    graph: NetworkGraph
    leaves: list[Tensor]
    versions: list[int]
    told: int = 0

    def changed_inputs(self, leaves: Sequence[Tensor]) -> list[int]:
        """The positions of the inputs that differ from those that were sent at the launch.

        Args:
            leaves: the inputs of the real call.
        """
        return [
            number
            for number, (mine, theirs, version) in enumerate(
                zip(self.leaves, leaves, self.versions, strict=True)
            )
            if version_of(mine) != version
            or not (_is_same(mine, theirs) or _is_equal(mine, theirs))
        ]

    def why_changed(self, number: int) -> str:
        """Why an input of the real call is not the one that was sent, as a text for an error.

        Args:
            number: position of the input, from :meth:`changed_inputs`.
        """
        given = self.graph.leaves[number]
        if self.leaves[number].dim() == 0:
            return _is_number(given)
        return (
            f"input {given.name!r} of the network is not what was sent of its batch: another "
            "tensor, or changed by training_step (as by augmentation). Choose or compute it in the "
            "dataset or inside the network"
        )


class EarlyCalls:
    """The calls of one network that were launched before the turn of their batches.

    Args:
        network: the network; each of its stages is on one device, the last one on the driver's.
        commands: sends commands to the workers.
        batches: the training batches.
    """

    def __init__(self, network: "DrivenNetwork", commands: Commands, batches: Batches) -> None:
        self._network = network
        self._name = network.name or "self"
        self._commands = commands
        self._batches = batches
        placement = network.placement
        self._devices = [rank for copies in placement.devices for rank in copies_of(copies)]
        self._schedule = STREAMED[placement.schedule]
        self._ahead = self._schedule.look_aheads(len(self._devices))
        self._pending: deque[EarlyCall] = deque()
        self._called: Batch | None = None  # the last batch that the network was called on

    def due(self, key: CallKey, leaves: Sequence[Tensor]) -> EarlyCall | None:
        """Take the launched call whose turn it is, if it matches the call that is made now.

        Args:
            key: the key of the call.
            leaves: the inputs of the call.

        Returns:
            The launched call; ``None``: none matches, and all launched calls are given up.

        Raises:
            NetworkError: the inputs are not those that were sent at the launch; or the call is the
                second one in the step, or is without gradients.
        """
        self._commands.remote.flush()  # (a change of weights gives launched calls up)
        batch = self._batches.ahead(0)
        if batch is not None:
            self._refuse_several(batch, key)
            self._called = batch
        first = self._pending[0] if self._pending else None
        if first is None or first.batch is not batch or first.call.key != key:
            self.drop()
            return None
        changed = first.changed_inputs(leaves)
        if changed:
            self.drop()
            raise self._refused(first.why_changed(changed[0]))
        return self._pending.popleft()

    def launch(
        self,
        graph: NetworkGraph,
        leaves: Sequence[Tensor],
        split: Callable[[Sequence[Tensor]], tuple[CallKey, list[Values]]],
    ) -> None:
        """Launch the calls of later batches, once the call of the current batch is under way.

        Args:
            graph: the captured graph of the current batch's call.
            leaves: the inputs of that call.
            split: gives for other inputs the key of their call, and its micro-batches.

        Raises:
            NetworkError: an input is no tensor of the batch, or needs a gradient.
        """
        batch = self._batches.ahead(0)
        if batch is None or self._ahead[0] == 0:
            return
        # (the inputs of later batches are at the same places in these)
        places = [self._place(batch, graph, n, leaf) for n, leaf in enumerate(leaves)]
        try:
            while len(self._pending) < self._ahead[0]:
                count = len(self._pending) + 1
                later = self._batches.ahead(count)
                theirs = (
                    None if later is None else _inputs_of(later, places, leaves, graph.is_static)
                )
                if later is None or theirs is None:
                    break
                # (copies, since the user may write into the batch while they are being sent)
                key, slices = split([leaf.detach().clone() for leaf in theirs])
                call, command = self._network.open_call(key, count)
                versions = [version_of(leaf) for leaf in theirs]
                self._pending.append(EarlyCall(later, call, command, graph, theirs, versions))
                self._network.engine.send_inputs(call.key, slices)
        finally:  # (also if a batch fails to load: those before it are launched)
            self._tell_stages()

    def drop(self) -> None:
        """Give up all launched calls on all ranks.

        The stages that have not begun them yet run them now, so that no activation stays on a link;
        the driver receives and drops what arrives in the end.

        Raises:
            NetworkError: a pass through the stages is under way.
        """
        # (workers that are in the middle of a pass cannot carry out a command)
        if self._pending and self._commands.workers.passing_now:
            raise self._refused(
                "a weight or buffer that another rank owns was changed in the middle of a pass "
                "through the stages, as by a hook on a module"
            )
        while self._pending:
            entry = self._pending.popleft()
            forward = entry.command
            self._network.calls.pop(entry.call.number)
            for stage, rank in enumerate(self._devices[:-1]):
                if stage >= entry.told:
                    self._commands.workers.send(rank, forward)
                self._commands.workers.send(rank, DropEarlyForward(forward.network, forward.call))
            self._network.engine.discard(entry.call)

    def _tell_stages(self) -> None:
        """Send the workers' stages those commands of launched calls that they do not have yet.

        They are sent in the order of the batches; a stage gets the commands of as many batches as
        it may run ahead.
        """
        for stage, ahead in enumerate(self._ahead[:-1]):
            for count, entry in enumerate(self._pending, 1):
                if entry.told == stage and count <= ahead:
                    self._commands.tell_each({self._devices[stage]: entry.command})
                    entry.told += 1

    def _place(self, batch: Batch, graph: NetworkGraph, number: int, leaf: Tensor) -> int | None:
        """Find which tensor of the batch an input of the network is.

        Args:
            batch: the current batch.
            graph: the captured graph.
            number: position of the input.
            leaf: the input.

        Returns:
            The position of the tensor in the batch; ``None``: a number that is not in the batch.

        Raises:
            NetworkError: the input is no tensor of the batch, or needs a gradient.
        """
        given = graph.leaves[number]
        if leaf.requires_grad:
            raise self._refused(
                f"input {given.name!r} of the network wants a gradient, which "
                "would come after later batches have begun"
            )
        for place, tensor in enumerate(batch.tensors):
            if _is_same(tensor, leaf):
                return place
        if leaf.dim() == 0:
            # (an integer becomes an input only after it has changed, so a first step cannot tell)
            if given.number or not self._schedule.delayed:
                return None
            raise self._refused(_is_number(given))
        raise self._refused(
            f"input {given.name!r} of the network is no tensor of the batch, "
            "but computed in training_step, so that it is not known of later batches. Compute it "
            "in the dataset or inside the network"
        )

    def _refuse_several(self, batch: Batch, key: CallKey) -> None:
        """Refuse a second call of the network in a step, and a call without gradients.

        Args:
            batch: the current batch.
            key: the key of the call that is made now.

        Raises:
            NetworkError: the call is such a call.
        """
        if not key.grad:
            raise self._refused(
                "training_step calls the network without gradients too, in the middle of what is "
                "under way"
            )
        if self._called is batch:
            raise self._refused("training_step calls it more than once")

    def _refused(self, reason: str) -> NetworkError:
        return NetworkError(
            f"schedule={self._schedule.name!r} begins with later batches early, which network "
            f"{self._name!r} does not allow: {reason}; or use schedule='gpipe'."
        )


def _is_number(given: Leaf) -> str:
    return (
        f"{given.name!r} is a number that may be another one from batch to batch, so that it is "
        "not known of later batches"
    )


def _inputs_of(
    batch: Batch, places: Sequence[int | None], like: Sequence[Tensor], static: bool
) -> list[Tensor] | None:
    """The inputs of the network for a later batch.

    Args:
        batch: the later batch.
        places: for each input its position among the tensors of a batch; ``None``: the input is the
            same for all batches.
        like: the inputs for the current batch.
        static: whether the number of samples must be the same.

    Returns:
        The inputs; ``None``: they have other shapes or types than those of the current batch, or
        need gradients.
    """
    tensors = batch.tensors
    if any(place is not None and place >= len(tensors) for place in places):
        return None
    found = [b if n is None else tensors[n] for n, b in zip(places, like)]
    first = 0 if static else 1
    fits = all(
        a.dtype == b.dtype
        and a.device == b.device
        and a.dim() == b.dim()
        and a.shape[first:] == b.shape[first:]
        and not a.requires_grad
        for a, b in zip(found, like)
    )
    return found if fits else None


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors show the same memory in the same way (shape, strides, type)."""
    return a is b or (
        a.numel() > 0
        and a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype == b.dtype
        and a.device == b.device
    )


def _is_equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
