"""The messages between the ranks of a replica, one frozen dataclass each.

* A :class:`Command` goes from a driver to its workers, which carry commands out in order; one that
  is ``answered`` gets an :class:`Answer` back.
* A :class:`StageMessage` goes from a stage to the one before or behind it, on the queue of their
  link.
* :class:`StillAlive` and :class:`Leaving` may come between any two others; the channel itself
  handles them.

Messages with ``in_frame`` are part of every training step: their fields of the types in `IN_FRAME`
are sent in a frame of integers of fixed size. All other fields are pickled together, and only if
one of them differs from its default. Of a field ``tensors`` the specs are pickled, and the tensors
follow unpickled.

To add a command: define its class here, and give :mod:`~lightning_hybrid.worker.worker`,
:mod:`~lightning_hybrid.worker.worker_weights`, :mod:`~lightning_hybrid.worker.worker_optimizers` or
:mod:`~lightning_hybrid.worker.worker_shards` a method of its name: ``_take_weights`` carries out
:class:`TakeWeights`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_hybrid.comm.switches import Switches
from lightning_hybrid.comm.tensor_specs import CallKey, CallPrecision, TensorSpec
from lightning_hybrid.comm.travelling_errors import Failure
from lightning_hybrid.graph import StageCode
from lightning_hybrid.remote import RemoteKind

Tensors = Iterable[tuple[str, Tensor]]
"""Named tensors. The receiver gets an iterator, which receives them one by one."""


IN_FRAME = (int, bool, float, torch.dtype)
"""Types of fields that a frame of integers takes."""


class Message:
    """Base of all messages.

    Attributes:
        in_frame: whether fields of the types in `IN_FRAME` (at most nine) are sent in the message's
            frame.
    """

    in_frame: ClassVar[bool] = False


@dataclass(frozen=True)
class Answer(Message):
    """A worker's answer to a command.

    Attributes:
        failure: a failure of the worker, now or since its last answer; ``None``: there is none.
        value: the result of the command.
        holds: the result, if it is yes or no.
        tensors: tensors of the result.
    """

    in_frame = True
    failure: Failure | None = None
    value: Any = None
    holds: bool = False
    tensors: Tensors = ()


class StageMessage(Message):
    """A message from a stage to a neighbouring one."""


@dataclass(frozen=True)
class Header(StageMessage):
    """Announces the activations of a micro-batch, which follow.

    Attributes:
        specs: specs of the activations; ``None``: none follow, since a stage has failed.
        uses_rng: whether the sending stage, or one before it, draws random numbers.
    """

    specs: list[TensorSpec] | None = None
    uses_rng: bool = False


@dataclass(frozen=True)
class Status(StageMessage):
    """Sent at the end of a forward pass: whether the sending stage, or one before it, has failed.

    Attributes:
        failure: the failure; ``None``: none of these stages has failed.
    """

    failure: Failure | None = None


@dataclass(frozen=True)
class GradientPattern(StageMessage):
    """Sent before gradients: which of the activations at a cut get a gradient.

    Attributes:
        present: for each activation, whether its gradient follows.
    """

    present: list[bool]


@dataclass(frozen=True)
class StillAlive(Message):
    """Tells that the sender is busy, and has not stopped."""


@dataclass(frozen=True)
class Leaving(Message):
    """The last message of a sender that has failed, or was told of a failure."""

    failure: Failure


Hyperparameters = dict[str, Any]
"""A parameter group of an optimizer, with names in place of its parameters."""


class Command(Message):
    """A message from a driver to its workers, which do what it says.

    Attributes:
        answered: whether the worker sends an answer.
        goes_with_next: whether it is sent together with the next command, since no rank and no
            code waits for what it does.
        joint: whether ranks exchange tensors while they carry it out, so that the others wait for
            one that fails.
        outdates: kinds of tensors (such as gradients) that the worker changes: what the driver has
            fetched of them before is stale.
    """

    answered: ClassVar[bool] = False
    goes_with_next: ClassVar[bool] = False
    joint: ClassVar[bool] = False
    outdates: ClassVar[frozenset[RemoteKind]] = frozenset()


# ---------------------------------------------------------------- the network


@dataclass(frozen=True)
class NetworkCommand(Command):
    """A command about one network, by its number."""

    network: int


@dataclass(frozen=True)
class CallCommand(NetworkCommand):
    """A command about one call of a network, by its number."""

    call: int


@dataclass(frozen=True)
class Placement:
    """On which ranks the stages of a network are, and how they are scheduled.

    Attributes:
        devices: ``pp_rank`` of each stage, or of all its copies; that of the last is 0, the driver.
        owned: for each stage, the names in the network of the parameters and buffers that its rank
            owns.
        schedule: name of the schedule.
        split: numbers of the stages whose backward is split in two (``zero_bubble``).
        recompute: whether activations are recomputed in the backward instead of being kept.
    """

    devices: tuple[int | tuple[int, ...], ...]
    owned: tuple[frozenset[str], ...] = field(hash=False)  # lists are cached by placement
    schedule: str
    split: tuple[int, ...] = ()
    recompute: bool = False

    @property
    def collects(self) -> bool:
        """Whether the driver has a copy of the last stage with layers.

        Then a further stage without layers follows, on the driver alone, which collects outputs.
        """
        before = self.devices[-2] if len(self.devices) > 1 else 0
        return not isinstance(before, int) and 0 in before

    @classmethod
    def of(
        cls,
        codes: Sequence[StageCode],
        devices: Sequence[int | tuple[int, ...]],
        schedule: str,
        split: Sequence[int] = (),
        recompute: bool = False,
    ) -> "Placement":
        """The placement of stages with this code; the other arguments are as the attributes."""
        owned = tuple([frozenset(code.owned) for code in codes])
        return cls(tuple(devices), owned, schedule, tuple(split), recompute)


@dataclass(frozen=True)
class CutNetwork(NetworkCommand):
    """Make this rank's stages of a network, or of another graph of a network that is cut already.

    Attributes:
        network: number of the network; if the worker has it already, this is another graph of it.
        name: the network's dotted name in the LightningModule; empty for the LightningModule.
        stages: code of the rank's stages, by number of the stage.
        placement: ranks of all stages.
        seed: seed of the random numbers inside the network.
    """

    answered = True
    name: str
    stages: Mapping[int, StageCode]
    placement: Placement
    seed: int


@dataclass(frozen=True)
class Forward(CallCommand):
    """Run the forward pass of a call.

    Attributes:
        draw: number from which the seeds of random layers are derived; see
            :func:`lightning_hybrid.stage.calls.draw_number`.
        key: number of the call's key.
        exchange: whether headers are sent with the activations.
        uses_rng: whether the states of the generators are sent with the activations.
        ahead: whether it belongs to a later batch and runs early (streamed schedules): optimizers
            may step between it and its backward, and what it writes to buffers stays hidden until
            :class:`CommitEarlyForward`.
        new_key: the key itself, if the worker may not have it yet.
        again: whether the call has run before: what it writes to buffers is not kept.
        averages: whether gradients that backwards inside of the call leave aside are averaged over
            the replicas, beside the last of these. (A call without such backwards has none.)
    """

    in_frame = True
    joint = True
    outdates = frozenset({RemoteKind.BUFFER})
    draw: int
    key: int
    exchange: bool
    uses_rng: bool
    ahead: bool
    new_key: CallKey | None = None
    again: bool = False
    averages: bool = False


@dataclass(frozen=True)
class Backward(CallCommand):
    """Run a backward pass of a call, or add what backwards inside of the call have left aside.

    Attributes:
        pattern: number of the pattern that says which outputs of the network have a gradient.
        exchange: whether the pattern is new, so that words about it are sent with the gradients.
        parameters: whether parameters get gradients (not under ``torch.autograd.grad``).
        keep: ``retain_graph``.
        input_gradient: whether the driver wants the gradient of the inputs.
        reduce: whether gradients are averaged over the replicas, overlapped with the last
            micro-batch.
        trainable: ``requires_grad`` of every parameter, if it has changed since the forward:
            parameters frozen since get no gradient. ``None``: as in the call's key.
        averaged: whether the averages of what was left aside are to be taken, which were begun
            inside of the call.
    """

    in_frame = True
    joint = True
    outdates = frozenset({RemoteKind.GRADIENT})
    pattern: int
    exchange: bool
    parameters: bool
    keep: bool
    input_gradient: bool
    reduce: bool
    trainable: tuple[bool, ...] | None = None
    averaged: bool = False


@dataclass(frozen=True)
class FreeCall(CallCommand):
    """Free what was kept for the backward of a call, which will not come."""

    in_frame = True


@dataclass(frozen=True)
class CommitEarlyForward(CallCommand):
    """Apply to the buffers what an early forward (streamed schedules) has written to them.

    Sent when its batch has its turn, in which one device would write them.
    """

    in_frame = True
    outdates = frozenset({RemoteKind.BUFFER})


@dataclass(frozen=True)
class DropEarlyForward(CallCommand):
    """Discard an early forward (streamed schedules) and its effects: its call will not come."""

    in_frame = True


@dataclass(frozen=True)
class Reduce(NetworkCommand):
    """Average the gradients of a network over the replicas."""

    in_frame = True
    joint = True
    outdates = frozenset({RemoteKind.GRADIENT})


@dataclass(frozen=True)
class AwaitSums(Command):
    """Wait for the sums of gradients over the replicas; the answer is whether all are complete."""

    answered = True


@dataclass(frozen=True)
class SumAgain(Command):
    """Replicas are lost: sum up gradients again over those that are left.

    Attributes:
        living: numbers of these.
    """

    living: tuple[int, ...]

    joint = True


@dataclass(frozen=True)
class TakeAverages(Command):
    """All replicas have all sums: write the averages into the gradients.

    Attributes:
        scale: what they are multiplied with.
    """

    scale: float

    outdates = frozenset({RemoteKind.GRADIENT})


@dataclass(frozen=True)
class HoldHooks(NetworkCommand):
    """Remove the user's hooks from the weights of a network, before a backward pass."""

    in_frame = True


