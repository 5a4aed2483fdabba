"""Weights of networks that are made in ``configure_model``, and are whole on no rank.

Each rank makes the weights of its own stage, or reads them from a checkpoint that all ranks have
loaded without reading its numbers (:mod:`lightning_hybrid.remote.deferred`).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid._trees import rebuild
from lightning_hybrid.comm import (
    Answer,
    Coordinates,
    Mesh,
)
from lightning_hybrid.errors import DeferredError
from lightning_hybrid.remote import (
    RemoteGradients,
    count_as_whole,
    forget_made,
    has_loaded,
    is_deferred,
    is_of_one_rank,
    is_offloaded,
    is_unread,
    left_unread,
    make_vacant,
    materialize,
    materialize_here,
    materialized_with,
    occupy,
    offload,
    vacate,
    value_of,
)
from lightning_hybrid.stage import tensors_of
from lightning_hybrid.state.divided_optimizer_states import gather_states
from lightning_hybrid.state.optimizers import complete
from lightning_hybrid.state.tensor_file import FilesOfWorker, let_go_of_checkpoints, read_files


def make_what_no_network_owns(module: nn.Module) -> None:
    """Make the LightningModule's own tensors, those of modules without parameters, and numbers.

    From then on they are as if they were made in ``__init__``, so that a later run finds them on
    every rank, whatever stages use them. (TorchDynamo reads buffers that are a single number in
    each capture.) All others stay deferred until a call tells to which rank's stage they belong.
    """
    parts = [part for part in module.modules() if next(part.parameters(), None) is None]
    small = [
        *module.parameters(recurse=False),
        *module.buffers(recurse=False),
        *(buffer for part in parts for buffer in part.buffers()),
        *(buffer for buffer in module.buffers() if not buffer.dim()),
    ]
    for tensor in filter(is_deferred, small):
        materialize([tensor])
        count_as_whole(tensor)


def to_send(
    tensors: Mapping[str, Tensor], names: Iterable[str], *, served: bool = False
) -> dict[str, Tensor]:
    """Of the tensors that a worker owns, those that it cannot make by itself: made or loaded here.

    Args:
        tensors: of the LightningModule, by name.
        names: of the tensors that the worker owns.
        served: whether it makes none, as a server. (A deferred tensor is made as it is sent.)
    """
    owned = {name: tensors[name] for name in names}
    if served:
        return {name: tensor for name, tensor in owned.items() if not is_offloaded(tensor)}
    return {name: t for name, t in owned.items() if not is_deferred(t) or has_loaded(t)}


def leave_to_worker(
    tensors: Mapping[str, Any], names: Iterable[str], where: str, gradients: RemoteGradients
) -> None:
    """On a driver: free the memory of deferred tensors that a worker owns from here on.

    Args:
        tensors: of the LightningModule, by name.
        names: of the tensors that the worker owns.
        where: words for messages that say which rank has them.
        gradients: knows which of them have gradients.
    """
    for name in names:
        if is_of_one_rank(tensors[name]):
            offload(tensors[name], name, where)
            tensors[name]._gradients = gradients


class Takeover:
    """On a rank that gets a stage: makes the weights of it, and gives up those of other stages.

    Args:
        module: the LightningModule.
        names: names of the weights and buffers of the stage.
        others: names of those of the other stages.
        coordinates: this rank.
        vacates: whether parameters of the other stages give their memory back.
        tied: names of the parameters that stages of several ranks use. Each rank of these makes its
            own copy, and from then on they are as if they were made in ``__init__``.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[str],
        others: Iterable[str],
        coordinates: Coordinates,
        *,
        vacates: bool = False,
        tied: Collection[str] = (),
    ) -> None:
        tensors = tensors_of(module)
        missing = {id(tensor) for tensor in materialize_here(tensors[name] for name in names)}
        self._missing = [name for name in names if id(tensors[name]) in missing]
        self._coordinates = coordinates
        mine, shared = ({id(tensors[name]) for name in each} for each in (names, tied))
        for name in set(others) - set(names):
            if id(tensors[name]) in mine:  # another name of a tied weight
                continue
            if id(tensors[name]) in shared:
                (make_vacant if vacates else materialize)([tensors[name]])
            elif is_of_one_rank(tensors[name]):
                offload(tensors[name], name, f"on another rank of replica {coordinates.dp_rank}")
            elif vacates and isinstance(tensors[name], nn.Parameter):
                vacate(tensors[name])
        for name in names:
            occupy(tensors[name])
        for name in tied:
            count_as_whole(tensors[name])
        forget_made()
        let_go_of_checkpoints()

    def check_complete(self, arrived: Iterable[str]) -> None:
        """Check that this rank has a value for each of its weights, after all transfers.

        Raises:
            DeferredError: a weight is on another rank still.
        """
        left = set(self._missing) - set(arrived)
        # other replicas get theirs from replica 0
        if left and self._coordinates.dp_rank == 0:
            raise DeferredError(
                f"{sorted(left)[0]!r} is on another rank: an earlier run has cut the network at "
                "other places. Give this run the same plan (HybridGabraStrategy(plan=...)), or a "
                "checkpoint (ckpt_path=...)."
            )


