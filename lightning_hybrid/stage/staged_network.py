"""A network that has been cut, as one rank sees it."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.comm import CallKey, Dealt, Devices, Mesh, copies_of
from lightning_hybrid.comm.protocol import Forward, Placement
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph import Stage
from lightning_hybrid.remote import is_deferred, occupy
from lightning_hybrid.stage.calls import Call, Recipe, Traffic, Values
from lightning_hybrid.stage.engine import Engine
from lightning_hybrid.stage.gradient_averaging import ReplicaGroup, state_buffers
from lightning_hybrid.stage.lent_weights import LentWeights
from lightning_hybrid.stage.rank_stages import StageOptions
from lightning_hybrid.stage.replayed_statistics import ReplayedStatistics
from lightning_hybrid.stage.trace import Trace
from lightning_hybrid.stage.weight_hooks import WeightHooks


class StagedNetwork:
    """One network on one rank: the module, this rank's stages of it, its calls.

    Args:
        number: number of the network, the same on all ranks.
        name: dotted name in the LightningModule; empty for the LightningModule itself.
        module: the whole network. Only the tensors of this rank's stages are up to date.
        engine: runs this rank's stages.
        borrowed: names in the network of parameters that another rank owns and this one uses too:
            their values come from there, and their gradients go there.
        lent: on a worker, the weights that it owns and the driver uses too.

    Attributes:
        weight_hooks: the user's hooks on the gradients of weights.
    """

    def __init__(
        self,
        number: int,
        name: str,
        module: nn.Module,
        engine: Engine,
        borrowed: frozenset[str] = frozenset(),
        lent: LentWeights | None = None,
    ) -> None:
        self.number, self.name, self.module, self.engine = number, name, module, engine
        self.borrowed, self.lent = borrowed, lent
        self.calls: dict[int, Call] = {}
        self.keys: dict[int, CallKey] = {}
        self._traffic: dict[int, list[Traffic]] = {}
        self._parameters = list(module.parameters())
        self.weight_hooks = WeightHooks(module)

    def add_key(self, key: CallKey, number: int | None = None) -> int:
        """Register a key of calls that exchange tensors of the same shapes.

        Args:
            key: the key.
            number: on a worker, the driver's number for it. (Some never come: their call has failed
                on the driver before it told the worker.)

        Returns:
            Its number.
        """
        number = len(self.keys) if number is None else number
        self.keys[number] = key
        self._traffic[number] = [Traffic() for _ in self.engine.owned]
        return number

    def uses_rng(self, key: int) -> bool:
        """Whether a stage up to the last one of this rank draws random numbers."""
        return self._traffic[key][-1].uses_rng

    def open(self, command: Forward) -> Call:
        """Begin a call; a differentiable one stays open until its backward."""
        saved: list[dict[int, tuple[Values, list[Any]] | Recipe]] = [{} for _ in self.engine.owned]
        key, traffic = self.keys[command.key], self._traffic[command.key]
        travels = command.exchange, command.uses_rng
        call = Call(command.call, command.draw, key, *travels, traffic, saved, ahead=command.ahead)
        if call.key.grad:
            self.calls[command.call] = call
        return call

    def trainable(self) -> tuple[bool, ...]:
        """``requires_grad`` of every parameter."""
        with as_they_are():
            return tuple([parameter.requires_grad for parameter in self._parameters])

    def set_trainable(self, flags: Sequence[bool]) -> None:
        """On a worker: set ``requires_grad`` of every parameter to the driver's."""
        for parameter, trainable in zip(self._parameters, flags):
            parameter.requires_grad_(trainable)

    def owned(self) -> list[str]:
        """Names, in the LightningModule, of the tensors that this rank owns."""
        names = names_of([own.specializations[0] for own in self.engine.owned])
        return self.full_names(name for name in names if name not in self.borrowed)

    def full_names(self, names: Iterable[str]) -> list[str]:
        """Names in the LightningModule of tensors that have these names in the network."""
        return [f"{self.name}.{name}" if self.name else name for name in names]