@dataclass(frozen=True)
class ReleaseHooks(NetworkCommand):
    """Put the user's hooks on weights back after a backward pass.

    Attributes:
        call: whether they are called then: the pass went well.
    """

    in_frame = True
    outdates = frozenset(
        {RemoteKind.GRADIENT, RemoteKind.PARAMETER}
    )  # a hook may step an optimizer
    call: bool


@dataclass(frozen=True)
class SynchronizeBuffers(Command):
    """Give every replica the buffers of replica 0.

    Attributes:
        state: only those that training reads.
    """

    in_frame = True
    joint = True
    outdates = frozenset({RemoteKind.BUFFER})
    state: bool


@dataclass(frozen=True)
class ShareWeights(NetworkCommand):
    """Give every replica the weights of replica 0."""

    joint = True


# ---------------------------------------------------------------- the optimizers


@dataclass(frozen=True)
class TakeOptimizers(Command):
    """Replace the worker's optimizers by the driver's.

    Attributes:
        fresh: numbers of the optimizers of which the worker drops the states that it has.
        data: the optimizers, as written by :func:`lightning_hybrid.state.optimizers.ship`.
        tensors: large tensors of their states, in the order in which they are needed.
        replica_of: by name of a parameter, the replica that steps it; every replica steps a
            parameter that is not named.
    """

    fresh: tuple[int, ...]
    data: bytes
    tensors: Tensors
    replica_of: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerCommand(Command):
    """A command about one optimizer, by its number."""

    optimizer: int


