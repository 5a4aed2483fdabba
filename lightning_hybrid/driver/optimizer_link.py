"""Has the workers' copies of an optimizer do what the user's code does with it on the driver."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_hybrid._torch.optimizers import has_step_hook, order_step_hooks, runs_step_hooks
from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid._trees import tensors_in
from lightning_hybrid.driver.optimizer_kinds import why_steps_whole
from lightning_hybrid.errors import HybridError
from lightning_hybrid.remote import is_deferred, is_unread, materialize
from lightning_hybrid.state import (
    FetchedStates,
    NamedGroups,
    OtherReplicas,
    complete,
    groups_of,
    placed,
    plain_attributes,
    same,
)

if TYPE_CHECKING:
    from lightning_hybrid.driver.driven_optimizers import DrivenOptimizers


class OptimizerLink:
    """Has the workers step, clear gradients and load states when an optimizer here does.

    Args:
        optimizer: the driver's optimizer.
        names: by ``id``, the names of the module's parameters.
        index: number of the optimizer among the user's.
        counterparts: tells the workers what their copies of the optimizer are to do.
        others: which of its states are on other replicas; ``None``: replicas do not divide them.

    Attributes:
        optimizer: see above.
        reason: why it does not step in parts, each rank its own parameters; empty: it does.
        sent: whether workers have the optimizer, or are about to get it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: Mapping[int, str],
        index: int,
        counterparts: "DrivenOptimizers",
        others: OtherReplicas | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._index = index
        self._counterparts = counterparts
        self._others = others
        self.reason = why_steps_whole(optimizer)
        self.sent = False
        self._names = names
        self._named = NamedGroups(names)
        self._note_sent()
        self._begun = self._sent
        self._state: FetchedStates | None = None
        self._own_step: MethodType | None = None
        self._attributes: dict[str, Any] = {}
        self._depth = 0  # a step that calls its base class's step runs the hooks twice
        self._closed = False
        self._left = False  # whether it was closed while workers had states
        self._entered = ExitStack()
        # (torch's own hooks where its `step` runs them, so that wrappers of `step` stay in place)
        self._hooks = self._put_hooks() if runs_step_hooks(optimizer) else []
        self._zero_grad = optimizer.zero_grad
        self._zero_grad_before = vars(optimizer).get("zero_grad")
        # (set on the instance: Lightning's wrapper and loops call the instance's)
        optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]
        self._step = optimizer.step
        self._step_before = vars(optimizer).get("step")
        optimizer.step = self._make_step()  # type: ignore[method-assign]

    def _put_hooks(self) -> list[Any]:
        optimizer = self.optimizer
        return [
            optimizer.register_step_pre_hook(self._stepping),
            optimizer.register_step_post_hook(self._stepped),
            optimizer.register_state_dict_post_hook(self._complete),
            # a state is loaded on this rank alone, and workers still have the states of before
            optimizer.register_load_state_dict_post_hook(lambda _: self._counterparts.ship()),
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
        ]

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        if self.divided is not None:
            self.divided.refuse_alone(optimizer)
        self.silence_state()

    @property
    def divided(self) -> OtherReplicas | None:
        """Tells which states of the optimizer other replicas have.

        ``None``: they have none, it steps as a whole, or it was not sent to the workers yet.
        """
        return self._others if self.sent and not self.whole else None

    @property
    def is_back(self) -> bool:
        """Whether no state has to be fetched from workers.

        That is so if all states are on this rank, or if code here has replaced ``optimizer.state``.
        """
        state = self._state
        here = state is None or self.optimizer.state is not state or not state.away
        return here and not self._left

    def gather_state(self) -> None:
        """Fetch the states of the workers' parameters into ``optimizer.state``, if not here yet.

        To be called before :meth:`close`; after it see :meth:`bring_state`.
        """
        if self._state is not None and not self.is_back:
            self._state.arrive()

    def bring_state(self) -> None:
        """After :meth:`close`: fetch the workers' states, and put all states into the optimizer.

        If replicas divide the states, the optimizer refuses to step or to make a state dict by
        itself from then on.
        """
        optimizer = self.optimizer
        if self.whole or not self.sent:  # (an evaluation has left them as they were)
            return
        states: defaultdict[Any, Any] = defaultdict(dict, self._fetch(optimizer.state))
        optimizer.state = states
        if self._others is not None:
            left = FetchedStates(optimizer.state, dict, self._others)
            left.away = False
            self._others.over = True
            optimizer.state = left
            optimizer.register_state_dict_pre_hook(self._others.refuse_alone)
            optimizer.register_step_pre_hook(self._others.refuse_step)

    def states_here(self) -> dict[str, dict[str, Any]]:
        """The states that this rank has: by name of the parameter, its state by key."""
        state = self.optimizer.state
        own = state.own() if isinstance(state, FetchedStates) else state
        return {self._names.get(id(p), ""): state for p, state in own.items() if state}

    def drop_states(self, parameters: Iterable[Parameter]) -> None:
        """Drop the states of these parameters on this rank, since workers have got them.

        Nothing is dropped if the optimizer steps as a whole.
        """
        for parameter in () if self.whole else parameters:
            self.optimizer.state.pop(parameter, None)

    def shipped(self) -> None:
        """Register that the workers have the optimizer as it is now, with its states.

        States here that are still unread in a file are read. If the optimizer steps in parts, the
        next read of ``optimizer.state`` fetches the workers' states.
        """
        self._read_states()
        self._entered.close()
        self._note_sent()
        self._attributes = plain_attributes(self.optimizer)
        if self.is_back and not (self.whole or self._closed):
            self._state = FetchedStates(self.optimizer.state, self._fetch, self._others)
            self.optimizer.state = self._state

    def _read_states(self) -> None:
        """Read the states that are still unread in the file of a loaded checkpoint."""
        materialize(t for _, t in tensors_in(self.optimizer.state) if is_unread(t))

    def _fetch(self, here: Mapping[Any, dict[str, Any]]) -> dict[Parameter, dict[str, Any]]:
        """Fetch the states of the workers' parameters, and join them with those of this rank.

        Args:
            here: by parameter, the states that this rank has.

        Returns:
            By parameter, the states of all ranks, in the order of the parameters in the groups.
        """
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
        """Whether the driver steps all parameters, instead of each rank its own."""
        return bool(self.reason)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients here and on the workers; it replaces ``optimizer.zero_grad``."""
        with as_they_are():
            self._zero_grad(set_to_none)
        if not self._closed:
            self._counterparts.zero_grad(self._index, set_to_none)

    def close(self) -> None:
        """Take the hooks and replaced methods off the optimizer.

        Its state is then what this rank has; :meth:`bring_state` adds that of the workers.
        """
        if self._closed:  # (a second time could drop the states that `bring_state` has added)
            return
        self._closed = True  # (for `step`, which a scheduler may still refer to)
        self._entered.close()
        if self._state is not None and not self.is_back:
            self.optimizer.state = self._state.own()
            self._left = True
        for hook in self._hooks:
            hook.remove()
        attributes = vars(self.optimizer)
        attributes.pop("zero_grad", None)
        if self._zero_grad_before is not None:
            attributes["zero_grad"] = self._zero_grad_before
        if attributes.get("step") is self._own_step:
            del attributes["step"]
            if self._step_before is not None:
                attributes["step"] = self._step_before

    def forget(self) -> None:
        """Drop what would keep the optimizer alive. Called after the run, after :meth:`close`."""
        self._state = None
        self._own_step = None

    def _sizes(self) -> list[int]:
        """For each group of the optimizer its number of parameters."""
        return [len(group["params"]) for group in self.optimizer.param_groups]

    def _note_sent(self) -> None:
        """Note that the workers have the options and parameters of all groups as they are now."""
        self._sent, self._sent_sizes = groups_of(self.optimizer, self._named), self._sizes()

    @property
    def has_new_groups(self) -> bool:
        """Whether groups or parameters were added since they were sent to the workers."""
        return self._sizes() != self._sent_sizes

    def _make_step(self) -> Any:
        """Make the ``step`` that replaces the optimizer's own, which it calls.

        Before and after that :meth:`_stepping` and :meth:`_stepped` run, by hooks if torch runs
        them. Once this link is closed, it calls the optimizer's own alone.

        It is a method of the optimizer with the attributes of the original, as learning-rate
        schedulers expect it.
        """

        @wraps(self._step)
        def step(optimizer: Optimizer, *arguments: Any, **keywords: Any) -> Any:
            if self._closed:
                return self._step(*arguments, **keywords)
            self._depth = 0
            if self._hooks:
                # the user's hooks run outside of ours, so that they see the parameters of all ranks
                # (calling `optimizer.__init__` again removes all hooks)
                if not has_step_hook(optimizer, self._hooks[0]):
                    self._hooks = self._put_hooks()
                    self._counterparts.ship()
                order_step_hooks(optimizer, last=self._hooks[0], first=self._hooks[1])
                return self._step(*arguments, **keywords)
            changed = self._stepping(optimizer, (optimizer, *arguments), keywords)
            (_, *given), keywords = changed or ((optimizer, *arguments), keywords)
            result = self._step(*given, **keywords)
            self._stepped(optimizer, arguments, keywords)
            return result

        own = self._own_step = MethodType(step, self.optimizer)
        return own

    def _stepping(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> Any:
        """Before a step: restrict the optimizer to what this rank owns (a step pre-hook of torch).

        While the closure runs, which the step calls, the restriction is lifted. An optimizer that
        steps as a whole is not restricted: its parameters are fetched.

        Args:
            optimizer: the optimizer.
            arguments: the arguments of the step, with the optimizer or without.
            keywords: the keywords of the step.

        Returns:
            The arguments and keywords of the step with a wrapped closure; ``None``: as they are.

        Raises:
            HybridError: in the wrapped closure: the step has changed options of groups before it.
        """
        self._depth += 1
        # (a step that calls its base class's step runs the hooks once more)
        if self._depth > 1:
            return None
        *before, closure = arguments if len(arguments) > 1 else (*arguments, None)
        closure = keywords.get("closure", closure)
        self._entered.close()  # an earlier step may have failed half-way
        self._counterparts.bring_gradients_to_owners()
        if closure is None or not self.whole:
            self._enter()
        # (else parameters are fetched after the closure; if the step reads them before, as proxies)
        if closure is None:
            return None

        def open_closure() -> Any:
            self._entered.close()
            if not (self.whole or same(self._begun, groups_of(optimizer, self._named))):
                raise HybridError(  # (a worker's step would change them once more)
                    f"{type(optimizer).__name__}.step has set options of its param_groups before "
                    "it called its closure. Set them behind the closure, or by a scheduler, or do "
                    "not declare it by register_optimizer: then it steps on the driver."
                )
            result = closure()  # (after an error in it the workers do not step)
            self._counterparts.bring_gradients_to_owners()
            self._enter()
            return result

        if "closure" in keywords:
            return arguments, {**keywords, "closure": open_closure}
        return (*before, open_closure), keywords

    def _enter(self) -> None:
        """Prepare the computation of the step; closing ``_entered`` undoes it.

        If it steps in parts, the workers get the optimizer if it has changed, and then it sees this
        rank's parameters and states alone. As a whole, it has all parameters and gradients here.
        """
        if not self.whole:
            self._tell_changes()
        if self._state is None:
            self._read_states()
        if self.whole:
            self._entered.enter_context(self._counterparts.at_hand(self.optimizer))
            return
        self._begun = groups_of(self.optimizer, self._named)
        self.silence_state()
        # other ranks' parameters, if not seen as proxies, have no gradient, so the step skips them
        self._entered.enter_context(as_they_are())
        self._entered.enter_context(self._counterparts.share(self.optimizer))

    def silence_state(self) -> None:
        """Have reads of ``optimizer.state`` fetch nothing from workers from here on.

        That ends with the next step or state dict, or with :meth:`shipped` or :meth:`close`.
        """
        if self._state is not None:
            self._entered.enter_context(self._state.quietly())

    def _tell_changes(self) -> None:
        """Before a step: send the optimizer to the workers, unless they have it as it is now.

        They do not if it was never sent, all states are here (as ``optimizer.state`` was read), or
        its groups or attributes were changed by hand.
        """
        back = self._state is not None and self.is_back
        changed = self._attributes != plain_attributes(self.optimizer)
        if not self.sent or back or changed or self.has_new_groups:
            self._counterparts.ship()

    def _complete(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Add the workers' states to a state dict (a post-hook of `Optimizer.state_dict`).

        Args:
            optimizer: the optimizer.
            state_dict: what it has made from the states on this rank.

        Returns:
            The state dict that one device would have.
        """
        self._entered.close()
        if self.whole:
            return state_dict
        # (if all states are here, the state dict has them already)
        remote = {} if self.is_back else self._counterparts.state(self._index)
        return complete(optimizer, state_dict, self._names, remote)

    def _stepped(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        """After a step: have the workers step, unless the optimizer steps as a whole.

        It has the form of a step post-hook of torch.
        """
        self._depth -= 1
        if self._depth > 0:
            return
        self._entered.close()
        if self.whole:
            return
        changed = None if same(self._begun, self._sent) else self._begun
        # (the workers' step will change these as the driver's has)
        self._note_sent()
        self._attributes = plain_attributes(optimizer)
        self._counterparts.step(self._index, changed)
