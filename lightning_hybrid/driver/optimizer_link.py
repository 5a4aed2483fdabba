"""An optimizer on the driver, tied to its counterparts on the workers."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from types import MethodType
from typing import Any, Protocol

from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_hybrid._torch.optimizers import has_step_hook, order_step_hooks, runs_step_hooks
from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid._trees import tensors_in
from lightning_hybrid.comm.protocol import Hyperparameters
from lightning_hybrid.driver.own_changes import OwnChanges, same
from lightning_hybrid.remote import is_deferred, is_of_one_rank, is_unread, materialize
from lightning_hybrid.state import (
    DriverState,
    OtherReplicas,
    complete,
    groups_of,
    kind_of_group,
    placed,
)


class Counterparts(Protocol):
    """The workers' optimizers; ``index`` is the number of one of them."""

    def step(self, index: int, changed: list[Hyperparameters] | None) -> None:
        """The driver's has stepped.

        Args:
            index: of the optimizer.
            changed: the groups, if they have changed since the last step.
        """

    def zero_grad(self, index: int, set_to_none: bool) -> None:
        """Clear the gradients."""

    def settle(self) -> None:
        """Gradients are about to be used: have them where they belong."""

    def state(self, index: int) -> Mapping[str, dict[str, Any]]:
        """The state that the workers have, by parameter name."""

    def ship(self) -> None:
        """The workers need it anew: it has loaded a state, or was changed by hand."""

    def at_hand(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Inside, this rank has all parameters and gradients of an optimizer."""

    def share(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Inside, this rank steps its share of what its stages have, if states are divided."""


class OptimizerLink:
    """One optimizer on the driver, tied to its counterparts on the workers.

    Args:
        optimizer: the driver's.
        names: names of the module's parameters by identity.
        index: its number among the user's optimizers.
        counterparts: are told what happens to it.
        others: which of its states are on other replicas, if they are divided.

    Attributes:
        reason: why it cannot step in parts; empty: it can; ``None``: not known yet.
        was_divided: whether replicas have begun to divide its states.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: Mapping[int, str],
        index: int,
        counterparts: Counterparts,
        others: OtherReplicas | None = None,
    ) -> None:
        self.optimizer, self._index, self._counterparts = optimizer, index, counterparts
        self._others, self._reads = others, False
        self.was_divided = False
        self.reason: str | None = None
        self._names = names
        self._sent = self._begun = groups_of(optimizer, names)
        self._state: DriverState | None = None
        self._attributes: dict[str, Any] = {}
        self._own = OwnChanges(optimizer)
        self._kinds: set[object] = set()
        self._depth = 0  # a step that calls its base class's step runs the hooks twice
        self._closed = False
        self._left = False  # closed, with states on the workers
        self._entered = ExitStack()
        # (torch's own hooks, as far as there are any: wrappers around `step` stay as they are)
        self._hooks = self._put_hooks() if runs_step_hooks(optimizer) else []
        self._zero_grad = optimizer.zero_grad
        # on the instance, since Lightning's wrapper and its loops call it from there
        optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]
        self._step, self._step_before = optimizer.step, vars(optimizer).get("step")
        optimizer.step = self._make_step()  # type: ignore[method-assign]

    def _put_hooks(self) -> list[Any]:
        optimizer = self.optimizer
        return [
            optimizer.register_step_pre_hook(self._stepping),
            optimizer.register_step_post_hook(self._stepped),
            optimizer.register_state_dict_post_hook(self._complete),
            # what was loaded is on this rank alone, and workers would step on with states of before
            optimizer.register_load_state_dict_post_hook(lambda _: self._counterparts.ship()),
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
        ]

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        if self.divided is not None:
            self.divided.refuse_alone(optimizer)
        self._silence_hooks()

    @property
    def divided(self) -> OtherReplicas | None:
        """Which states are on other replicas; of what steps whole, or is not tried yet, none."""
        return self._others if self.reason == "" else None

    def follow(self, before: "OptimizerLink") -> None:
        """What was found out of the optimizer for other stages holds for these.

        Args:
            before: its link to the workers that had those.
        """
        self.reason, self._kinds = before.reason, before._kinds

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

    def gather_state(self) -> None:
        """Have the states of all parameters here."""
        if self._state is not None and not self.is_back:
            self._state.arrive()

    def bring_state(self) -> None:
        """Once closed: have the states of all parameters here, beside these if they are here."""
        optimizer = self.optimizer
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        if self.whole:
            return
        if not any(map(is_of_one_rank, parameters)):
            states: defaultdict[Any, Any] = defaultdict(dict, self._fetch(optimizer.state))
            optimizer.state = states
        if self._others is not None:
            left = DriverState(optimizer.state, dict, self._others)
            left.away, self._others.over = False, True
            optimizer.state = left
            optimizer.register_state_dict_pre_hook(self._others.refuse_alone)
            optimizer.register_step_pre_hook(self._others.refuse_step)

    def states_here(self) -> dict[str, dict[str, Any]]:
        """The states that this rank has, by name of the parameter."""
        state = self.optimizer.state
        own = state.own() if isinstance(state, DriverState) else state
        return {self._names.get(id(p), ""): state for p, state in own.items() if state}

    def ship_quietly(self) -> None:
        """Put the optimizer into the state that workers need, until :meth:`shipped`.

        ``optimizer.state`` is what this rank has, and in a step nothing has counted yet.
        """
        self._silence_hooks()
        self._entered.enter_context(self._own.undone())

    def leave(self, parameters: Iterable[Parameter]) -> None:
        """Drop the states of these parameters here: workers have them."""
        for parameter in () if self.whole else parameters:
            self.optimizer.state.pop(parameter, None)

    def shipped(self) -> None:
        """The workers have it as it is now, and the states of their parameters."""
        self._reads = self.was_divided = self.divided is not None
        if not self._reads:
            self._read_states()
        self._entered.close()
        with self._own.undone():
            self._sent = groups_of(self.optimizer, self._names)
            self._attributes = _plain(self.optimizer)
        if self.is_back and not (self.whole or self._closed):
            self._state = DriverState(self.optimizer.state, self._fetch, self._others)
            self.optimizer.state = self._state

    def _read_states(self) -> None:
        """Have memory for the states here that a loaded checkpoint has left in its file."""
        materialize(t for _, t in tensors_in(self.optimizer.state) if is_unread(t))

    def _fetch(self, here: Mapping[Any, dict[str, Any]]) -> dict[Parameter, dict[str, Any]]:
        """All states, in the order of the groups."""
        remote, found = self._counterparts.state(self._index), {}
        for parameter in (p for group in self.optimizer.param_groups for p in group["params"]):
            state = remote.get(self._names.get(id(parameter), ""))
            if state is not None:
                with as_they_are():
                    is_here = not is_deferred(parameter)
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
        self._counterparts.zero_grad(self._index, set_to_none)

    def close(self) -> None:
        """Leave the optimizer as it was."""
        if self._closed:  # it may have the states of all ranks since then
            return
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
        with self._own.undone():
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
                if not has_step_hook(optimizer, self._hooks[0]):  # `optimizer.__init__` was called
                    self._hooks = self._put_hooks()
                    self._counterparts.ship()
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
        # the base class of the optimizer runs the same hooks once more
        if self._depth > 1:
            return None
        *before, closure = arguments if len(arguments) > 1 else (*arguments, None)
        closure = keywords.get("closure", closure)
        self._entered.close()  # an earlier step may have failed half-way
        self._own.end()
        self._counterparts.settle()
        if closure is None or not self.whole:
            self._enter()
        # else what comes before the closure is rarely more than its call: proxies will do
        if closure is None:
            return None
        self._own.begin()

        def open_closure() -> Any:
            self._entered.close()
            self._own.closure_called()
            result = closure()  # an error in it ends the step, and nothing more is said to others
            self._counterparts.settle()
            self._enter()
            return result

        if "closure" in keywords:
            return arguments, {**keywords, "closure": open_closure}
        return (*before, open_closure), keywords

    def _enter(self) -> None:
        """What follows is the computation of the step."""
        if not self.whole:
            self._own.check()
            self._tell_changes()
        if self._state is None:
            self._read_states()
        if self.whole:
            self._entered.enter_context(self._counterparts.at_hand(self.optimizer))
            return
        with self._own.undone():
            self._begun = groups_of(self.optimizer, self._names)
        self._silence_hooks()
        # parameters of other ranks have no gradient here as they are, so this step passes over them
        self._entered.enter_context(as_they_are())
        self._entered.enter_context(self._counterparts.share(self.optimizer))
        if self._reads:  # of a loaded checkpoint, what is left is the share of this rank
            self._read_states()
            self._reads = False

    def _silence_hooks(self) -> None:
        """Until what has been entered is left, ``optimizer.state`` is this rank's own."""
        if self._state is not None:
            self._entered.enter_context(self._state.quietly())

    def _tell_changes(self) -> None:
        """Before a step in parts: workers need to know what was changed here by hand."""
        if not self._kinds >= {kind_of_group(group) for group in self.optimizer.param_groups}:
            self.reason = None  # other hyper-parameters, as after a warm-up: tried again
        back = self._state is not None and self.is_back
        with self._own.undone():
            attributes = _plain(self.optimizer)
        if self.reason is None or back or self._attributes != attributes:
            self._counterparts.ship()

    def _complete(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        self._entered.close()
        if self.whole:
            return state_dict
        # what is back here is complete
        here = self._state is not None and self.is_back
        remote = {} if here else self._counterparts.state(self._index)
        return complete(optimizer, state_dict, self._names, remote)

    def _stepped(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        self._entered.close()
        self._own.end()
        if self.whole:
            return
        changed = None if same(self._begun, self._sent) else self._begun
        # as workers have them after their step
        self._sent, self._attributes = groups_of(optimizer, self._names), _plain(optimizer)
        self._counterparts.step(self._index, changed)


def _plain(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that can be compared at once: numbers, flags, names."""
    kinds = (int, float, str, type(None))
    return {key: value for key, value in vars(optimizer).items() if isinstance(value, kinds)}
