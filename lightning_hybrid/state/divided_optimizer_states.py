"""The states of optimizers, divided over the replicas of a stage: each rank steps its share alone.

The ranks that have the same stages have the same gradients. With
``replicas=Equal(shard_states=True)`` each of them steps some of their parameters:
the optimizer sees no gradient of the others, so that no state of these is ever made there. Then
the ranks give each other the new weights. Stepped in parts an optimizer does what it does as a
whole (:mod:`lightning_hybrid.driver.optimizer_kinds`), so the numbers are the same.

All replicas divide alike, since they know the same names, sizes and owners. The driver of each
divides before it sends its workers their states.

For a checkpoint :func:`gather_states` brings them to one rank, tensor by tensor.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_hybrid.comm import (
    ANOTHER_REPLICA,
    Group,
    TensorSpec,
    gather_objects,
    start,
    wait,
)
from lightning_hybrid.errors import HybridError
from lightning_hybrid.stage import Broadcasts
from lightning_hybrid.state.tensor_file import PIECE_BYTES, filed, let_go, pieces_of, to_send

ReplicaOfState = dict[str, int]
"""By name of a parameter, the number of the replica that has its state, which never changes."""


class OtherReplicas:
    """Divides the states of an optimizer over the replicas, on the driver of one of them.

    It also refuses code that wants the states of other replicas on this one.

    Args:
        names: names of the parameters, by ``id``.
        replica: number of this replica.
        replicas: the number of replicas.

    Attributes:
        replica_of: for each parameter that is divided so far, the replica that has its state.
        gathering: whether all replicas are bringing their states together, so that a state dict may
            be made.
        over: whether the run has ended.
    """

    def __init__(self, names: Mapping[int, str], replica: int, replicas: int) -> None:
        self._names = names
        self._replica = replica
        self._replicas = replicas
        self.replica_of: ReplicaOfState = {}
        self._loads: dict[int, list[int]] = {}  # by owner, the bytes of each replica
        self.gathering = self.over = False

    def divide(self, owner: int, sizes: Mapping[str, int]) -> None:
        """Choose for each new parameter the replica that has its state; add it to `replica_of`.

        The largest parameters come first, each goes to the replica with the fewest bytes so far.
        All replicas must call this with the same arguments, in the same order.

        Args:
            owner: ``pp_rank`` of the rank that owns these parameters in each replica.
            sizes: bytes of parameters, by name; those that were divided before stay where they are.
        """
        loads = self._loads.setdefault(owner, [0] * self._replicas)
        new = [name for name in sizes if name not in self.replica_of]
        # (the largest first: small ones at the end even out the loads)
        for name in sorted(new, key=lambda name: -sizes[name]):
            self.replica_of[name] = lightest = loads.index(min(loads))
            loads[lightest] += sizes[name]

    def have(self, parameter: object) -> bool:
        """Whether another replica than this one has the state of a parameter."""
        name = self._names.get(id(parameter), "")
        return self.replica_of.get(name, self._replica) != self._replica

    def refuse(self, parameter: object) -> None:
        """Refuse code that asks this rank for the state of a parameter which another replica has.

        Args:
            parameter: the parameter. If no other replica has its state, nothing is refused.

        Raises:
            HybridError: another replica has its state.
        """
        if self.have(parameter):
            name = self._names[id(parameter)]
            raise HybridError(
                f"The optimizer's state of {name!r} is on replica {self.replica_of[name]}, and "
                f"this is replica {self._replica}: shard_states=True divides states over "
                "the replicas. trainer.strategy.optimizer_state(optimizer), called on all ranks, "
                "gives rank 0 all of them; or leave shard_states out."
            )

    def refuse_alone(self, optimizer: Optimizer) -> None:
        """Refuse to make a state dict of this replica's states alone.

        Called before a state dict is made.

        Raises:
            HybridError: the replicas are not bringing their states together (:meth:`gathered`).
        """
        if not self.gathering:
            raise HybridError(
                f"{type(optimizer).__name__}.state_dict() would have the states of replica "
                f"{self._replica} alone: shard_states=True divides them over the "
                "replicas. Use trainer.strategy.optimizer_state(optimizer) or "
                "trainer.save_checkpoint(path), called on all ranks; or leave "
                "shard_states out."
            )

    def refuse_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Refuse a step after the run, which would miss the states of other replicas.

        Raises:
            HybridError: always.
        """
        raise HybridError(
            f"{type(optimizer).__name__}.step() after the fit would step what replica "
            f"{self._replica} has of its states: shard_states=True divides them over the "
            "replicas. Make a new optimizer, or leave shard_states out."
        )

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, a state dict may be made; the caller adds the states of the other replicas."""
        self.gathering = True
        try:
            yield
        finally:
            self.gathering = False


class StateShares:
    """Has one rank step its share of the parameters, and exchanges the new weights with the others.

    Args:
        group: the group of the ranks that have the same stages, one of each replica.
        names: names of the parameters that all ranks know, by ``id``.
        replica_of: how states are divided; the dictionary may grow.

    Attributes:
        replica_of: see above.
        replica: number of the replica of this rank.
    """

    def __init__(self, group: Group, names: Mapping[int, str], replica_of: ReplicaOfState) -> None:
        self._names = names
        self.replica_of = replica_of
        self.replica = group.rank()
        self._replicas = group.size()
        self._broadcasts = Broadcasts(group)
        self._stepped: list[Parameter] = []

    @contextmanager
    def alone(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, an optimizer finds gradients of this rank's share alone; make its step there.

        Gradients of parameters that other ranks step are hidden, and are back afterwards. Call
        :meth:`exchange` next, on all ranks.

        Args:
            optimizer: an optimizer of this rank.
        """
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        self._stepped = found = [p for p in parameters if p.grad is not None]
        # (gradients of a parameter that not all ranks know are not averaged: each steps it)
        hidden = [(p, p.grad) for p in found if self._where(p) not in (None, self.replica)]
        for parameter, _ in hidden:
            # optimizers skip a parameter without a gradient, and make no state for it
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in hidden:
                parameter.grad = gradient

    def drop(self, optimizer: Optimizer) -> None:
        """Drop the states of parameters that other replicas step from an optimizer of this rank.

        (It has them after a checkpoint was loaded.)
        """
        for parameter in list(optimizer.state):
            if self._where(parameter) not in (None, self.replica):
                del optimizer.state[parameter]

    def exchange(self) -> None:
        """After a step in :meth:`alone`: give all ranks of the group the new weights of all shares.

        Collective over the group.
        """
        stepped, self._stepped = self._stepped, []
        for replica in range(self._replicas):
            theirs = [p for p in stepped if self._where(p) == replica]
            self._broadcasts.send(theirs, replica)
            if replica != self.replica:
                # autograd then refuses a backward that still needs the old numbers
                increment_version(theirs)

    def _where(self, parameter: object) -> int | None:
        """Number of the replica that has the state of a parameter; ``None``: it is not divided."""
        return self.replica_of.get(self._names.get(id(parameter), ""))


