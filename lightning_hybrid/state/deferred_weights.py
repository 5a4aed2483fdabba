"""Weights of networks that are made in ``configure_model``, and are whole on no rank.

A driver makes the weights of its own stage, and those of workers' stages when it sends them. If it
has loaded a checkpoint, whose numbers were left in the file, it then reads them there
(:mod:`lightning_hybrid.remote.deferred`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.comm import Group
from lightning_hybrid.remote import (
    RemoteGradients,
    count_as_whole,
    forget_made,
    has_source,
    is_deferred,
    is_of_one_rank,
    is_offloaded,
    is_unread,
    left_unread,
    lend,
    materialize,
    materialized_with,
    occupy,
    offload,
    value_of,
)
from lightning_hybrid.stage import tensors_of
from lightning_hybrid.state.divided_optimizer_states import gather_states
from lightning_hybrid.state.optimizers import complete
from lightning_hybrid.state.tensor_file import let_go_of_checkpoints


def make_what_no_network_owns(module: nn.Module) -> None:
    """Give memory and numbers to those deferred tensors that every rank is to have.

    These are the LightningModule's own parameters and buffers, the buffers of modules without
    parameters, and buffers that are a single number (which TorchDynamo reads in each capture). From
    then on they count as made in ``__init__``. All others stay deferred until a call tells to which
    rank's stage they belong.
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
    tensors: Mapping[str, Tensor], names: Iterable[str], *, makes: bool = True
) -> dict[str, Tensor]:
    """Choose the tensors that a driver sends to a worker that is to own them.

    Args:
        tensors: the tensors of the LightningModule, by name.
        names: names of the tensors that the worker is to own.
        makes: whether deferred tensors are sent too, and made or read for that. Else the worker
            gets them from the same worker of replica 0.

    Returns:
        The tensors by name, without those that other ranks own already.
    """
    left = is_offloaded if makes else is_deferred
    return {name: tensors[name] for name in names if not left(tensors[name])}


def leave_to_worker(
    tensors: Mapping[str, Any], names: Iterable[str], where: str, gradients: RemoteGradients
) -> None:
    """On a driver: note that a worker owns deferred tensors from here on, and free their memory.

    Tensors that can be made again are lent to it (:func:`lightning_hybrid.remote.lend`), so that
    the driver can take them back. Tensors that were made in ``__init__`` stay as they are.

    Args:
        tensors: the tensors of the LightningModule, by name.
        names: names of the tensors that the worker owns, of either sort.
        where: which rank has them, in the words of errors ("on ...").
        gradients: knows which of them have gradients on the worker.
    """
    for name in names:
        tensor = tensors[name]
        if is_of_one_rank(tensor):
            (lend if has_source(tensor) else offload)(tensor, name, where)
            tensor._gradients = gradients


def make_here(module: nn.Module, names: Sequence[str], tied: Iterable[str]) -> None:
    """On a driver that gets a stage: make the stage's weights that have no memory or numbers yet.

    Call it after the workers have got their weights: it drops what was recorded only to make those.

    Args:
        module: the LightningModule.
        names: names of the weights and buffers of the stage.
        tied: names of the parameters that stages of several ranks use. They are made too, and from
            then on count as made in ``__init__``.
    """
    tensors, tied = tensors_of(module), tuple(tied)
    materialize(tensors[name] for name in (*names, *tied))
    for name in names:
        occupy(tensors[name])
    for name in tied:
        count_as_whole(tensors[name])
    forget_made()
    let_go_of_checkpoints()


@contextmanager
def having_all(module: nn.Module, values: Mapping[str, Tensor] = {}) -> Iterator[None]:
    """Inside, a module has all of its weights: its own, and given ones for those of other ranks.

    Args:
        module: the module.
        values: the weights that other ranks own, by name in the module; unread ones stay unread
            until they are used.
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
    """Leave the frozen parameters of a module out of its state dict.

    Args:
        module: the module.
        state: its state dict, which stays as it is.
    """
    parameters = module.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in parameters if not parameter.requires_grad}
    return {name: value for name, value in state.items() if name not in frozen}


def optimizer_after_run(optimizer: Optimizer, drivers: Group, *, divided: bool) -> dict[str, Any]:
    """Make the state dict of an optimizer as it is on one device. Called after a run, on drivers.

    If ``divided``, all drivers call it together.

    Args:
        optimizer: an optimizer of the module.
        drivers: the gloo group of the drivers of all replicas.
        divided: whether replicas divide the states of optimizers (possibly not of this one).

    Returns:
        The state dict. Of an optimizer whose states are divided it is empty but on the driver of
        replica 0.
    """
    others = getattr(optimizer.state, "others", None)
    if not divided or others is None:
        return optimizer.state_dict()
    # all drivers have the groups; the module may have lost some of their parameters
    everyone = (parameter for group in optimizer.param_groups for parameter in group["params"])
    names = {id(parameter): str(number) for number, parameter in enumerate(everyone)}
    here = {names.get(id(p), ""): state for p, state in optimizer.state.items()}
    # each driver has its replica's share by now, so together they have all states
    remote = gather_states(drivers, here, "")
    if drivers.rank():
        return {}
    with others.gathered():
        state_dict = optimizer.state_dict()
    # (an optimizer with all states on this rank may have a state dict of its own form)
    return complete(optimizer, state_dict, names, remote) if remote else state_dict
