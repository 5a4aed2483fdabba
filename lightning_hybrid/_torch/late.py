"""Tensors whose numbers are made only when an operation reads them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_hybrid._torch.private_names import find
from lightning_hybrid._torch.tensors import as_they_are

if TYPE_CHECKING:

    def _wrapper(kind: type, size: Any, **options: Any) -> Any: ...
else:
    # a tensor without memory, of a subclass; torch documents it for writers of subclasses
    _wrapper = find("torch:Tensor._make_wrapper_subclass")

_map_only = find("torch.utils._pytree:tree_map_only")

_DESCRIBE = {
    "__get__",
    "size",
    "dim",
    "ndimension",
    "numel",
    "stride",
    "is_floating_point",
    "detach",
}
"""Names of functions that do not read a tensor's numbers."""


class Late(Tensor):
    """A tensor without memory, whose numbers are made for each operation that reads them.

    It may be in autograd's graph, as the output of a Function.

    Attributes:
        make: function that returns a tensor with the numbers; called for each such operation.
    """

    make: Callable[[], Tensor]

    @staticmethod
    def like(tensor: Tensor, make: Callable[[], Tensor], size: tuple[int, ...]) -> "Late":
        """Make a late tensor with the type and device of another tensor.

        Args:
            tensor: the other tensor.
            make: function that returns a tensor with the numbers; called for each operation that
                reads them.
            size: size of the late tensor, and of what ``make`` returns.
        """
        late: Late = _wrapper(Late, size, dtype=tensor.dtype, device=tensor.device)
        late.make = make
        return late

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # here, and not below, where autocast would be off for what makes the numbers
        if getattr(func, "__name__", "") not in _DESCRIBE:
            _map_only(Late, lambda late: late.make(), (args, kwargs or {}))
        with as_they_are():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Late.like(args[0], args[0].make, tuple(args[0].shape))
        args, kwargs = _map_only(Late, lambda late: late.make(), (args, kwargs or {}))
        return func(*args, **kwargs)
