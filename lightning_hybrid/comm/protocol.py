"""What ranks of a replica tell each other: one frozen dataclass each, known to both ends.

* A :class:`Command` goes from a driver to its workers, which carry commands out in order; one that
  is ``answered`` gets an :class:`Answer` back.
* A :class:`Word` goes from a stage to the one before or behind it, on the queue of their link.
* :class:`StillAlive` and :class:`Leaving` may come between all others and are dealt with by the
  channel itself.

Messages with ``in_frame`` are part of every training step: their integers travel in a frame of
fixed size. All other fields are pickled together, and only where one of them differs from its
default. A field ``tensors`` is neither: specs are pickled, then the tensors follow as they are.

To add a command: define its class here, name it in ``MESSAGES``, and give it a handler in the table
of :mod:`~lightning_hybrid.worker.worker`, :mod:`~lightning_hybrid.worker.worker_weights` or
:mod:`~lightning_hybrid.worker.worker_optimizers`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from lightning_hybrid.comm.tensor_specs import CallKey, Precision, TensorSpec
from lightning_hybrid.comm.travelling_errors import Failure
from lightning_hybrid.graph import StageCode
from lightning_hybrid.remote import Kind

Tensors = Iterable[tuple[str, Tensor]]
"""Named tensors. The receiver gets an iterator that takes them off the wire one by one."""


class Message:
    """What one rank sends to another.

    Attributes:
        in_frame: whether the integers of the message travel in its frame (at most eight).
    """

    in_frame: ClassVar[bool] = False


@dataclass(frozen=True)
class Answer(Message):
    """To a command, by a worker.

    Attributes:
        failure: what the worker has failed with, now or since it was last asked.
        value: what was asked for.
        tensors: likewise, as tensors.
    """

    failure: Failure | None = None
    value: Any = None
    tensors: Tensors = ()


class Word(Message):
    """What a stage tells one beside it."""


@dataclass(frozen=True)
class Header(Word):
    """What follows: the values of a micro-batch; ``None`` once, and nothing, if a stage has failed.

    Attributes:
        specs: of the values.
        uses_rng: whether a stage up to here draws random numbers.
    """

    specs: list[TensorSpec] | None = None
    uses_rng: bool = False


@dataclass(frozen=True)
class Status(Word):
    """At the end of a forward pass: whether a stage up to here has failed.

    Attributes:
        failure: that of the stage; ``None``: none has failed.
    """

    failure: Failure | None = None


@dataclass(frozen=True)
class Pattern(Word):
    """Which of the values of a cut get a gradient.

    Attributes:
        present: per value of the cut, whether it gets one.
    """

    present: list[bool]


@dataclass(frozen=True)
class StillAlive(Message):
    """The sender is busy, and has not stopped."""


@dataclass(frozen=True)
class Leaving(Message):
    """The sender has failed, or heard of a failure: nothing comes from it any more."""

    failure: Failure


Hyperparameters = dict[str, Any]
"""A parameter group of an optimizer; its parameters by name."""


class Command(Message):
    """What a driver asks of its workers.

    Attributes:
        answered: whether the worker sends an answer.
        outdates: of which kinds the worker changes the tensors that it owns, so that what the
            driver has fetched of them before is stale.
        joint: whether ranks carry it out together, so that others wait in the middle of it for one
            that cannot.
    """

    answered: ClassVar[bool] = False
    joint: ClassVar[bool] = False
    outdates: ClassVar[frozenset[Kind]] = frozenset()


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
    """Where the stages of a network are.

    Attributes:
        devices: ``pp_rank`` of each stage, or of all its copies; the last one is 0, the driver.
        owned: of each stage, the names in the network of the tensors that belong to its rank.
        schedule: name of the schedule.
        split: numbers of the stages whose backward it splits.
        recompute: whether forwards keep no activations, and run again for their backward.
    """

    devices: tuple[int | tuple[int, ...], ...]
    owned: tuple[frozenset[str], ...] = field(hash=False)  # (lists are looked up in each pass)
    schedule: str
    split: tuple[int, ...] = ()
    recompute: bool = False

    @property
    def collects(self) -> bool:
        """Whether the driver has a copy of the last stage with layers, and collects behind it."""
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
        """That of these stages on these devices; see the attributes."""
        owned = tuple([frozenset(code.owned) for code in codes])
        return cls(tuple(devices), owned, schedule, tuple(split), recompute)


@dataclass(frozen=True)
class Cut(NetworkCommand):
    """Make this rank's stages of a network, or of another graph of a network that is cut already.

    Attributes:
        network: number of the network; one that is known gets another graph.
        name: its dotted name in the LightningModule; empty for the LightningModule itself.
        stages: the rank's stages, by number.
        placement: where all stages are.
        borrowed: names in the network of parameters that the rank uses and another one owns.
        seed: of the random numbers inside the network.
        vacates: whether parameters of the network that this rank does not use give their memory
            back.
    """

    answered = True
    name: str
    stages: Mapping[int, StageCode]
    placement: Placement
    borrowed: frozenset[str]
    seed: int
    vacates: bool


@dataclass(frozen=True)
class Forward(CallCommand):
    """Run the forward pass of a call.

    Attributes:
        draw: decides the random numbers; see
            :func:`lightning_hybrid.stage.calls.draw_number`.
        key: number of the call's key.
        exchange: headers travel with the activations.
        uses_rng: the generators' state travels with the activations.
        ahead: it runs before its turn: optimizers may step between it and its backward, and until
            then nobody sees what it writes to buffers.
        new_key: the key, where the worker may not have heard of it yet.
    """

    in_frame = True
    joint = True
    outdates = frozenset({Kind.BUFFER})
    draw: int
    key: int
    exchange: bool
    uses_rng: bool
    ahead: bool
    new_key: CallKey | None = None


@dataclass(frozen=True)
class Backward(CallCommand):
    """Run a backward pass of a call.

    Attributes:
        pattern: number of the pattern of gradients at the network's outputs (some may have none).
        exchange: the pattern is new, words about it travel with the gradients.
        parameters: whether parameters get gradients (not under ``torch.autograd.grad``).
        keep: ``retain_graph``.
        input_gradient: whether the driver wants the gradient of the inputs.
        reduce: average over the replicas, overlapped with the last micro-batch.
        trainable: ``requires_grad`` of every parameter, if it has changed since the forward: what
            has been frozen since gets no gradient. ``None``: as in the call's key.
    """

    in_frame = True
    joint = True
    outdates = frozenset({Kind.GRADIENT})
    pattern: int
    exchange: bool
    parameters: bool
    keep: bool
    input_gradient: bool
    reduce: bool
    trainable: tuple[bool, ...] | None = None


@dataclass(frozen=True)
class Free(CallCommand):
    """A call gets no backward: drop what was kept for it."""

    in_frame = True


@dataclass(frozen=True)
class Commit(CallCommand):
    """A call that ran before its turn has it now: what it has written to buffers is for all to see.

    One device would have written it in this very call, whether or not a backward follows.
    """

    in_frame = True
    outdates = frozenset({Kind.BUFFER})


@dataclass(frozen=True)
class Drop(CallCommand):
    """A call that ran before its turn is not wanted: all is as if it had not run."""

    in_frame = True


@dataclass(frozen=True)
class Skip(CallCommand):
    """A call that ran before its turn is not wanted, and the stages from here on have not begun it.

    What the stage before this one has sent is taken off the link.

    Attributes:
        key: number of its key.
        exchange: see :class:`Forward`.
        uses_rng: see there.
        new_key: see there.
    """

    in_frame = True
    joint = True
    key: int
    exchange: bool
    uses_rng: bool
    new_key: CallKey | None = None


@dataclass(frozen=True)
class Reduce(NetworkCommand):
    """Average the gradients of a network over the replicas."""

    in_frame = True
    joint = True
    outdates = frozenset({Kind.GRADIENT})


@dataclass(frozen=True)
class HoldHooks(NetworkCommand):
    """A backward pass begins: take the user's hooks off the weights of a network."""

    in_frame = True