StatesByName = dict[str, dict[str, Any]]
"""The states of one optimizer: by name of the parameter, its state by key."""


def outlined(state: Mapping[str, Any]) -> dict[str, Any]:
    """Outline the state of one parameter, to send what it holds without large tensors.

    Returns:
        The state by key, with a `TensorSpec` for each dense tensor that has dimensions; other
        tensors (step counts) are on the CPU, and other values as they are.
    """
    return {
        key: TensorSpec.of(value, gradient=False)
        if isinstance(value, Tensor) and value.dim() and value.layout is torch.strided
        else value.detach().cpu()
        if isinstance(value, Tensor)
        else value
        for key, value in state.items()
    }


def gather_states(group: Group, mine: StatesByName, folder: str) -> StatesByName:
    """Bring the states of all ranks of a group to its first rank. Collective over the group.

    A rank needs memory for one piece of a tensor beside its own states: the first rank writes what
    it gets to files, and maps them.

    Args:
        group: a gloo group.
        mine: the states of this rank.
        folder: where the files are made, if possible.

    Returns:
        On the first rank the states of all other ranks; on the others an empty dictionary.

    Raises:
        NoRoom: there is no room for the files.
    """
    packed, specs, tensors = to_send(mine)
    everyones = gather_objects(group, (packed, specs))
    if group.rank():
        for spec, tensor in zip(specs, tensors):
            _send(group, spec.laid_out(tensor))
        return {}
    found: StatesByName = {}
    for source, (packed, specs) in enumerate(everyones[1:], 1):
        found |= filed(packed, specs, (_pieces(group, source, spec) for spec in specs), folder)
    return found


def _send(group: Group, tensor: Tensor) -> None:
    """Send a tensor to the first rank of a group, piece by piece; :func:`_pieces` receives it."""
    for piece in pieces_of(tensor):
        wait(start(group.send, [piece], 0, 0, peer=ANOTHER_REPLICA), ANOTHER_REPLICA)
        let_go(piece.numpy().data)  # (it may be mapped from a worker's file)


def _pieces(group: Group, source: int, spec: TensorSpec) -> Iterator[Tensor]:
    """Receive a tensor that another rank sends by :func:`_send`; yield its bytes piece by piece.

    Each piece is overwritten by the next one.
    """
    left = torch.Size(spec.shape).numel() * spec.dtype.itemsize
    # one piece bounds the memory of both ends, however large the tensor
    buffer = torch.empty(min(left, PIECE_BYTES), dtype=torch.uint8)
    while left:
        piece = buffer[: min(left, PIECE_BYTES)]
        wait(start(group.recv, [piece], source, 0, peer=ANOTHER_REPLICA), ANOTHER_REPLICA)
        yield piece
        left -= piece.numel()
