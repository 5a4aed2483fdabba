"""Tensor objects whose class is asked before each operation of torch.

What lives on another rank (:mod:`lightning_hybrid.remote.proxy`) and what has no memory yet
(:mod:`lightning_hybrid.remote.deferred`) stays the same object in modules and optimizers, with its
shape and ``requires_grad``; only its class changes. Operations that do not look at the numbers
(:data:`LOOKS`, and those that a class adds) run as they are; a class handles all others. Copies and
pickles are ordinary tensors.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid._trees import tensors_in


class Intercepted:
    """Base of the classes that intercept the operations on their tensors.

    Attributes:
        looks: operations that run as on ordinary tensors.
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
        """Run an operation that has a tensor of this class among its arguments."""
        raise NotImplementedError

    def numbers(self) -> Tensor:
        """What the tensor holds, without gradient; it may share memory with it."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.numbers().clone(memory_format=torch.preserve_format)
        memo[id(self)] = result = ordinary(self, copied)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return ordinary(self, self.numbers()).__reduce_ex__(protocol)


def ordinary(like: Any, value: Tensor) -> Tensor:
    """``value`` as an ordinary parameter or tensor, whichever ``like`` is."""
    with as_they_are():
        return nn.Parameter(value, like.requires_grad) if isinstance(like, nn.Parameter) else value


def intercepted_in(values: Any, kind: type) -> Iterator[Any]:
    """The tensors of a class in nested arguments."""
    return (tensor for _, tensor in tensors_in(values) if isinstance(tensor, kind))


def getters(*names: str) -> set[Any]:
    """How torch names the reading of these properties of tensors."""
    return {getattr(Tensor, name).__get__ for name in names}


LOOKS = frozenset(
    {
        *getters("shape", "dtype", "layout", "ndim", "itemsize", "nbytes", "requires_grad"),
        *getters("is_leaf", "grad_fn", "output_nr", "_version"),
        *getters("is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn"),
        *(
            getattr(Tensor, name)
            for name in (
                *("size", "dim", "ndimension", "numel", "nelement", "__len__", "stride"),
                *("storage_offset", "is_contiguous", "element_size", "is_floating_point"),
                *("is_complex", "is_signed", "is_same_size", "is_inference", "__hash__"),
                "requires_grad_",
            )
        ),
        Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
)
"""Operations that have nothing to do with the numbers, nor with where they are."""
