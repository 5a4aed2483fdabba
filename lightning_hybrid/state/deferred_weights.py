"""Weights of networks that are made in ``configure_model``, and are whole on no rank.

A driver makes the weights of its own stage, and those of others as it sends them, or it reads them
then from a checkpoint that it has loaded without numbers (:mod:`lightning_hybrid.remote.deferred`).
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
    tensors: Mapping[str, Tensor], names: Iterable[str], *, makes: bool = True
) -> dict[str, Tensor]:
    """Of the tensors that a worker owns, those that it has not.

    Args:
        tensors: of the LightningModule, by name.
        names: of the tensors that the worker owns.
        makes: whether deferred ones are made, or read, as they are sent. Else the worker gets them
            from that of replica 0.
    """
    left = is_offloaded if makes else is_deferred
    return {name: tensors[name] for name in names if not left(tensors[name])}


def leave_to_worker(
    tensors: Mapping[str, Any], names: Iterable[str], where: str, gradients: RemoteGradients
) -> None:
    """On a driver: free the memory of deferred tensors that a worker owns from here on.

    Those that can be made again are lent to it (:func:`lightning_hybrid.remote.lend`), since it
    keeps none of them.

    Args:
        tensors: of the LightningModule, by name.
        names: of the tensors that the worker owns.
        where: words for messages that say which rank has them.
        gradients: knows which of them have gradients.
    """
    for name in names:
        tensor = tensors[name]
        if is_of_one_rank(tensor):
            (lend if has_source(tensor) else offload)(tensor, name, where)
            tensor._gradients = gradients


def make_here(module: nn.Module, names: Sequence[str], tied: Iterable[str]) -> None:
    """On a driver that gets a stage: make the weights of it that are not made yet.

    Args:
        module: the LightningModule.
        names: names of the weights and buffers of the stage.
        tied: names of the parameters that stages of several ranks use. From here on they are as if
            they were made in ``__init__``.
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


def optimizer_after_run(optimizer: Optimizer, drivers: Group, *, divided: bool) -> dict[str, Any]:
    """The state dict of an optimizer as on one device, on the driver of replica 0.

    Where states are divided all drivers call it together, and it is empty on the others.

    Args:
        optimizer: one of the module's.
        drivers: the group of the drivers.
        divided: whether replicas divide the states of optimizers (maybe not of this one).
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