@dataclass(frozen=True)
class ReleaseHooks(NetworkCommand):
    """After a backward pass: put the hooks on weights back and call them.

    Attributes:
        late: those too that wait for the gradient to be in ``weight.grad``.
        chosen: names of the weights that the pass was for; ``None``: all.
    """

    in_frame = True
    outdates = frozenset({Kind.GRADIENT, Kind.PARAMETER})  # a hook may step an optimizer
    late: bool
    chosen: tuple[str, ...] | None = None


@dataclass(frozen=True)
class SynchronizeBuffers(Command):
    """Give every replica the buffers of replica 0, or (``state``) those that training reads."""

    in_frame = True
    joint = True
    outdates = frozenset({Kind.BUFFER})
    state: bool


@dataclass(frozen=True)
class Share(NetworkCommand):
    """Give every replica the weights of replica 0; on request the optimizers' states too.

    Attributes:
        optimizers: whether the states of all optimizers are sent too.
    """

    joint = True
    optimizers: bool


# ---------------------------------------------------------------- the optimizers


@dataclass(frozen=True)
class TakeOptimizers(Command):
    """Take optimizers as the driver's are now.

    Attributes:
        fresh: bit k: forget the state that optimizer k has here.
        data: as written by :func:`lightning_hybrid.state.optimizers.ship`.
        tensors: the large ones of their states, in the order in which they are needed.
        replica_of: by name of a parameter the replica that steps it; of others each replica does.
    """

    fresh: int
    data: bytes
    tensors: Tensors
    replica_of: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerCommand(Command):
    """A command about one optimizer, by its number."""

    optimizer: int


