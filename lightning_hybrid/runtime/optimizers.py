"""The user's optimizers on every rank: made on the driver, shipped, stepped together.

``configure_optimizers`` runs on the driver only. Every rank gets each optimizer with *all* its
parameter groups and *all* their parameters; the ones a rank does not own never get a gradient
there and are skipped by ``step``. So groups, schedulers and the numbering in checkpoints are
those of one device.

Workers step when the driver's optimizer has stepped: before, its closure has not run the backward.
They step with the groups as the driver's step found them, and count in them for themselves.

That is right for optimizers which treat every parameter by itself. The others (which ones they are
:mod:`lightning_hybrid.runtime.optimizer_trial` finds out) step *whole*: the driver has all of
their gradients and states, and the workers get the new weights.
"""

import io
import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_hybrid.comm.protocol import Hyperparameters
from lightning_hybrid.compat import as_they_are, order_step_hooks, runs_step_hooks
from lightning_hybrid.network.deferred import is_unmade
from lightning_hybrid.runtime.optimizer_state import DriverState, placed


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
) -> bytes:
    """Write optimizers for another rank.

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
    return write_records(records, names)


def write_records(
    records: Sequence[tuple[type[Optimizer], dict[str, Any]]], names: Mapping[int, str]
) -> bytes:
    """Pickle optimizers' classes and attributes, parameters by name; see :func:`unship`."""
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
        # (without any, as where `configure_optimizers` returns None, it wants one that is empty)
        Optimizer.__init__(optimizer, plain["param_groups"] or [{"params": []}], plain["defaults"])
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
        on_change: called when the workers need the optimizer anew: it has loaded a state, or what
            groups do not show was changed by hand.
        at_hand: inside of it this rank has all parameters and gradients of the optimizer.

    Attributes:
        reason: why it cannot step in parts; empty: it can; ``None``: not known yet.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: Mapping[int, str],
        on_step: Callable[[list[Hyperparameters] | None], None],
        on_zero: Callable[[bool], None],
        on_closed: Callable[[], None],
        remote_state: Callable[[], Mapping[str, dict[str, Any]]],
        on_change: Callable[[], None],
        at_hand: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.optimizer = optimizer
        self.reason: str | None = None
        self._names, self._on_step, self._on_zero = names, on_step, on_zero
        self._on_closed, self._remote_state, self._on_change = on_closed, remote_state, on_change
        self._at_hand = at_hand
        self._sent = self._begun = groups_of(optimizer, names)
        self._state: DriverState | None = None
        self._attributes: dict[str, Any] = {}
        self._kinds: set[object] = set()
        self._depth = 0  # a step that calls its base class's step runs the hooks twice
        self._closed = False
        self._left = False  # closed, with states on the workers
        self._entered = ExitStack()
        self._hooks: list[Any] = []
        if runs_step_hooks(optimizer):
            self._hooks = [
                optimizer.register_step_pre_hook(self._stepping),
                optimizer.register_step_post_hook(self._stepped),
                optimizer.register_state_dict_post_hook(self._complete),
                optimizer.register_load_state_dict_post_hook(lambda _: self._on_change()),
                optimizer.register_state_dict_pre_hook(lambda _: self._hush()),
            ]
        self._zero_grad = optimizer.zero_grad
        # on the instance, since Lightning's wrapper and its loops call it from there
        optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]
        self._step, self._step_before = optimizer.step, vars(optimizer).get("step")
        optimizer.step = self._make_step()  # type: ignore[method-assign]

    def try_once(self, trial: Callable[[Optimizer], str]) -> bool:
        """Find out whether it steps whole, unless that is known of groups of these kinds."""
        self._kinds |= {kind_of_group(group) for group in self.optimizer.param_groups}
        if self.reason is not None:
            return False
        self.reason = trial(self.optimizer)
        if self.reason and self._state is not None:
            self._state.arrive()
        return True

    @property
    def is_back(self) -> bool:
        """Whether the states of the workers' parameters are here, or were dropped."""
        state = self._state
        here = state is None or self.optimizer.state is not state or not state.away
        return here and not self._left

    def ship_quietly(self) -> None:
        """Until :meth:`shipped`, ``optimizer.state`` is what this rank has."""
        self._hush()

    def leave(self, parameters: Iterable[Parameter]) -> None:
        """Workers have the states of these parameters."""
        for parameter in () if self.whole else parameters:
            self.optimizer.state.pop(parameter, None)

    def shipped(self) -> None:
        """The workers have it as it is now, and the states of their parameters."""
        self._entered.close()
        self._sent = groups_of(self.optimizer, self._names)
        self._attributes = _plain(self.optimizer)
        if self.is_back and not (self.whole or self._closed):
            self._state = DriverState(self.optimizer.state, self._fetch)
            self.optimizer.state = self._state

    def _fetch(self, here: dict[Parameter, dict[str, Any]]) -> dict[Parameter, dict[str, Any]]:
        """All states, in the order of the groups."""
        remote, found = self._remote_state(), {}
        for parameter in (p for group in self.optimizer.param_groups for p in group["params"]):
            state = remote.get(self._names.get(id(parameter), ""))
            if state is not None:
                with as_they_are():
                    is_here = not is_unmade(parameter)
                    found[parameter] = placed(state, parameter) if is_here else state
            elif parameter in here:
                found[parameter] = here[parameter]
        return found

    @property
    def whole(self) -> bool:
        """Whether it steps whole, on the driver."""
        return bool(self.reason)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients here and on the workers."""
        with as_they_are():
            self._zero_grad(set_to_none)
        self._on_zero(set_to_none)

    def close(self) -> None:
        """Leave the optimizer as it was."""
        self._closed = True  # a scheduler made since then calls what is on the instance now
        self._entered.close()
        if self._state is not None and not self.is_back:
            self.optimizer.state = self._state.own()
            self._left = True
        for hook in self._hooks:
            hook.remove()
        attributes = vars(self.optimizer)
        attributes.pop("zero_grad", None)
        if attributes.get("step") is self._own_step:
            del attributes["step"]
            if self._step_before is not None:
                attributes["step"] = self._step_before

    def new_groups(self) -> list[Hyperparameters] | None:
        """The groups, if groups or their parameters were added since they were last sent."""
        now = [len(group["params"]) for group in self.optimizer.param_groups]
        if now == [len(group["params"]) for group in self._sent]:
            return None
        self._sent = groups_of(self.optimizer, self._names)
        return self._sent

    def _make_step(self) -> Any:
        """The optimizer's ``step``, its computation between `_stepping` and `_stepped`.

        A method of the optimizer and with the attributes of the one before, as learning-rate
        schedulers expect it.
        """

        @wraps(self._step)
        def step(optimizer: Optimizer, *arguments: Any, **keywords: Any) -> Any:
            if self._closed:
                return self._step(*arguments, **keywords)
            self._depth = 0
            if self._hooks:
                # hooks of the user's are the user's code: they see all parameters, before the
                # step and after it
                order_step_hooks(optimizer, last=self._hooks[0], first=self._hooks[1])
                return self._step(*arguments, **keywords)
            changed = self._stepping(optimizer, (optimizer, *arguments), keywords)
            (_, *given), keywords = changed or ((optimizer, *arguments), keywords)
            result = self._step(*given, **keywords)
            self._stepped(optimizer, arguments, keywords)
            return result

        self._own_step = MethodType(step, self.optimizer)
        return self._own_step

    def _stepping(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> Any:
        """The step itself sees what this rank owns; the closure in it is the user's code."""
        self._depth += 1
        if self._depth > 1:
            return None
        *before, closure = arguments if len(arguments) > 1 else (*arguments, None)
        closure = keywords.get("closure", closure)
        self._entered.close()  # an earlier step may have failed half-way
        self._on_closed()
        if closure is None or not self.whole:
            self._enter()
        # else what comes before the closure is rarely more than its call: windows will do
        if closure is None:
            return None

        def open_closure() -> Any:
            self._entered.close()
            result = closure()  # an error in it ends the step, and nothing more is said to others
            self._on_closed()
            self._enter()
            return result

        if "closure" in keywords:
            return arguments, {**keywords, "closure": open_closure}
        return (*before, open_closure), keywords

    def _enter(self) -> None:
        """What follows is the computation of the step."""
        if not self.whole:
            self._tell_changes()
        if self.whole:
            self._entered.enter_context(self._at_hand())
            return
        self._begun = groups_of(self.optimizer, self._names)
        self._hush()
        self._entered.enter_context(as_they_are())

    def _hush(self) -> None:
        """Until what has been entered is left, ``optimizer.state`` is this rank's own."""
        if self._state is not None:
            self._entered.enter_context(self._state.quietly())

    def _tell_changes(self) -> None:
        """Before a step in parts: workers need to know what was changed here by hand."""
        if not self._kinds >= {kind_of_group(group) for group in self.optimizer.param_groups}:
            self.reason = None  # other hyper-parameters, as after a warm-up: tried again
        back = self._state is not None and self.is_back
        if self.reason is None or back or self._attributes != _plain(self.optimizer):
            self._on_change()

    def _complete(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        self._entered.close()
        if self.whole:
            return state_dict
        # what is back here is complete
        remote = {} if self._state is not None and self.is_back else self._remote_state()
        return complete(optimizer, state_dict, self._names, remote)

    def _stepped(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        self._entered.close()
        if self.whole:
            return
        changed = None if _equal(self._begun, self._sent) else self._begun
        # as workers have them after their step
        self._sent, self._attributes = groups_of(optimizer, self._names), _plain(optimizer)
        self._on_step(changed)


def kind_of_group(group: Mapping[str, Any]) -> frozenset[tuple[str, object]]:
    """Equal for hyper-parameters that differ in numbers only, but for zero and infinity."""
    return frozenset((key, _kind_of(value)) for key, value in group.items() if key != "params")


def _kind_of(value: object) -> object:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return type(value), value == 0 or value in (math.inf, -math.inf)
    if isinstance(value, list | tuple):
        return type(value), *map(_kind_of, value)
    return type(value)


def _plain(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that can be compared at once: numbers, flags, names."""
    kinds = (int, float, str, type(None))
    return {key: value for key, value in vars(optimizer).items() if isinstance(value, kinds)}


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
