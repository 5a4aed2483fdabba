"""What stands on a worker for a loader or a scheduler that its driver alone has.

Later lines of a script may ask any rank for them. What is plain data of them is here; everything
else is refused with the place where it is, since a rank that does something else than the others
would leave these waiting.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_hybrid.errors import HybridError

Plain = int | float | str | bool | None


class StandIn:
    """Knows the plain data of something that another rank has.

    Args:
        what: it stands for, as the script asks for it.
        values: plain attributes.
        length: what ``len`` gives; ``None``: it has none.
        state: what ``state_dict()`` gives; ``None``: it has none.
    """

    def __init__(
        self,
        what: str,
        values: Mapping[str, Any],
        length: int | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._what, self._values, self._length, self._state = what, values, length, state

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python asks, as to pickle it
            raise AttributeError(name)
        if name in self._values:
            return self._values[name]
        raise self._refusal(f".{name}")

    def __iter__(self) -> Iterator[Any]:
        raise self._refusal(" as an iterable")

    def __getitem__(self, key: object) -> Any:
        raise self._refusal(f"[{key!r}]")

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{self._what} has no length")
        return self._length

    def __bool__(self) -> bool:
        return self._length != 0

    def state_dict(self) -> dict[str, Any]:
        """The state that the driver's scheduler or loader had at the end of the run."""
        if self._state is None:
            raise self._refusal(".state_dict")
        return dict(self._state)

    def get_last_lr(self) -> list[float]:
        """The last learning rates of a scheduler, as the driver had them."""
        return list(self.__getattr__("_last_lr"))

    def _refusal(self, asked: str) -> HybridError:
        return HybridError(
            f"{self._what}{asked} was asked for on a rank that is no driver: drivers alone load "
            "data and step schedulers, and this one knows only their numbers "
            f"({', '.join(sorted(self._values)) or 'none'}). Ask where trainer.is_global_zero; or, "
            "what all ranks need, keep in an attribute of the module."
        )


class LoadersElsewhere:
    """In place of Lightning's combined loader.

    Args:
        iterables: the stand-ins, in the structure of the loaders.
    """

    def __init__(self, iterables: Any) -> None:
        self.iterables = iterables

    def _state_dicts(self) -> list[Any]:
        """Nothing: only drivers write checkpoints, and a worker has no loaders."""
        return []
