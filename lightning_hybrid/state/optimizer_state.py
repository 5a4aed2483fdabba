"""``optimizer.state`` on the driver, for an optimizer whose states are on several ranks.

Users log the states of an optimizer, halve its momentum, clear all of it; schedule-free optimizers
swap weights with them. So the first access to the mapping (outside of steps and state dicts)
fetches the states of the workers; before the next step they are sent back.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_hybrid.errors import HybridError
from lightning_hybrid.remote import is_unread
from lightning_hybrid.state.divided_optimizer_states import OtherReplicas

StatesByParameter = dict[Parameter, dict[str, Any]]


class FetchedStates(defaultdict[Any, Any]):
    """The states of an optimizer by parameter; those of other ranks are fetched when accessed.

    Args:
        here: the states that this rank has.
        fetch: called with the states that this rank has; returns those of all ranks of the replica.
        others: tells which states other replicas have; ``None``: replicas do not divide them.

    Attributes:
        away: whether other ranks have states that were not fetched yet.
        others: see above.
    """

    def __init__(
        self,
        here: Mapping[Any, Any],
        fetch: Callable[[StatesByParameter], StatesByParameter],
        others: OtherReplicas | None = None,
    ) -> None:
        super().__init__(dict, here)
        self._fetch = fetch
        self._quiet = False
        self.away = True
        self.others = others

    def __missing__(self, key: Any) -> Any:
        if self.others is not None and not self._quiet:
            self.others.refuse(key)
        return super().__missing__(key)

    def arrive(self) -> None:
        """Fetch the states that the workers have, if that was not done yet.

        Inside of :meth:`quietly` nothing is fetched.
        """
        # the package's own code accesses the states in each step, and must not fetch any
        if self.away and not self._quiet:
            found = self._fetch(self.own())
            self.away = False
            super().clear()
            super().update(found)

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Inside, an access to the states fetches nothing from the workers."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def own(self) -> defaultdict[Any, Any]:
        """Return the states that this rank has, as an ordinary mapping; nothing is fetched."""
        with self.quietly():
            return defaultdict(dict, self)

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())


def _arriving(name: str) -> Callable[..., Any]:
    """Make the method of :class:`FetchedStates` that fetches all states before it does its work.

    Args:
        name: name of the method of `defaultdict` that does the work.
    """
    method = getattr(defaultdict, name)

    def arrives_first(self: FetchedStates, *arguments: Any, **keywords: Any) -> Any:
        self.arrive()
        return method(self, *arguments, **keywords)

    return arrives_first


# every method by itself, since the C code of a dict does not call overridden ones
for _name in (
    "__getitem__",
    "__setitem__",
    "__delitem__",
    "__contains__",
    "__iter__",
    "__len__",
    "__eq__",
    "__repr__",
    "__or__",
    "__ior__",
    "__reversed__",
    "__copy__",
    "copy",
    "get",
    "setdefault",
    "pop",
    "popitem",
    "clear",
    "update",
    "keys",
    "values",
    "items",
):
    setattr(FetchedStates, _name, _arriving(_name))


def placed(state: Mapping[str, Any], parameter: Parameter) -> dict[str, Any]:
    """Put the state of a parameter where optimizers keep it.

    Args:
        state: the state, by key.
        parameter: the parameter.

    Returns:
        The state with its tensors on the parameter's device. Tensors without dimensions (step
        counts) and unread ones stay where they are; all do if the parameter is on the meta device.
    """
    return {
        key: value.to(parameter.device)
        if isinstance(value, Tensor) and value.dim() and not (parameter.is_meta or is_unread(value))
        else value
        for key, value in state.items()
    }


def were_divided(optimizers: Iterable[Optimizer], *, trains: bool) -> bool:
    """Whether some optimizers are of an earlier run that has left each replica a part of states.

    Args:
        optimizers: what ``configure_optimizers`` has returned.
        trains: whether this run trains.

    Raises:
        HybridError: the run trains, and has such an optimizer.
    """
    states = ((optimizer, getattr(optimizer.state, "others", None)) for optimizer in optimizers)
    divided = [optimizer for optimizer, others in states if others is not None and others.over]
    if divided and trains:
        raise HybridError(
            f"configure_optimizers has returned the {type(divided[0]).__name__} of an earlier "
            "run, and shard_states=True has left each replica a part of its states. "
            "Make a new one, and give trainer.fit(ckpt_path=...) to go on with its states."
        )
    return bool(divided)
