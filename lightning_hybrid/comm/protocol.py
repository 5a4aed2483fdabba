"""The messages between the ranks of a replica, one frozen dataclass each.

* A :class:`Command` goes from a driver to its workers, which carry commands out in order; a command
  whose class is ``answered`` gets an :class:`Answer` back.
* A :class:`StageMessage` (a *word*) goes from a stage to a neighbouring stage, on the queue of
  their link.
* :class:`StillAlive` and :class:`Leaving` possibly come between any two others; the channel itself
  handles them.

Messages with ``in_frame`` are part of every training step: their fields of the types in `IN_FRAME`
are sent in a frame of integers of fixed size. All other fields are pickled together, and only if
one of them differs from its default. Of a field ``tensors`` the specs are pickled, and the tensors
follow unpickled.

To add a command: define its class here, and give one of :mod:`~lightning_hybrid.worker.worker`,
:mod:`~lightning_hybrid.worker.worker_weights`, :mod:`~lightning_hybrid.worker.worker_optimizers`
and :mod:`~lightning_hybrid.worker.worker_shards` a method of its name: ``_take_weights`` carries
out :class:`TakeWeights`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_hybrid.comm.call_precision import CallPrecision
from lightning_hybrid.comm.switches import Switches
from lightning_hybrid.comm.tensor_specs import CallKey, TensorSpec
from lightning_hybrid.comm.travelling_errors import Failure
from lightning_hybrid.graph import StageCode
from lightning_hybrid.remote import FileOfTensors, FilePart, RemoteKind

Tensors = Iterable[tuple[str, Tensor]]
"""Named tensors. The sender gives them in an iterable; the receiver gets an iterator, each step
of which receives one tensor."""


IN_FRAME = (int, bool, float, torch.dtype)
"""Types of the fields that can be sent in a frame of integers."""


class Message:
    """Base of all messages.

    Attributes:
        in_frame: whether the message's fields of the types in `IN_FRAME`, at most nine, are sent in
            its frame; else they are pickled.
    """

    in_frame: ClassVar[bool] = False


@dataclass(frozen=True)
class Answer(Message):
    """A worker's answer to a command. The command's class says in which fields the result is.

    Attributes:
        failure: the first failure of the worker, in this command or an earlier one; ``None``: the
            worker has not failed.
        value: the result, if it is an object that is pickled; else ``None``.
        holds: the result, if it is yes or no.
        tensors: the result, if it is tensors, by name; else empty.
    """

    in_frame = True
    failure: Failure | None = None
    value: Any = None
    holds: bool = False
    tensors: Tensors = ()


class StageMessage(Message):
    """A word: a small message from a stage to a neighbouring stage, beside the tensors."""


@dataclass(frozen=True)
class Header(StageMessage):
    """Sent before the activations of a micro-batch in the first call with a key: describes them.

    Sent and received by ``stage/forward_pass.py``.

    Attributes:
        specs: spec of each activation; ``None``: no activations follow, since a stage has failed.
        uses_rng: whether the sending stage, or a stage before it, draws random numbers.
    """

    specs: list[TensorSpec] | None = None
    uses_rng: bool = False


@dataclass(frozen=True)
class Status(StageMessage):
    """Sent to the next stage at the end of a forward pass: whether a stage has failed.

    The sending stage and the stages before it are meant.

    Attributes:
        failure: the first failure; ``None``: none of these stages has failed.
    """

    failure: Failure | None = None


@dataclass(frozen=True)
class GradientPattern(StageMessage):
    """Sent to the previous stage before gradients: which activations have a gradient.

    Sent only in the first backward with a pattern (see :class:`Backward`), once on each ring.
    (Stage 0 sends it to the driver, for the network's inputs.)

    Attributes:
        present: for each activation, in the order in which the stage got them, whether its gradient
            follows.
    """

    present: list[bool]


@dataclass(frozen=True)
class StillAlive(Message):
    """Tells that the sender is busy but alive: the receiver goes on waiting. Sent by heartbeats."""


@dataclass(frozen=True)
class Leaving(Message):
    """The last message of a sender that has failed, or was told of a failure.

    Attributes:
        failure: the failure, which the receiver raises.
    """

    failure: Failure


Hyperparameters = dict[str, Any]
"""A parameter group of an optimizer, in which names stand for the parameters."""


class Command(Message):
    """A message from a driver to its workers, which do what it says.

    Attributes:
        answered: whether the worker sends an :class:`Answer`.
        goes_with_next: whether it is sent together with the next command, since no rank and no code
            waits for what it does.
        joint: whether ranks exchange tensors while they carry it out: if a rank fails in the
            command, it must end its run, since the other ranks wait for it.
        outdates: kinds of tensors (such as gradients) that the worker changes: copies of them that
            the driver has fetched before are out of date.
    """

    answered: ClassVar[bool] = False
    goes_with_next: ClassVar[bool] = False
    joint: ClassVar[bool] = False
    outdates: ClassVar[frozenset[RemoteKind]] = frozenset()


# ---------------------------------------------------------------- the network


@dataclass(frozen=True)
class NetworkCommand(Command):
    """A command about one network.

    Attributes:
        network: number of the network.
    """

    network: int


@dataclass(frozen=True)
class CallCommand(NetworkCommand):
    """A command about one call of a network.

    Attributes:
        network: number of the network.
        call: number of the call among the network's calls.
    """

    call: int


@dataclass(frozen=True)
class Placement:
    """On which ranks the stages of a network are, and how they are scheduled.

    Attributes:
        devices: for each stage, the ``pp_rank`` of its rank, or a tuple with the ``pp_rank`` of
            each of its copies; for the last stage 0, the driver.
        owned: for each stage, the names in the network of the parameters and buffers that belong to
            it.
        schedule: name of the schedule.
        split: numbers of the stages whose backward is split in two (``zero_bubble``, ``1f1b``).
        recompute: whether activations are recomputed in the backward instead of being kept.
    """

    devices: tuple[int | tuple[int, ...], ...]
    owned: tuple[frozenset[str], ...] = field(hash=False)  # lists are cached by placement
    schedule: str
    split: tuple[int, ...] = ()
    recompute: bool = False

    @property
    def collects(self) -> bool:
        """Whether the last stage has no layers, and only collects outputs on the driver.

        The network has such a stage if the stage before it, which has the network's last layers,
        has copies, one of them on the driver.
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
        """Make the placement of stages with this code; other arguments are as the attributes."""
        owned = tuple([frozenset(code.owned) for code in codes])
        return cls(tuple(devices), owned, schedule, tuple(split), recompute)


@dataclass(frozen=True)
class CutNetwork(NetworkCommand):
    """Make this rank's stages of a network, or of another captured graph of a network that it has.

    All ranks link their stages in it, and wait for each other. The answer is empty.

    Attributes:
        network: number of the network; if the worker has it already, the stages are of another
            graph.
        name: the network's dotted name in the LightningModule; empty for the LightningModule
            itself.
        stages: by number of the stage, the code of each stage of this rank.
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
            :func:`lightning_hybrid.stage.random_numbers.microbatch_seed`.
        key: number of the call's key.
        exchange: whether headers are sent with the activations.
        uses_rng: whether the states of the generators are sent with the activations.
        ahead: whether it belongs to a later batch and runs early (streamed schedules): optimizers
            may step between it and its backward, and what it writes to buffers stays hidden until
            :class:`CommitEarlyForward`.
        new_key: the key itself, if the worker possibly does not have it yet; else ``None``.
        again: whether the call has run before (under ``1f1b``, for outputs or gradients that were
            not asked for then): what it writes to buffers is not kept.
        averages: whether gradients that backwards inside of the call (``1f1b``) leave aside are
            averaged over the replicas while the call runs. (A call without such backwards only
            takes part in the averaging.)
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
    """Run a backward pass of a call.

    If backwards have run inside of the call (schedule ``1f1b``), only add the gradients that they
    have left aside.

    Attributes:
        pattern: number of the pattern that says which outputs of the network have a gradient.
        exchange: whether the pattern is new, so that a :class:`GradientPattern` is sent before
            gradients.
        parameters: whether parameters get gradients (under ``torch.autograd.grad`` they do not).
        keep: ``retain_graph``: whether another backward of this call possibly follows.
        input_gradient: whether the driver wants the gradient of the inputs.
        reduce: whether gradients are averaged over the replicas, overlapped with the last
            micro-batch.
        trainable: ``requires_grad`` of every parameter, if it has changed since the forward:
            parameters frozen since then get no gradient. ``None``: as in the call's key.
        averaged: whether to add, in place of the gradients that were left aside (``1f1b``), their
            averages, which were begun inside of the call.
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
    """Free what was kept for the backward of a call: no backward of it will come."""

    in_frame = True


@dataclass(frozen=True)
class CommitEarlyForward(CallCommand):
    """Apply to the buffers what a call's early forward (streamed schedules) has written to copies.

    Sent when the call has its turn: where one device would write to the buffers.
    """

    in_frame = True
    outdates = frozenset({RemoteKind.BUFFER})


@dataclass(frozen=True)
class DropEarlyForward(CallCommand):
    """Discard a call's early forward (streamed schedules), and what it has written to copies.

    Sent when the call will not have its turn.
    """

    in_frame = True


@dataclass(frozen=True)
class Reduce(NetworkCommand):
    """Average the gradients of a network over the replicas; the workers of all replicas get it."""

    in_frame = True
    joint = True
    outdates = frozenset({RemoteKind.GRADIENT})


@dataclass(frozen=True)
class AwaitSums(Command):
    """Wait until this rank's sums of gradients over the replicas have ended.

    Sent in each step with ``BySpeed(on_loss="continue")``. ``Answer.holds`` is whether all sums are
    complete; if a replica is lost, they are not.
    """

    answered = True


@dataclass(frozen=True)
class SumAgain(Command):
    """Replicas are lost: make groups without them, and sum up the same gradients again.

    Sent after :class:`AwaitSums` (``BySpeed(on_loss="continue")``) to the workers of all replicas
    that are left. The sums are only begun; another :class:`AwaitSums` follows.

    Attributes:
        living: numbers of the replicas that are left (``dp_rank``).
    """

    living: tuple[int, ...]

    joint = True


@dataclass(frozen=True)
class TakeAverages(Command):
    """All replicas have all sums: write the averages into the gradients.

    The last command of a step's averages with ``BySpeed(on_loss="continue")``; see
    :class:`AwaitSums`.

    Attributes:
        scale: factor that the averages are multiplied with.
    """

    scale: float

    outdates = frozenset({RemoteKind.GRADIENT})


@dataclass(frozen=True)
class SynchronizeBuffers(Command):
    """Give every replica the buffers of replica 0; the workers of all replicas get it.

    Attributes:
        state: whether to send only the buffers that training reads
            (:func:`~lightning_hybrid.stage.gradient_averaging.state_buffers`); else all.
    """

    in_frame = True
    joint = True
    outdates = frozenset({RemoteKind.BUFFER})
    state: bool


@dataclass(frozen=True)
class BroadcastWeights(NetworkCommand):
    """Give every replica the weights and buffers of replica 0; workers of all replicas get it."""

    joint = True


# ---------------------------------------------------------------- the optimizers


@dataclass(frozen=True)
class TakeOptimizers(Command):
    """Replace all optimizers of the worker by those of the driver.

    Attributes:
        fresh: numbers of the optimizers whose states the worker drops; the others keep theirs.
        data: the optimizers, as written by :func:`lightning_hybrid.state.optimizers.ship`.
        tensors: large tensors of their states, in the order in which they are needed.
        replica_of: by name of a parameter, the number of the replica that steps it, if replicas
            divide the states of optimizers; a parameter that is missing is stepped by every
            replica.
    """

    fresh: tuple[int, ...]
    data: bytes
    tensors: Tensors
    replica_of: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerCommand(Command):
    """A command about one optimizer.

    Attributes:
        optimizer: number of the optimizer.
    """

    optimizer: int


@dataclass(frozen=True)
class WriteStates(OptimizerCommand):
    """Write this rank's states of an optimizer, by parameter name, to a file, or send them.

    The answer has the form of that to :class:`WriteTensors`.

    Attributes:
        folder: preferred folder of the file; ``None``: the states are sent.
    """

    answered = True
    folder: str | None


@dataclass(frozen=True)
class ZeroGrad(OptimizerCommand):
    """Clear the gradients of an optimizer's parameters.

    Attributes:
        set_to_none: whether gradients are set to ``None``; else they are filled with zeros.
    """

    in_frame = True
    goes_with_next = True
    outdates = frozenset({RemoteKind.GRADIENT})
    set_to_none: bool


@dataclass(frozen=True)
class StepOptimizer(OptimizerCommand):
    """Step an optimizer. A worker that has failed before does not step.

    Attributes:
        groups: the hyperparameters of all groups, in their order, if those of one have changed
            since the last step; else ``None``.
        precision: precision of this step and of those after it, if it has changed; else ``None``.
    """

    in_frame = True
    outdates = frozenset({RemoteKind.PARAMETER})
    groups: list[Hyperparameters] | None = None
    precision: CallPrecision | None = None


@dataclass(frozen=True)
class GradientNorm(OptimizerCommand):
    """Answer with the norms of this rank's gradients of an optimizer.

    ``Answer.tensors`` has one tensor, ``"norms"``, with a number for each parameter (see
    :func:`lightning_hybrid.state.clipping_and_loss_scale.gradient_norms`).

    Attributes:
        order: p of the p-norm; ``inf`` for the largest magnitude.
    """

    answered = True
    in_frame = True
    order: float


@dataclass(frozen=True)
class ClipNorm(OptimizerCommand):
    """Scale this rank's gradients of an optimizer by ``max_norm / total``, if that is below 1.

    Attributes:
        max_norm: upper bound of the norm that all ranks' gradients have together.
        total: the norm that they have now.
        dtype: type of the tensor that ``total`` is made to.
    """

    in_frame = True
    outdates = frozenset({RemoteKind.GRADIENT})
    max_norm: float
    total: float
    dtype: torch.dtype


@dataclass(frozen=True)
class ClipValues(OptimizerCommand):
    """Clamp the gradients of an optimizer's parameters to [-bound, bound]."""

    in_frame = True
    outdates = frozenset({RemoteKind.GRADIENT})
    bound: float


@dataclass(frozen=True)
class Unscale(OptimizerCommand):
    """Multiply an optimizer's gradients on this rank by ``factor`` (loss scaling).

    ``Answer.holds`` is whether one of the gradients was not finite.
    """

    answered = True
    in_frame = True
    outdates = frozenset({RemoteKind.GRADIENT})
    factor: float


# ---------------------------------------------------------------- single tensors


@dataclass(frozen=True)
class TakeSwitches(Command):
    """Set torch's settings as on the driver, for all later commands.

    Attributes:
        values: what :func:`~lightning_hybrid.comm.switches.switches` has returned on the driver.
    """

    values: Switches


@dataclass(frozen=True)
class GiveWeights(Command):
    """Answer with parameters and buffers, by name, as ``Answer.tensors``.

    Attributes:
        names: dotted names of the parameters and buffers in the LightningModule.
    """

    answered = True
    names: list[str]


@dataclass(frozen=True)
class GiveTensor(Command):
    """Answer with one tensor of this rank, a weight or a part of an optimizer's state.

    It is the only tensor in ``Answer.tensors``; its name there is empty.

    Attributes:
        owned: which tensor, a :class:`lightning_hybrid.state.sharded_checkpoint.TensorAddress`.
    """

    answered = True
    owned: Any


@dataclass(frozen=True)
class WriteTensors(Command):
    """Write the parameters and buffers that this rank owns to a file, or send them.

    The answer is what :meth:`lightning_hybrid.state.tensor_file.FilesOfWorker.answer` returns: in
    ``Answer.value`` the file's ticket, by which the driver finds the file, or ``None`` if there is
    no room for a file; if the tensors are sent, also ``Answer.tensors``.

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
    """Answer with the states of an optimizer, in which tensors have no values.

    ``Answer.value`` is a dict: by name of a parameter, its state. For a sharded checkpoint.

    Attributes:
        optimizer: number of the optimizer.
    """

    answered = True
    optimizer: int


@dataclass(frozen=True)
class SaveShard(Command):
    """Write tensors of this rank to its file of a sharded checkpoint.

    ``Answer.value`` is what :func:`lightning_hybrid.state.sharded_checkpoint.write_shard` returns,
    or the ``OSError`` that it has raised; with ``staged``, ``None``.

    Attributes:
        folder: folder of the checkpoint.
        part: by key of the checkpoint, which tensor of this rank is written under the key (a
            :class:`lightning_hybrid.state.sharded_checkpoint.TensorAddress`).
        staged: whether the worker copies the tensors, answers, and writes the copies later; the
            result of the writing is then left in the folder.
    """

    answered = True
    folder: str
    part: Mapping[tuple[str, ...], Any]
    staged: bool


@dataclass(frozen=True)
class AwaitShards(Command):
    """Send an empty answer when all copies that :class:`SaveShard` has ``staged`` are written."""

    answered = True


@dataclass(frozen=True)
class TakeWeights(Command):
    """Set parameters and buffers to new values.

    Attributes:
        tensors: name in the LightningModule and new value of each parameter and buffer.
    """

    tensors: Tensors


@dataclass(frozen=True)
class FindFiles(Command):
    """Answer which files of weights this rank can read itself.

    ``Answer.value`` is a set of those of ``files`` that are the same here.

    Attributes:
        files: the files, as the driver has found them.
    """

    answered = True

    files: frozenset[FileOfTensors]


@dataclass(frozen=True)
class ReadWeights(Command):
    """Read parameters and buffers from files.

    Attributes:
        parts: by name in the LightningModule, where in a file the numbers are.
    """

    parts: dict[str, FilePart]


@dataclass(frozen=True)
class LendTensors(Command):
    """Send the driver parameters or their gradients, from device to device.

    They travel over a group that is for such tensors alone, and the driver receives them at the
    same time (``stage/lending_line.py``). Sent when the driver needs them, as before a forward.

    Attributes:
        names: dotted names of the parameters; empty: all parameters that this rank owns and the
            driver uses too.
        gradients: whether to send the gradients of these parameters, which must be there and dense.
        types: for each parameter, the type in which it is sent; empty: each tensor's own.
    """

    in_frame = True
    joint = True
    names: Sequence[str] = ()
    gradients: bool = False
    types: Sequence[torch.dtype] = ()


@dataclass(frozen=True)
class TakeLentGradients(Command):
    """Receive gradients from the driver, and add them to those of this rank's parameters.

    The driver sends one for each parameter that this rank owns and the driver uses too, from device
    to device as with :class:`LendTensors`.
    """

    in_frame = True
    joint = True


@dataclass(frozen=True)
class NameGradients(Command):
    """Answer which of the parameters that this rank owns have a gradient.

    ``Answer.value`` is a dict: by name of each such parameter, whether its gradient is dense.
    """

    answered = True


@dataclass(frozen=True)
class GiveGradients(Command):
    """Answer with the gradients of parameters, by name, as ``Answer.tensors``.

    A parameter without a gradient is left out.

    Attributes:
        names: dotted names of the parameters.
        take: whether the worker then sets the gradients to ``None``.
    """

    answered = True
    names: list[str]
    take: bool = False


@dataclass(frozen=True)
class TakeGradients(Command):
    """Set the gradients of some parameters, or add to them.

    Attributes:
        add: whether to add ``tensors`` to gradients that are there; else they replace these.
        tensors: name of each parameter, and its gradient.
    """

    add: bool
    tensors: Tensors


@dataclass(frozen=True)
class ClearGradients(Command):
    """Set the gradients of parameters to ``None``.

    Attributes:
        names: dotted names of the parameters.
    """

    names: list[str]


# ---------------------------------------------------------------- the run


@dataclass(frozen=True)
class GiveFailure(Command):
    """Answer only with ``Answer.failure``: whether this worker has failed in an earlier command."""

    answered = True


@dataclass(frozen=True)
class GiveReport(Command):
    """Answer with the value of a report, as ``Answer.value``.

    Attributes:
        name: name of the report. The only one is ``"busy_s"``: seconds that the worker has
            computed, a float; only in runs with ``ServeOrder.timed``.
    """

    answered = True
    name: str


@dataclass(frozen=True)
class ForgetFailure(Command):
    """Forget an earlier failure, so that later answers do not have it.

    Sent when a run has failed, before the driver asks for the weights and states.
    """


@dataclass(frozen=True)
class End(Command):
    """End the run of this worker, or only its stages. The answer is empty.

    Attributes:
        stages_follow: whether the network is cut anew in the same run, so that other stages follow.
    """

    answered = True
    stages_follow: bool = False


MESSAGES: tuple[type[Message], ...] = tuple(
    kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Message) and not kind.__subclasses__()
)
"""All classes of messages; the index of a class is its number in frames."""