@dataclass(frozen=True)
class TakeGroups(OptimizerCommand):
    """Take the parameter groups of an optimizer.

    Attributes:
        replica_of: see :class:`TakeOptimizers`.
    """

    groups: list[Hyperparameters]
    replica_of: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class GiveOptimizer(OptimizerCommand):
    """Answer with the state of an optimizer, by parameter name.

    Attributes:
        of: this parameter alone; empty: of all.
    """

    answered = True
    of: str = ""


@dataclass(frozen=True)
class KeepStates(OptimizerCommand):
    """Write the state of an optimizer to a file, by parameter name; see :class:`KeepTensors`.

    Attributes:
        folder: where, if possible.
    """

    answered = True
    folder: str


@dataclass(frozen=True)
class ZeroGrad(OptimizerCommand):
    """Clear the gradients of an optimizer.

    Attributes:
        set_to_none: drop the gradients; else they are filled with zeros.
    """

    in_frame = True
    outdates = frozenset({Kind.GRADIENT})
    set_to_none: bool


@dataclass(frozen=True)
class Step(OptimizerCommand):
    """Step an optimizer.

    Attributes:
        groups: parameter groups, where they have changed.
        precision: what surrounds this step and those after it, where it has changed.
    """

    in_frame = True
    outdates = frozenset({Kind.PARAMETER})
    groups: list[Hyperparameters] | None = None
    precision: Precision | None = None


@dataclass(frozen=True)
class GradientNorm(OptimizerCommand):
    """Answer with the norm of each gradient of an optimizer, by parameter name.

    Attributes:
        order: p of the p-norm; ``inf``: the largest magnitude.
    """

    answered = True
    order: float


@dataclass(frozen=True)
class ScaleGradients(OptimizerCommand):
    """Multiply the gradients of an optimizer by ``factor``."""

    outdates = frozenset({Kind.GRADIENT})
    factor: float | Tensor


@dataclass(frozen=True)
class ClipValues(OptimizerCommand):
    """Clamp the gradients of an optimizer to [-bound, bound]."""

    outdates = frozenset({Kind.GRADIENT})
    bound: float


@dataclass(frozen=True)
class Unscale(OptimizerCommand):
    """Multiply the gradients of an optimizer by ``factor``; answer whether one is not finite."""

    answered = True
    outdates = frozenset({Kind.GRADIENT})
    factor: Tensor


# ---------------------------------------------------------------- single tensors


@dataclass(frozen=True)
class GiveWeights(Command):
    """Answer with these parameters and buffers, as tensors.

    Attributes:
        names: of the parameters and buffers, dotted.
    """

    answered = True
    names: list[str]


@dataclass(frozen=True)
class KeepTensors(Command):
    """Write what this rank owns to a file.

    The answer is its ticket, or ``None`` where there is no room.

    Attributes:
        folder: where, if possible.
        at_end: what other ranks are to find after the run: gradients too, and no weight that is
            made for one rank alone.
    """

    answered = True
    folder: str
    at_end: bool