@dataclass(frozen=True)
class WriteStates(OptimizerCommand):
    """Write this rank's states of an optimizer, by parameter name; see :class:`WriteTensors`.

    Attributes:
        folder: preferred folder of the file; ``None``: the states are sent.
    """

    answered = True
    folder: str | None


@dataclass(frozen=True)
class ZeroGrad(OptimizerCommand):
    """Clear the gradients of an optimizer.

    Attributes:
        set_to_none: whether gradients are set to ``None``; else they are filled with zeros.
    """

    in_frame = True
    goes_with_next = True
    outdates = frozenset({RemoteKind.GRADIENT})
    set_to_none: bool


@dataclass(frozen=True)
class StepOptimizer(OptimizerCommand):
    """Step an optimizer.

    Attributes:
        groups: parameter groups, if they have changed; else ``None``.
        precision: precision of this step and those after it, if it has changed; else ``None``.
    """

    in_frame = True
    outdates = frozenset({RemoteKind.PARAMETER})
    groups: list[Hyperparameters] | None = None
    precision: CallPrecision | None = None


@dataclass(frozen=True)
class GradientNorm(OptimizerCommand):
    """Answer with the norms of an optimizer's gradients, as one tensor.

    Attributes:
        order: p of the p-norm; ``inf`` for the largest magnitude.
    """

    answered = True
    in_frame = True
    order: float


@dataclass(frozen=True)
class ClipNorm(OptimizerCommand):
    """Scale the gradients of an optimizer so that their common norm is at most ``max_norm``.

    Attributes:
        max_norm: the bound.
        total: the norm of the gradients of all ranks.
        dtype: its type.
    """

    in_frame = True
    outdates = frozenset({RemoteKind.GRADIENT})
    max_norm: float
    total: float
    dtype: torch.dtype


@dataclass(frozen=True)
class ClipValues(OptimizerCommand):
    """Clamp the gradients of an optimizer to [-bound, bound]."""

    in_frame = True
    outdates = frozenset({RemoteKind.GRADIENT})
    bound: float


@dataclass(frozen=True)
class Unscale(OptimizerCommand):
    """Multiply the gradients of an optimizer by ``factor``; answer whether one is not finite."""

    answered = True
    in_frame = True
    outdates = frozenset({RemoteKind.GRADIENT})
    factor: float


# ---------------------------------------------------------------- single tensors


@dataclass(frozen=True)
class TakeSwitches(Command):
    """Compute with the driver's settings of torch from now on.

    Attributes:
        values: what :func:`~lightning_hybrid.comm.switches.switches` has returned.
    """

    values: Switches


