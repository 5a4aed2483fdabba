"""Tensors of a class that intercepts each operation of torch on them.

Such classes are those of proxies (:mod:`lightning_hybrid.remote.proxy`) and of deferred tensors
(:mod:`lightning_hybrid.remote.deferred`). A tensor that becomes one stays the same object in
modules and optimizers, with its shape and ``requires_grad``; only its class changes. Operations
that do not read the numbers (:data:`LOOKS`, and those that a class adds) run as on ordinary
tensors; the class handles all others. Copies and pickles are ordinary tensors.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid._trees import tensors_in


class Intercepted:
    """Base of the tensor classes that intercept operations.

    Attributes:
        looks: the operations that run as on ordinary tensors, since they do not read the numbers.
    """

    looks: ClassVar[frozenset[Any]]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in cls.looks:
            with as_they_are():
                return func(*args, **kwargs)
        return cls.operate(func, args, kwargs)

    @classmethod
    def operate(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that has a tensor of this class among its arguments.

        Operations in ``looks`` do not come here.

        Args:
            func: the operation.
            args: its arguments.
            kwargs: its keywords.

        Returns:
            What the operation returns to the user's code.
        """
        raise NotImplementedError

    def numbers(self) -> Tensor:
        """Return the values of the tensor, detached; possibly in its own memory."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.numbers().clone(memory_format=torch.preserve_format)
        memo[id(self)] = result = ordinary(self, copied)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return ordinary(self, self.numbers()).__reduce_ex__(protocol)


def ordinary(like: Any, value: Tensor) -> Tensor:
    """Return ``value`` as an ordinary parameter if ``like`` is a parameter, else as it is."""
    with as_they_are():
        return nn.Parameter(value, like.requires_grad) if isinstance(like, nn.Parameter) else value


def intercepted_in(values: Any, kind: type) -> Iterator[Any]:
    """Iterate over the tensors of a class in the nested arguments of an operation.

    Args:
        values: the arguments.
        kind: the class.
    """
    return (tensor for _, tensor in tensors_in(values) if isinstance(tensor, kind))


def getters(*names: str) -> set[Any]:
    """Return the functions by which torch reads properties of tensors.

    ``__torch_function__`` gets these when code reads such a property.

    Args:
        names: names of the properties, such as "shape".
    """
    return {getattr(Tensor, name).__get__ for name in names}


LOOKS = frozenset(
    {
        *getters("shape", "dtype", "layout", "ndim", "itemsize", "nbytes", "requires_grad"),
        *getters("is_leaf", "grad_fn", "output_nr", "_version"),
        *getters("is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn"),
        *(
            getattr(Tensor, name)
            for name in (
                "size",
                "dim",
                "ndimension",
                "numel",
                "nelement",
                "__len__",
                "stride",
                "storage_offset",
                "is_contiguous",
                "element_size",
                "is_floating_point",
                "is_complex",
                "is_signed",
                "is_same_size",
                "is_inference",
                "__hash__",
                "requires_grad_",
            )
        ),
        Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
)
"""Operations that depend neither on the numbers of a tensor nor on its device."""
