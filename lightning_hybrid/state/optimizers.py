"""The user's optimizers on every rank: made on the driver, sent to workers, stepped together.

``configure_optimizers`` runs on the driver only. Every rank gets each optimizer with *all* its
parameter groups and *all* their parameters; the ones a rank does not own never get a gradient
there and are skipped by ``step``. So groups, schedulers and the numbering in checkpoints are
those of one device.

Workers step after the driver's optimizer, since its closure may run the backward. They step with
the groups as they were before the driver's step, and what a step changes in groups (a counter) each
rank changes for itself.

That is right for optimizers which treat every parameter by itself. The others
(:mod:`lightning_hybrid.driver.optimizer_kinds` says which these are) step *whole*: the driver gets
all of their gradients and states, and the workers get the new weights.
"""

import io
import pickle
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.comm import Tensors, TensorSpec
from lightning_hybrid.comm.protocol import Hyperparameters
from lightning_hybrid.remote import is_unread
from lightning_hybrid.state.optimizer_state import placed

_SMALL_BYTES = 2**10
"""A tensor of at most so many bytes is pickled."""


class _Pickler(pickle.Pickler):
    """Pickles optimizers for another rank: parameters as their names, large tensors apart.

    Args:
        file: what it writes to.
        names: names of parameters, by ``id``.
        apart: a list to which it adds the tensors that are large or on a device. The pickle has
            their places in the list instead, and their specs.
    """

    def __init__(self, file: io.BytesIO, names: Mapping[int, str], apart: list[Tensor]) -> None:
        super().__init__(file, protocol=5)
        self._names = names
        self._apart = apart
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: object) -> object:
        if isinstance(value, Parameter):
            return self._names.get(id(value))
        if not isinstance(value, Tensor) or not _goes_apart(value):
            return None
        # (a tensor that two states share is sent once, and shared on the other rank as well)
        number = self._numbers.setdefault(id(value), len(self._apart))
        if number == len(self._apart):
            self._apart.append(value)
        with as_they_are():
            return number, TensorSpec.of(value, gradient=False)


def _goes_apart(tensor: Tensor) -> bool:
    """Whether a tensor of a state is sent apart from the pickle: it is large, or on a GPU.

    Sparse tensors, and those of the user's classes, are pickled. (A tensor that is pickled on a GPU
    would be read onto the same GPU, which is not the other rank's.)
    """
    if type(tensor) is not Tensor and not is_unread(tensor):
        return False
    here = tensor.device.type == "cpu" or is_unread(tensor)
    return tensor.layout is torch.strided and (tensor.nbytes > _SMALL_BYTES or not here)


class _Unpickler(pickle.Unpickler):
    """Reads what a :class:`_Pickler` wrote; large tensors are received when they are needed.

    Args:
        file: what it reads from.
        parameters: the parameters of this rank, by name.
        apart: pairs of a name (not used) and a tensor, in the order in which the pickle first
            refers to these tensors. Each step of the iterator receives one, during `load`.
    """

    def __init__(
        self, file: io.BytesIO, parameters: Mapping[str, Parameter], apart: Tensors
    ) -> None:
        super().__init__(file)
        self._parameters = parameters
        self._apart = iter(apart)
        self._taken: list[Tensor] = []

    def persistent_load(self, key: Any) -> Tensor:
        if isinstance(key, str):
            return self._parameters[key]
        number: int = key[0]
        spec: TensorSpec = key[1]
        if number == len(self._taken):
            _, tensor = next(self._apart)
            self._taken.append(spec.laid_out(tensor))
        return self._taken[number]


class StepsElsewhere(Optimizer):
    """On a worker: stands for an optimizer that steps as a whole, on the driver.

    It never steps. It has the parameter groups, which tell whose gradients are clipped, unscaled
    and cleared on this rank.
    """


def record_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer that another rank needs, by name.

    The states of parameters are left out. Attributes of subclasses are among them. Hooks are not,
    nor ``step`` as learning-rate schedulers patch it on the instance: they stay on the driver.
    """
    left = {"state"}
    return {
        key: value
        for key, value in vars(optimizer).items()
        if "hook" not in key and key not in left and not callable(value)
    }


def ship(
    optimizers: Sequence[Optimizer],
    parameters: Mapping[str, Parameter],
    owned: set[str],
    whole: Sequence[bool] = (),
) -> tuple[bytes, list[tuple[str, Tensor]]]:
    """Write optimizers for another rank: pickled, with the large tensors of their states apart.

    Args:
        optimizers: the optimizers of the driver.
        parameters: every parameter of the module, by name.
        owned: the names of the parameters whose states the other rank needs.
        whole: for each optimizer, whether the driver alone steps it: of such an optimizer the
            groups alone are written. Empty: there is none.

    Returns:
        The pickle, and the tensors apart from it, each with its number as its name.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    records: list[tuple[type[Optimizer], dict[str, Any]]] = []
    for index, optimizer in enumerate(optimizers):
        if index < len(whole) and whole[index]:
            groups = {"param_groups": optimizer.param_groups, "defaults": {}, "state": {}}
            records.append((StepsElsewhere, groups))
            continue
        state = {
            parameter: state
            for parameter, state in optimizer.state.items()
            if names.get(id(parameter)) in owned
        }
        records.append((type(optimizer), record_of(optimizer) | {"state": state}))
    apart: list[Tensor] = []
    file = io.BytesIO()
    _Pickler(file, names, apart).dump(records)
    return file.getvalue(), [(str(number), tensor) for number, tensor in enumerate(apart)]


