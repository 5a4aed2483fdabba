"""The user's optimizers on every rank: made on the driver, shipped, stepped together.

``configure_optimizers`` runs on the driver only. Every rank gets each optimizer with *all* its
parameter groups and *all* their parameters; the ones a rank does not own never get a gradient
there and are skipped by ``step``. So groups, schedulers and the numbering in checkpoints are
those of one device.

Workers step when the driver's optimizer has stepped (a post-hook, with the hyper-parameters of
that very step): a pre-hook would fire before the closure has run the backward.
"""

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_hybrid.compat import as_they_are

Hyperparameters = dict[str, Any]


class _Pickler(pickle.Pickler):
    """Writes a parameter as its name: the other rank has its own."""

    def __init__(self, file: io.BytesIO, names: Mapping[int, str]) -> None:
        super().__init__(file, protocol=5)
        self._names = names

    def persistent_id(self, value: object) -> str | None:
        return self._names.get(id(value)) if isinstance(value, Parameter) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, parameters: Mapping[str, Parameter]) -> None:
        super().__init__(file)
        self._parameters = parameters

    def persistent_load(self, name: str) -> Parameter:
        return self._parameters[name]


def ship(
    optimizers: Sequence[Optimizer], parameters: Mapping[str, Parameter], owned: set[str]
) -> bytes:
    """Write optimizers for another rank.

    Args:
        optimizers: the driver's.
        parameters: every parameter of the module, by name.
        owned: the names of those whose state the other rank needs.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    records = []
    for optimizer in optimizers:
        # Attributes of subclasses travel too; hooks, and `step` as learning-rate schedulers
        # patch it on the instance, belong to the driver.
        plain = {k: v for k, v in vars(optimizer).items() if "hook" not in k and not callable(v)}
        plain["state"] = {
            parameter: state
            for parameter, state in optimizer.state.items()
            if names.get(id(parameter)) in owned
        }
        records.append((type(optimizer), plain))
    file = io.BytesIO()
    _Pickler(file, names).dump(records)
    return file.getvalue()


def unship(data: bytes, parameters: Mapping[str, Parameter]) -> list[Optimizer]:
    """Read what :func:`ship` wrote, around this rank's own parameters."""
    optimizers = []
    for kind, plain in _Unpickler(io.BytesIO(data), parameters).load():
        optimizer = kind.__new__(kind)
        state = plain.pop("state")
        # A fresh base object brings the hook tables of this torch version, in their own form.
        Optimizer.__init__(optimizer, plain["param_groups"], plain["defaults"])
        optimizer.__dict__.update(plain)
        optimizer.state.update(state)
        optimizers.append(optimizer)
    return optimizers


class OptimizerLink:
    """One optimizer on the driver, tied to its counterparts on the workers.

    Args:
        optimizer: the driver's.
        names: names of the module's parameters by identity.
        on_step: called after each step, with what has changed in the groups since the last one
            (nothing, mostly: then ``None``).
        on_zero: called with each ``zero_grad``, with ``set_to_none``.
        on_closed: called when the closure of a step is over.
        remote_state: gives the state that the workers have, by parameter name.
        on_load: called when the optimizer has loaded a state.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: Mapping[int, str],
        on_step: Callable[[list[Hyperparameters] | None], None],
        on_zero: Callable[[bool], None],
        on_closed: Callable[[], None],
        remote_state: Callable[[], Mapping[str, dict[str, Any]]],
        on_load: Callable[[], None],
    ) -> None:
        self.optimizer = optimizer
        self._names, self._on_step, self._on_zero = names, on_step, on_zero
        self._on_closed, self._remote_state, self._on_load = on_closed, remote_state, on_load
        self._sent = self._groups()
        self._hooks = [
            optimizer.register_step_pre_hook(self._stepping),
            optimizer.register_step_post_hook(self._stepped),
            optimizer.register_state_dict_post_hook(self._complete),
            optimizer.register_load_state_dict_post_hook(lambda _: self._on_load()),
        ]
        self._windows_shut = ExitStack()
        self._zero_grad = optimizer.zero_grad
        # on the instance, since Lightning's wrapper and its loops call it from there
        optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients here and on the workers."""
        with as_they_are():
            self._zero_grad(set_to_none)
        self._on_zero(set_to_none)

    def close(self) -> None:
        """Leave the optimizer as it was."""
        self._windows_shut.close()
        for hook in self._hooks:
            hook.remove()
        self.optimizer.__dict__.pop("zero_grad", None)

    def new_groups(self) -> list[Hyperparameters] | None:
        """The groups, if groups or their parameters were added since they were last sent."""
        now = [len(group["params"]) for group in self.optimizer.param_groups]
        if now == [len(group["params"]) for group in self._sent]:
            return None
        self._sent = self._groups()
        return self._sent

    def _stepping(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> Any:
        """The step itself sees what this rank owns; the closure in it is the user's code."""
        *before, closure = arguments if len(arguments) > 1 else (*arguments, None)
        closure = keywords.get("closure", closure)
        self._windows_shut.close()  # an earlier step may have failed half-way
        self._on_closed()
        self._windows_shut.enter_context(as_they_are())
        if closure is None:
            return None

        def open_closure() -> Any:
            self._windows_shut.close()
            result = closure()  # an error in it ends the step, and nothing more is said to others
            self._on_closed()
            self._windows_shut.enter_context(as_they_are())
            return result

        if "closure" in keywords:
            return arguments, {**keywords, "closure": open_closure}
        return (*before, open_closure), keywords

    def _complete(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return complete(optimizer, state_dict, self._names, self._remote_state())

    def _stepped(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        self._windows_shut.close()
        groups = self._groups()
        changed = None if _equal(groups, self._sent) else groups
        self._sent = groups
        self._on_step(changed)

    def _groups(self) -> list[Hyperparameters]:
        """The groups as they are now, parameters by name."""
        return [
            {
                key: [self._names[id(p)] for p in value if id(p) in self._names]
                if key == "params"
                else value.clone()
                if isinstance(value, Tensor)
                else value
                for key, value in group.items()
            }
            for group in self.optimizer.param_groups
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


def state_of(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, dict[str, Any]]:
    """The state of an optimizer by parameter name, tensors on the CPU."""
    return {
        names[id(parameter)]: {
            key: value.detach().cpu() if isinstance(value, Tensor) else value
            for key, value in state.items()
        }
        for parameter, state in optimizer.state.items()
        if state
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
    state_dict["state"] = dict(sorted(state_dict["state"].items()))
    return state_dict


def _equal(left: Sequence[Hyperparameters], right: Sequence[Hyperparameters]) -> bool:
    if len(left) != len(right):
        return False
    for a, b in zip(left, right):
        if a.keys() != b.keys():
            return False
        for key, value in a.items():
            if isinstance(value, Tensor):
                if not torch.equal(value, b[key]):
                    return False
            elif value != b[key]:
                return False
    return True