@dataclass(frozen=True)
class OutlineStates(Command):
    """Answer with the states of an optimizer by parameter name, tensors without their numbers.

    Attributes:
        optimizer: its number.
    """

    answered = True
    optimizer: int


@dataclass(frozen=True)
class SaveShard(Command):
    """Write tensors of this rank to its file of a sharded checkpoint.

    The answer is what :func:`lightning_hybrid.state.sharded_checkpoint.write_shard` gives, or the
    ``OSError`` that it has raised.

    Attributes:
        folder: of the checkpoint.
        part: of each key in it, which tensor of this rank it is.
        staged: answer when copies are made, and write these later; what would have been the answer
            is then left in the folder.
    """

    answered = True
    folder: str
    part: Mapping[tuple[str, ...], Any]
    staged: bool


@dataclass(frozen=True)
class AwaitShards(Command):
    """Answer when all that was staged is written."""

    answered = True


@dataclass(frozen=True)
class MapTensors(Command):
    """Have here what other ranks own, as it is in their files; answer whether that is possible.

    Attributes:
        tickets: of the files, by ``pp_rank``.
    """

    answered = True
    tickets: Mapping[int, Any]


@dataclass(frozen=True)
class TakeWeights(Command):
    """Take these parameters and buffers.

    Attributes:
        tensors: name and new value of each.
    """

    tensors: Tensors


@dataclass(frozen=True)
class LendWeights(NetworkCommand):
    """Give the driver's copy of this rank's stage the weights of now, by a group for that alone."""

    in_frame = True
    joint = True


@dataclass(frozen=True)
class NameGradients(Command):
    """Answer with the names of the parameters that have a gradient."""

    answered = True


@dataclass(frozen=True)
class GiveGradients(Command):
    """Answer with the gradients of these parameters, as tensors.

    Attributes:
        names: of the parameters, dotted.
    """

    answered = True
    names: list[str]


@dataclass(frozen=True)
class GiveBorrowedGradients(Command):
    """Answer with the gradients of parameters that another rank owns, and forget them here."""

    answered = True


@dataclass(frozen=True)
class TakeGradients(Command):
    """Set the gradients of some parameters, or add to them.

    Attributes:
        add: whether they are added to what is there.
        tensors: name of the parameter and gradient of each.
    """

    add: bool
    tensors: Tensors


@dataclass(frozen=True)
class ClearGradients(Command):
    """Set the gradients of these parameters to ``None``.

    Attributes:
        names: of the parameters, dotted.
    """

    names: list[str]


# ---------------------------------------------------------------- the run


@dataclass(frozen=True)
class Check(Command):
    """Answer that all went well up to here."""

    answered = True


@dataclass(frozen=True)
class Report(Command):
    """Answer with the report of this name."""

    answered = True
    name: str


@dataclass(frozen=True)
class ForgetFailure(Command):
    """The run ends, and what follows is wanted whatever has failed before."""


@dataclass(frozen=True)
class End(Command):
    """The run is over; the driver's results, for all ranks."""

    answered = True
    results: Any


@dataclass(frozen=True)
class EndStages(Command):
    """The stages are over: in the same run others follow."""

    answered = True


MESSAGES: tuple[type[Message], ...] = (
    Cut,
    Forward,
    Backward,
    Free,
    Commit,
    Drop,
    Skip,
    Reduce,
    HoldHooks,
    ReleaseHooks,
    SynchronizeBuffers,
    Share,
    TakeOptimizers,
    TakeGroups,
    GiveOptimizer,
    KeepStates,
    ZeroGrad,
    Step,
    GradientNorm,
    ScaleGradients,
    ClipValues,
    Unscale,
    GiveWeights,
    KeepTensors,
    OutlineStates,
    SaveShard,
    AwaitShards,
    MapTensors,
    TakeWeights,
    LendWeights,
    NameGradients,
    GiveGradients,
    GiveBorrowedGradients,
    TakeGradients,
    ClearGradients,
    Check,
    Report,
    ForgetFailure,
    EndStages,
    End,
    Answer,
    Header,
    Status,
    Pattern,
    StillAlive,
    Leaving,
)
"""All that travels in frames; the place of a class is its number there."""