def engine_of(
    network: nn.Module,
    stages: dict[int, Stage],
    placement: Placement,
    options: StageOptions,
    *,
    mesh: Mesh,
    links: Mapping[int, Dealt],
    borrowed: frozenset[str],
    device: torch.device,
    seed: int,
    trace: Trace,
) -> Engine:
    """The engine for this rank's stages, with the group that averages their gradients.

    Args:
        network: the network of the stages.
        stages: this rank's stages, by number.
        placement: where all stages of the network are.
        options: how they compute.
        mesh: the groups of ranks.
        links: of the stages to their neighbours, by number.
        borrowed: names in the network of what this rank uses and another one owns.
        device: the device of the stages.
        seed: of the random numbers inside networks.
        trace: where to record.
    """
    here = [stages[number] for number in links]
    copies = copies_of(placement.devices[next(iter(links))])
    driver, me = 0, mesh.coordinates.pp_rank
    named = {name: value for stage in here for name, value in stage.named_parameters()}
    replica_group = ReplicaGroup(
        [value for name, value in named.items() if name not in borrowed],
        lambda: dict(pair for stage in here for pair in stage.named_buffers()).values(),
        mesh.owners(copies),
        trace,
        partial(state_buffers, network),
        len(copies),
        # if the driver has a copy beside workers, these own and step the parameters
        owns=me != driver or driver not in copies[1:],
        survivors=mesh.survivors,
    )
    several = len(copies) > 1
    return Engine(
        stages,
        placement,
        options,
        coordinates=mesh.coordinates,
        links=links,
        replica_group=replica_group,
        replayed=ReplayedStatistics(network, partial(mesh.siblings, copies)) if several else None,
        device=device,
        seed=seed,
        trace=trace,
    )


def names_of(stages: Sequence[Stage]) -> list[str]:
    """Names in the network of the parameters and buffers that these stages use."""
    named = (pair for s in stages for pair in (*s.named_parameters(), *s.named_buffers()))
    return list(dict.fromkeys(name for name, _ in named))


def borrowed_parameters(stages: Sequence[Sequence[str]], devices: Devices) -> list[frozenset[str]]:
    """Per rank of a replica, the names of the parameters that it uses and another one owns.

    The owner is the rank of the earliest stage that uses a parameter, but the driver only if no
    other rank uses it: it has proxies for parameters that it borrows. Copies of a stage borrow
    nothing from each other.

    Args:
        stages: of each stage of the network, the names of the parameters that it uses.
        devices: of each of them the ``pp_rank`` of its rank, or of all its copies.

    Raises:
        NetworkError: a stage that has copies shares a parameter with another stage.
    """
    _refuse_tied_copies(stages, devices)
    # all ranks compute this from the plan alone, and so agree without a message
    ranks = [copies_of(device) for device in devices]
    used: list[set[str]] = [set() for _ in range(max(map(max, ranks)) + 1)]
    owner: dict[str, int] = {}
    for names, (device, *_) in zip(stages, ranks):
        used[device] |= {*names}
        for name in names:
            # (`or`, so that the driver, rank 0, gives way to any later rank)
            owner[name] = owner.get(name) or device
    return [
        frozenset(name for name in names if owner[name] != rank) for rank, names in enumerate(used)
    ]


def lent_parameters(
    stages: Sequence[Sequence[str]], devices: Devices, borrowed: Sequence[frozenset[str]]
) -> list[frozenset[str]]:
    """Per rank of a replica, the names of the parameters that it owns and the driver uses too.

    Args:
        stages: as for :func:`borrowed_parameters`.
        devices: likewise.
        borrowed: what that returns. (It does not have the parameters of a stage that the driver has
            a copy of, all of which the rank with the first copy lends the driver.)
    """
    driver = 0
    lent: list[set[str]] = [set() for _ in borrowed]
    for names, (owner, *others) in zip(stages, map(copies_of, devices)):
        tied = borrowed[driver] - borrowed[owner]
        lent[owner] |= {name for name in names if driver in others or name in tied}
    return [frozenset(names) for names in lent]


def _refuse_tied_copies(stages: Sequence[Sequence[str]], devices: Devices) -> None:
    for number, (names, device) in enumerate(zip(stages, devices)):
        others = {name for k, each in enumerate(stages) if k != number for name in each}
        if len(copies_of(device)) > 1 and (tied := sorted(others & {*names})):
            raise NetworkError(
                f"stage {number} has {len(copies_of(device))} copies, and shares parameter "
                f"{tied[0]!r} with another stage: a stage with copies has its weights to itself. "
                "Cut elsewhere (the strategy's allocation=[...]), so that one stage has all "
                "uses, or give it one copy (pipeline_parallel_size)."
            )


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by name; looked up anew, since a buffer may be replaced."""
    named: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    return named | dict(module.named_buffers(remove_duplicate=False))


def write_tensors(module: nn.Module, values: Iterable[tuple[str, Tensor]]) -> None:
    """Copy ``values`` into the parameters and buffers of these names, where they have memory."""
    tensors = tensors_of(module)
    # in place, so that optimizers and stages that know a tensor see its new numbers
    with torch.no_grad(), as_they_are():
        for name, value in values:
            tensor = tensors[name]
            if is_deferred(tensor):
                continue
            if tensor.shape == value.shape and value.layout is torch.strided:
                occupy(tensor)
                tensor.copy_(value)
            else:  # a buffer of another size now, or a sparse one
                tensor.data = value.to(tensor.device, tensor.dtype)