@contextmanager
def having_all(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, a module has all of its weights: its own, and given ones for those of other ranks.

    Args:
        module: the module.
        values: the weights that other ranks own, by name in the module.
    """
    tensors = tensors_of(module)
    with ExitStack() as stack:
        for name, value in values.items():
            if is_offloaded(tensors[name]):
                shown = (
                    left_unread(tensors[name], name, value)
                    if is_unread(value)
                    else materialized_with(tensors[name], value)
                )
                stack.enter_context(shown)
        for tensor in tensors_of(module).values():  # (a tied one is not deferred the second time)
            if is_deferred(tensor) and not (is_offloaded(tensor) or is_unread(tensor)):
                stack.enter_context(materialized_with(tensor, value_of(tensor)))
        yield


# ---------------------------------------------------------------- after a run


def without_frozen(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict of a module without parameters that require no gradient."""
    parameters = module.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in parameters if not parameter.requires_grad}
    return {name: value for name, value in state.items() if name not in frozen}


def gather_after_run(module: nn.Module, mesh: Mesh, *, frozen: bool = True) -> dict[str, Tensor]:
    """The weights of the other stages, on the driver of replica 0; all ranks call it together.

    Args:
        module: the LightningModule.
        mesh: the groups of ranks.
        frozen: whether weights come that require no gradient on the driver.
    """
    if mesh.coordinates.dp_rank or mesh.coordinates.ranks_per_replica == 1:
        return {}
    tensors = tensors_of(module)
    if not mesh.coordinates.is_driver:
        mine = {n: t for n, t in tensors.items() if is_of_one_rank(t) and not is_deferred(t)}
        wanted = mine if frozen else mesh.channel(0).receive(Answer).value
        _answer_driver(mesh, {name: tensor for name, tensor in mine.items() if name in wanted})
        return {}
    if not frozen:  # the driver knows what has been frozen during the run
        for worker in range(1, mesh.coordinates.ranks_per_replica):
            mesh.channel(worker).send(Answer(value=[*without_frozen(module, tensors)]))
    return {name: tensor for named in _hear_workers(mesh) for name, tensor in named.items()}


def gather_optimizer_after_run(
    optimizer: Optimizer, mesh: Mesh, *, divided: bool
) -> dict[str, Any]:
    """The state dict of an optimizer as on one device, on the driver of replica 0; else empty.

    All ranks call it together.

    Args:
        optimizer: one of the module's.
        mesh: the groups of ranks.
        divided: whether replicas divide the states of optimizers (maybe not of this one).
    """
    if mesh.coordinates.dp_rank and not divided:
        return {}
    # all ranks have the groups; the module may have lost some of their parameters
    everyone = (parameter for group in optimizer.param_groups for parameter in group["params"])
    names = {id(parameter): str(number) for number, parameter in enumerate(everyone)}
    if not mesh.coordinates.is_driver:
        states = optimizer.state.items()
        _answer_driver(mesh, {names[id(p)]: dict(state) for p, state in states if state})
        return {}
    remote: dict[str, dict[str, Any]] = {}
    for states_there in _hear_workers(mesh):
        remote |= states_there
    here = {names.get(id(p), ""): state for p, state in optimizer.state.items()}
    others = getattr(optimizer.state, "others", None)
    gathered = nullcontext() if others is None else others.gathered()
    remote = {name: state for name, state in remote.items() if name not in here}
    if others is not None:
        # each driver has its replica's share by now, so together they have all states
        remote |= gather_states(mesh.drivers, remote | here, "")
    if mesh.coordinates.dp_rank:
        return {}
    with gathered:
        state_dict = optimizer.state_dict()
    # (an optimizer with all states on this rank may have a state dict of its own form)
    return complete(optimizer, state_dict, names, remote) if remote else state_dict


def _answer_driver(mesh: Mesh, value: Any) -> None:
    """Give the driver a value in a file, or send it, if the driver cannot read that."""
    channel = mesh.channel(0)
    with closing(FilesOfWorker(nn.Module())) as file:
        channel.send(Answer(value=file.write(value, "")))
        is_read = channel.receive(Answer).value
    if not is_read:
        # the driver is on another host, where the file is not
        channel.send(Answer(value=rebuild(value, lambda v: v.cpu() if _is_tensor(v) else v)))
        channel.flush()


def _hear_workers(mesh: Mesh) -> Iterator[Any]:
    for worker in range(1, mesh.coordinates.ranks_per_replica):
        channel = mesh.channel(worker)
        ticket = channel.receive(Answer).value
        files = None if ticket is None else read_files([ticket])
        channel.send(Answer(value=files is not None))
        yield channel.receive(Answer).value if files is None else files[0]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
