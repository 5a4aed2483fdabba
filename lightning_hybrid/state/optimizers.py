"""The user's optimizers on every rank: made on the driver, shipped, stepped together.

``configure_optimizers`` runs on the driver only. Every rank gets each optimizer with *all* its
parameter groups and *all* their parameters; the ones a rank does not own never get a gradient
there and are skipped by ``step``. So groups, schedulers and the numbering in checkpoints are
those of one device.

Workers step when the driver's optimizer has stepped: before, its closure has not run the backward.
They step with the groups as the driver's step found them, and count in them for themselves.

That is right for optimizers which treat every parameter by itself. The others (which ones they are
:mod:`lightning_hybrid.driver.optimizer_trial` finds out) step *whole*: the driver has all of
their gradients and states, and the workers get the new weights.
"""

import io
import math
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

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
"""A tensor of at most this is pickled."""


class _Pickler(pickle.Pickler):
    """Writes a parameter as its name: the other rank has its own.

    Args:
        file: to write to.
        names: of parameters, by identity.
        apart: gets large tensors and those on devices, which are written as their numbers in it
            and their specs; ``None``: they are pickled.
    """

    def __init__(
        self, file: io.BytesIO, names: Mapping[int, str], apart: list[Tensor] | None
    ) -> None:
        super().__init__(file, protocol=5)
        self._names, self._apart = names, apart
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: object) -> object:
        if isinstance(value, Parameter):
            return self._names.get(id(value))
        if self._apart is None or not isinstance(value, Tensor) or not _goes_apart(value):
            return None
        # what two states share they share on the other rank as well
        number = self._numbers.setdefault(id(value), len(self._apart))
        if number == len(self._apart):
            self._apart.append(value)
        with as_they_are():
            return number, TensorSpec.of(value, gradient=False)


def _goes_apart(tensor: Tensor) -> bool:
    """Whether a tensor is dense, large or on a device, and of no class of the user's.

    (What is pickled on a device is read on that same one, which is the other rank's neighbour.)
    """
    if type(tensor) is not Tensor and not is_unread(tensor):
        return False
    here = tensor.device.type == "cpu" or is_unread(tensor)
    return tensor.layout is torch.strided and (tensor.nbytes > _SMALL_BYTES or not here)


class _Unpickler(pickle.Unpickler):
    """Reads what a :class:`_Pickler` wrote; tensors apart are taken when they are needed."""

    def __init__(
        self, file: io.BytesIO, parameters: Mapping[str, Parameter], apart: Tensors
    ) -> None:
        super().__init__(file)
        self._parameters, self._apart = parameters, iter(apart)
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
    """On a worker: the groups of an optimizer that steps whole, on the driver.

    Gradients are clipped, unscaled and cleared by groups.
    """


def record_of(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes of an optimizer that another rank needs, but for the state of parameters.

    Attributes of subclasses travel too; hooks, and ``step`` as learning-rate schedulers patch it on
    the instance, belong to the driver.
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
    """Write optimizers for another rank: pickled, and apart the large tensors of their states.

    Args:
        optimizers: the driver's.
        parameters: every parameter of the module, by name.
        owned: the names of those whose state the other rank needs.
        whole: of each optimizer whether the driver alone steps it; by default none.
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
    data = write_records(records, names, apart)
    return data, [(str(number), tensor) for number, tensor in enumerate(apart)]


def write_records(
    records: Sequence[tuple[type[Optimizer], dict[str, Any]]],
    names: Mapping[int, str],
    apart: list[Tensor] | None = None,
) -> bytes:
    """Pickle optimizers' classes and attributes, parameters by name; see :func:`unship`.

    Args:
        records: what to pickle.
        names: of parameters, by identity.
        apart: gets the large tensors; ``None``: they are pickled.
    """
    file = io.BytesIO()
    _Pickler(file, names, apart).dump(records)
    return file.getvalue()


def unship(data: bytes, apart: Tensors, parameters: Mapping[str, Parameter]) -> list[Optimizer]:
    """Read what :func:`ship` wrote, around this rank's own parameters, and beside these."""
    optimizers = []
    for kind, plain in _Unpickler(io.BytesIO(data), parameters, apart).load():
        optimizer = kind.__new__(kind)
        state = plain.pop("state")
        # A fresh base object brings the hook tables of this torch version, in their own form.
        # (without any, as where `configure_optimizers` returns None, it wants one that is empty)
        Optimizer.__init__(optimizer, plain["param_groups"] or [{"params": []}], plain["defaults"])
        optimizer.__dict__.update(plain)
        optimizer.state.update({p: placed(of_one, p) for p, of_one in state.items()})
        optimizers.append(optimizer)
    return optimizers


def kind_of_group(group: Mapping[str, Any]) -> frozenset[tuple[str, object]]:
    """Equal for hyper-parameters that differ in numbers only, but for zero and infinity."""
    return frozenset((key, _kind_of(value)) for key, value in group.items() if key != "params")


def _kind_of(value: object) -> object:
    if value is None or isinstance(value, bool | str):
        return value
    # zero switches things off: with momentum=0 an optimizer keeps no buffer
    if isinstance(value, int | float):
        return type(value), value == 0 or value in (math.inf, -math.inf)
    if isinstance(value, list | tuple):
        return type(value), *map(_kind_of, value)
    return type(value)


def groups_of(optimizer: Optimizer, names: Mapping[int, str]) -> list[Hyperparameters]:
    """The groups as they are now, parameters by name."""
    return [
        {
            key: [names[id(p)] for p in value if id(p) in names]
            if key == "params"
            else value.clone()
            if isinstance(value, Tensor)
            else value
            for key, value in group.items()
        }
        for group in optimizer.param_groups
    ]


def take_groups(
    optimizer: Optimizer,
    groups: Sequence[Hyperparameters],
    parameters: Mapping[str, Parameter],
) -> None:
    """Give a worker's optimizer the groups of the driver's, new groups included."""
    del optimizer.param_groups[len(groups) :]
    for index, theirs in enumerate(groups):
        mine = {**theirs, "params": [parameters[name] for name in theirs["params"]]}
        if index < len(optimizer.param_groups):
            optimizer.param_groups[index].update(mine)
        else:
            optimizer.add_param_group(mine)


def state_of(
    optimizer: Optimizer, names: Mapping[int, str], only: str = ""
) -> dict[str, dict[str, Any]]:
    """The state of an optimizer by parameter name, of one parameter or all; tensors on the CPU."""
    return {
        names[id(parameter)]: {
            key: value.detach().cpu() if isinstance(value, Tensor) else value
            for key, value in state.items()
        }
        for parameter, state in optimizer.state.items()
        if state and only in ("", names[id(parameter)])
    }


def complete(
    optimizer: Optimizer,
    state_dict: dict[str, Any],
    names: Mapping[int, str],
    remote: Mapping[str, dict[str, Any]],
) -> dict[str, Any]:
    """The ``state_dict`` of one device: this rank's own, and the state of the workers in it."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    everyone = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, everyone):
        name = names.get(id(parameter), "")
        if name in remote:
            state_dict["state"][number] = remote[name]
    # on one device states are in the order of their numbers
    state_dict["state"] = dict(sorted(state_dict["state"].items()))
    return state_dict