@dataclass(frozen=True)
class GiveWeights(Command):
    """Answer with these parameters and buffers, as tensors.

    Attributes:
        names: dotted names of the parameters and buffers.
    """

    answered = True
    names: list[str]


@dataclass(frozen=True)
class GiveTensor(Command):
    """Answer with one tensor, a weight or a part of an optimizer's state.

    Attributes:
        owned: which one, a :class:`lightning_hybrid.state.sharded_checkpoint.Owned`.
    """

    answered = True
    owned: Any


@dataclass(frozen=True)
class WriteTensors(Command):
    """Write the parameters and buffers that this rank owns to a file, or send them.

    The answer is what :meth:`lightning_hybrid.state.tensor_file.FilesOfWorker.answer` returns: the
    file's ticket, by which the driver finds it, or the tensors.

    Attributes:
        folder: preferred folder of the file; ``None``: the tensors are sent.
        at_end: whether the run is over, so that gradients are written too.
        but: names of tensors that are left out.
    """

    answered = True
    folder: str | None
    at_end: bool
    but: frozenset[str] = frozenset()


@dataclass(frozen=True)
class OutlineStates(Command):
    """Answer with the states of an optimizer by parameter name, with tensors that have no values.

    Attributes:
        optimizer: number of the optimizer.
    """

    answered = True
    optimizer: int


@dataclass(frozen=True)
class SaveShard(Command):
    """Write tensors of this rank to its file of a sharded checkpoint.

    The answer is what :func:`lightning_hybrid.state.sharded_checkpoint.write_shard` returns, or the
    ``OSError`` that it has raised.

    Attributes:
        folder: folder of the checkpoint.
        part: for each key of the checkpoint, which tensor of this rank it stands for.
        staged: whether the worker copies the tensors, answers, and writes the copies later; the
            result of the writing is then left in the folder.
    """

    answered = True
    folder: str
    part: Mapping[tuple[str, ...], Any]
    staged: bool


@dataclass(frozen=True)
class AwaitShards(Command):
    """Answer when all copies of staged checkpoints (:class:`SaveShard`) are written."""

    answered = True


@dataclass(frozen=True)
class TakeWeights(Command):
    """Set parameters and buffers to new values.

    Attributes:
        tensors: name and new value of each parameter and buffer.
    """

    tensors: Tensors


@dataclass(frozen=True)
class LendTensors(Command):
    """Give the driver these parameters or their gradients, by a group for that alone.

    Attributes:
        names: of the parameters, dotted; empty: all that the driver uses too (:class:`CutNetwork`).
        gradients: whether their gradients are meant, which are dense.
        types: those that the driver has memory of; empty: those of the parameters.
    """

    in_frame = True
    joint = True
    names: Sequence[str] = ()
    gradients: bool = False
    types: Sequence[torch.dtype] = ()


@dataclass(frozen=True)
class TakeLentGradients(Command):
    """Add the gradients that the driver has of all weights that this rank owns and it uses too.

    They are sent as by :class:`LendTensors`.
    """

    in_frame = True
    joint = True


@dataclass(frozen=True)
class NameGradients(Command):
    """Answer with the parameters that have a gradient: by name, whether that is dense."""

    answered = True


@dataclass(frozen=True)
class GiveGradients(Command):
    """Answer with the gradients of these parameters, as tensors.

    Attributes:
        names: dotted names of the parameters.
        take: whether they are dropped here.
    """

    answered = True
    names: list[str]
    take: bool = False


@dataclass(frozen=True)
class TakeGradients(Command):
    """Set the gradients of some parameters, or add to them.

    Attributes:
        add: whether they are added to the gradients that the parameters have.
        tensors: name of each parameter, and its gradient.
    """

    add: bool
    tensors: Tensors


@dataclass(frozen=True)
class ClearGradients(Command):
    """Set the gradients of these parameters to ``None``.

    Attributes:
        names: dotted names of the parameters.
    """

    names: list[str]


# ---------------------------------------------------------------- the run


@dataclass(frozen=True)
class GiveFailure(Command):
    """Answer with the failure of an earlier command that had no answer, if there is one."""

    answered = True


@dataclass(frozen=True)
class GiveReport(Command):
    """Answer with the report of this name, such as ``free``: free memory of the worker's device."""

    answered = True
    name: str


@dataclass(frozen=True)
class ForgetFailure(Command):
    """Forget an earlier failure: what the next commands ask for at the end of a run is wanted."""


@dataclass(frozen=True)
class End(Command):
    """End the run, or its stages: others follow in the same run.

    Attributes:
        stages_follow: whether other stages follow.
    """

    answered = True
    stages_follow: bool = False


MESSAGES: tuple[type[Message], ...] = tuple(
    kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Message) and not kind.__subclasses__()
)
"""All classes of messages; the index of a class is its number in frames."""