def unship(data: bytes, apart: Tensors, parameters: Mapping[str, Parameter]) -> list[Optimizer]:
    """Make the optimizers that :func:`ship` wrote on another rank, with this rank's parameters.

    Args:
        data: the pickle.
        apart: the tensors apart from it; they are received while this iterates over them.
        parameters: this rank's parameters, by name. States go to their devices.
    """
    optimizers = []
    for kind, plain in _Unpickler(io.BytesIO(data), parameters, apart).load():
        optimizer = kind.__new__(kind)
        state = plain.pop("state")
        # The base class makes the hook tables of this torch version. (It refuses to have no groups,
        # as an optimizer has if `configure_optimizers` returns None: then an empty one.)
        Optimizer.__init__(optimizer, plain["param_groups"] or [{"params": []}], plain["defaults"])
        optimizer.__dict__.update(plain)
        optimizer.state.update({p: placed(of_one, p) for p, of_one in state.items()})
        optimizers.append(optimizer)
    return optimizers


def plain_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer that are numbers, flags, texts or None, by name."""
    kinds = (int, float, str, type(None))
    return {key: value for key, value in vars(optimizer).items() if isinstance(value, kinds)}


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal bit for bit, in containers and objects too; NaN equals NaN."""
    if left is right:
        return True
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        left, right = (t.detach().to_dense() if t.is_sparse else t.detach() for t in (left, right))
        alike = (left.shape, left.dtype, left.device) == (right.shape, right.dtype, right.device)
        return alike and torch.allclose(left, right, rtol=0.0, atol=0.0, equal_nan=True)
    if type(left) is not type(right):
        return False
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, np.ndarray):
        return bool(np.array_equal(left, right, equal_nan=left.dtype.kind in "fc"))
    try:
        if left == right or (left != left and right != right):
            return True
        return hasattr(left, "__dict__") and bool(vars(left)) and same(vars(left), vars(right))
    except Exception:  # (a value may raise any error when it is compared, or contain itself)
        return False


class NamedGroups:
    """Names the parameters in groups of optimizers.

    Args:
        names: by ``id``, the names of the parameters.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._known: dict[int, tuple[list[Parameter], list[str]]] = {}  # by number of the group

    def of(self, group: int, parameters: Sequence[Parameter]) -> list[str]:
        """Return the names of the parameters of a group; those that have no name are left out.

        As long as a group has the same parameters, the same list is returned.

        Args:
            group: number of the group.
            parameters: the parameters that the group has now.
        """
        before, names = self._known.get(group, ((), []))
        if not _are(before, parameters):
            names = [self._names[id(p)] for p in parameters if id(p) in self._names]
            self._known[group] = [*parameters], names
        return names


def _are(these: Sequence[Any], those: Sequence[Any]) -> bool:
    """Whether two sequences hold the very same objects, in the same order."""
    return len(these) == len(those) and all(map(is_, these, those))


def groups_of(optimizer: Optimizer, named: NamedGroups) -> list[Hyperparameters]:
    """Copy the groups of an optimizer as they are now, with names in the place of parameters.

    Args:
        optimizer: the optimizer.
        named: names its parameters.
    """
    return [
        {
            key: named.of(number, value)
            if key == "params"
            else value.clone()
            if isinstance(value, Tensor)
            else value
            for key, value in group.items()
        }
        for number, group in enumerate(optimizer.param_groups)
    ]


def take_groups(
    optimizer: Optimizer,
    groups: Sequence[Hyperparameters],
    parameters: Mapping[str, Parameter],
) -> None:
    """Set the groups of a worker's optimizer to those of the driver's optimizer.

    Groups that the worker's lacks are added, and groups that it has beside them are removed.

    Args:
        optimizer: the worker's optimizer.
        groups: the groups of the driver's, from :func:`groups_of`.
        parameters: the worker's parameters, by name.
    """
    del optimizer.param_groups[len(groups) :]
    for index, theirs in enumerate(groups):
        mine = {**theirs, "params": [parameters[name] for name in theirs["params"]]}
        if index < len(optimizer.param_groups):
            optimizer.param_groups[index].update(mine)
        else:
            optimizer.add_param_group(mine)


def complete(
    optimizer: Optimizer,
    state_dict: dict[str, Any],
    names: Mapping[int, str],
    remote: Mapping[str, dict[str, Any]],
) -> dict[str, Any]:
    """Complete the state dict of an optimizer by the states of other ranks, as on one device.

    Args:
        optimizer: the optimizer.
        state_dict: its state dict on this rank, which is changed and returned.
        names: names of parameters, by ``id``.
        remote: the states on other ranks, by name of the parameter.
    """
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    everyone = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, everyone):
        name = names.get(id(parameter), "")
        if name in remote:
            state_dict["state"][number] = remote[name]
    # on one device states are in the order of their numbers
    state_dict["state"] = dict(sorted(state_dict["state"].items()))
    return state_dict
