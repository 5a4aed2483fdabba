"""Deferred tensors and vacant tensors, two kinds of parameters and buffers without memory here.

**Deferred** tensors serve networks that are too large for one rank. Such a tensor stays the same
object when it gets memory; its class intercepts the operations on it
(:mod:`lightning_hybrid.remote.intercepted`). Its *maker* knows how its numbers are made
(:class:`lightning_hybrid.remote.deferred_maker.DeferredMaker`).

* Reading its size, type or device costs nothing.
* Reading its numbers makes them in temporary memory. So even a whole network runs, slowly.
* A tensor that is written to, or enters autograd's graph, gets its memory and numbers for good.
* `materialize` makes the tensors of a stage; `offload` marks those that another rank owns. Reading
  one of these is an error that says where it is.

**Vacant** parameters have freed their memory while another rank trains them. Such a parameter stays
the same object, with its size and type, and has an empty storage. Nothing may compute with it: many
operations on CPUs would read at address 0. So on the driver it is a proxy, which fetches the
numbers before they are read; on workers no code of the user's runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.tensors import (
    TorchDispatchMode,
    as_they_are,
    is_held,
    is_shared,
    refuse_pointer,
    schema,
    storage_key,
    swap_memory,
    version,
)
from lightning_hybrid._trees import rebuild, tensors_in
from lightning_hybrid.errors import DeferredError
from lightning_hybrid.remote.intercepted import (
    LOOKS,
    Intercepted,
    getters,
    intercepted_in,
    ordinary,
)
from lightning_hybrid.remote.own_memory import with_memory


class Maker:
    """Base class of makers, which know how the numbers of deferred tensors are made.

    Attributes:
        active: whether a module is being built now, so that operations are recorded and not run.
        on_one_rank: whether each of its tensors belongs to the one rank that will own it.
    """

    active = on_one_rank = False

    def numbers(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Make the numbers of deferred tensors, which themselves stay as they are.

        Args:
            tensors: deferred tensors; some makers make those of other makers too.

        Returns:
            For each of them an ordinary tensor; for views of one memory they share memory.
        """
        raise NotImplementedError

    def give_memory(self, tensor: Tensor, value: Tensor) -> None:
        """Turn a deferred tensor and its views into ordinary ones, in the memory of ``value``.

        Args:
            tensor: a deferred tensor of this maker.
            value: an ordinary tensor with its numbers, as :meth:`numbers` gives it.
        """
        raise NotImplementedError

    def open(self, tensor: Tensor, name: str) -> None:
        """Turn a tensor on the meta device into a deferred one of this maker.

        Args:
            tensor: a tensor whose numbers this maker knows how to make; it stays the same object.
            name: its name in errors.
        """
        raise NotImplementedError

    def make(self, tensor: Tensor) -> None:
        """Turn a deferred tensor and its views into ordinary ones that hold their numbers.

        They stay ordinary from then on.
        """
        self.give_memory(tensor, self.numbers([tensor])[0])

    def pickled(self, tensor: Tensor) -> Any:
        """Return what ``__reduce_ex__`` is to return for a deferred tensor of this maker.

        ``None``: it is pickled as an ordinary tensor with its numbers.
        """
        return None


class GradientsElsewhere(Protocol):
    """Knows the gradients of deferred parameters, which are on the ranks that train them."""

    def has_deferred(self, name: str) -> bool:
        """Whether a deferred parameter has a gradient on its owner.

        Args:
            name: name of the parameter in the LightningModule.
        """

    def clear_deferred(self, name: str) -> None:
        """Set the gradient of a deferred parameter to None on its owner.

        Args:
            name: name of the parameter in the LightningModule.
        """


class _Deferred(Intercepted):
    """Base of the two classes of deferred tensors."""

    _maker: Maker | None
    """``None``: another rank has the tensor."""
    _full_name: str
    _where: str
    _gradients: GradientsElsewhere | None = None
    """On the driver, for a parameter that a worker trains: tells whether there is a gradient."""

    @classmethod
    def operate(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        deferred = list(intercepted_in((args, kwargs), _Deferred))
        # (while a module is built, a dispatch mode records the operation)
        if any(tensor._maker is not None and tensor._maker.active for tensor in deferred):
            with as_they_are():
                return func(*args, **kwargs)
        if func in GRADIENTS and is_offloaded(args[0]) and args[0]._gradients is not None:
            return _gradient_elsewhere(func, *args)
        if func in GRADIENTS:
            with as_they_are():
                return func(*args, **kwargs)
        if func in SEEMING:
            return SEEMING[func](torch.device("cpu"))
        if func in MOVES:
            return _moved(func, args, kwargs)
        if func in MEMORY:
            materialize(deferred)
            return func(*args, **kwargs)
        if func not in NUMBERS:
            try:
                with as_they_are(), _OnlyLooks():  # type: ignore[no-untyped-call]
                    result = func(*args, **kwargs)
            except _Computes:
                pass
            else:
                with as_they_are():
                    return _same_memory(result, deferred)
        return _compute(func, args, kwargs, deferred)

    def numbers(self) -> Tensor:
        if self._maker is None:
            raise _error_elsewhere(self)
        with as_they_are():
            return self._maker.numbers([self])[0]  # type: ignore[list-item]

    def __reduce_ex__(self, protocol: Any) -> Any:
        pickled = self._maker and self._maker.pickled(self)  # type: ignore[arg-type]
        return pickled or super().__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:
        with as_they_are():
            size = tuple(self.shape)  # type: ignore[attr-defined]
        return f"<{self._full_name or 'a tensor'} of size {size}, {self._where or 'not made yet'}>"


class DeferredTensor(_Deferred, Tensor):  # type: ignore[misc]
    """A buffer without memory on this rank, or a view of a deferred tensor."""


class DeferredParameter(_Deferred, nn.Parameter):  # type: ignore[misc]
    """A parameter without memory on this rank."""


def _gradient_elsewhere(func: Any, tensor: Any, value: Any = None) -> Any:
    """Carry out what code on the driver does to ``grad`` of a parameter that a worker trains.

    Code may look whether there is a gradient, which is then a deferred tensor, and may clear it. It
    cannot read its numbers, or set it to a tensor of its own.

    Args:
        func: the getter, setter or deleter of ``grad``.
        tensor: the parameter.
        value: the value that is set; ``None``: none, or the gradient is cleared.

    Raises:
        DeferredError: code sets an ordinary tensor.
    """
    with as_they_are():
        gradient: Any = elsewhere(tensor, f"{tensor._full_name}.grad", tensor._where)
    if func in getters("grad"):
        return gradient if tensor._gradients.has_deferred(tensor._full_name) else None
    if value is None:
        tensor._gradients.clear_deferred(tensor._full_name)
    elif not is_offloaded(value):  # (else as `Module.to` sets what it has read)
        raise _error_elsewhere(gradient)
    return None


def is_deferred(tensor: Any) -> bool:
    """Whether a tensor is a deferred one."""
    return isinstance(tensor, _Deferred)


def is_offloaded(tensor: Any) -> bool:
    """Whether a tensor is a deferred one that another rank owns."""
    return isinstance(tensor, _Deferred) and tensor._maker is None


def is_of_one_rank(tensor: Any) -> bool:
    """Whether a tensor was made in ``configure_model`` for the one rank that owns it.

    That is this rank or another one. It is True also if the tensor is an ordinary one by now.
    """
    if isinstance(tensor, _Deferred):
        return tensor._maker is None or tensor._maker.on_one_rank
    return "_was_deferred" in vars(tensor)


def count_as_whole(tensor: Tensor) -> None:
    """Have :func:`is_of_one_rank` be False for a tensor that was deferred and is ordinary now.

    It then counts as made in ``__init__``: as a tensor that all ranks know.
    """
    vars(tensor).pop("_was_deferred", None)


# ---------------------------------------------------------------- making


def materialize(tensors: Iterable[Tensor]) -> None:
    """Turn the deferred tensors among some tensors into ordinary ones that hold their numbers.

    They stay the same objects, and ordinary from then on. Other tensors are left alone.

    Raises:
        DeferredError: another rank owns one of the deferred tensors.
    """
    for tensor in tensors:
        if isinstance(tensor, _Deferred):
            if tensor._maker is None:
                raise _error_elsewhere(tensor)
            with as_they_are():
                tensor._maker.make(tensor)


@contextlib.contextmanager
def materialized_with(tensor: Any, value: Tensor) -> Iterator[None]:
    """Inside, a deferred tensor is an ordinary one in the memory of ``value``; then as before.

    Args:
        tensor: the deferred tensor; it stays the same object.
        value: an ordinary tensor of its size and type.
    """
    before = show(tensor, value)
    try:
        yield
    finally:
        restore(tensor, before)


def value_of(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor, detached: of a deferred one in new memory, else in its own.

    Raises:
        DeferredError: another rank owns the tensor.
    """
    return tensor.numbers() if isinstance(tensor, _Deferred) else tensor.detach()


def offload(tensor: Any, name: str, where: str) -> None:
    """Free a tensor's memory, and turn it into a deferred tensor that another rank owns.

    Args:
        tensor: a parameter or buffer.
        name: its name in the LightningModule.
        where: which rank owns it, in the words of errors ("on ...").
    """
    with as_they_are():
        # (on the meta device, where it keeps its size, strides and type; and not in memory that a
        # maker knows)
        swap_memory(tensor, ordinary(tensor, empty_like_on(tensor, "meta")))
        vars(tensor).pop("_lent", None)
        defer(tensor, None, name, where)


def lend(tensor: Any, name: str, where: str) -> None:
    """Turn a deferred tensor whose numbers are not made yet into one that another rank owns.

    :func:`take_back` undoes this, as long as the other rank has not changed the numbers.

    Args:
        tensor: the deferred tensor; it has a maker.
        name: its name in the LightningModule.
        where: which rank owns it, in the words of errors ("on ...").
    """
    with as_they_are():
        before = exchange_memory(tensor, ordinary(tensor, empty_like_on(tensor, "meta")))
        defer(tensor, None, name, where)
        tensor._lent = before


def is_lent(tensor: Any) -> bool:
    """Whether another rank owns a tensor now since it was given to :func:`lend`."""
    return is_offloaded(tensor) and "_lent" in vars(tensor)


def take_back(tensor: Any) -> None:
    """Undo :func:`lend`: the tensor is what it was before, and this rank can make its numbers.

    Args:
        tensor: a tensor that is lent (:func:`is_lent`).
    """
    restore(tensor, tensor._lent)


def elsewhere(tensor: Tensor, name: str, where: str) -> Tensor:
    """Make a new deferred tensor that another rank owns, of the form of a given tensor.

    Args:
        tensor: has the size, strides and type; it stays as it is.
        name: name of the new tensor in errors.
        where: which rank owns it, in the words of errors ("on ...").
    """
    twin = empty_like_on(tensor, "meta")
    defer(twin, None, name, where)
    return twin


def empty_like_on(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Make an uninitialised tensor with the size, strides and type of another one.

    Args:
        tensor: the other tensor.
        device: the device of the new one.
    """
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


_ATTRIBUTES = ("_maker", "_full_name", "_where", "_was_deferred", "_gradients", "_lent")


class FormerMemory(NamedTuple):
    """The memory, class and attributes that a tensor had before it got other memory.

    Attributes:
        memory: a tensor that holds the tensor's former memory.
        kind: the tensor's former class.
        attributes: those of its attributes by which it was a deferred tensor.
    """

    memory: Tensor
    kind: type
    attributes: dict[str, Any]


def exchange_memory(tensor: Any, other: Tensor) -> FormerMemory:
    """Swap the memory of a tensor with that of another one; it keeps its identity and class.

    It loses the attributes by which it is a deferred tensor.

    Args:
        tensor: the tensor.
        other: the other one, which gets the tensor's memory; it must not be used any more.

    Returns:
        What :func:`restore` needs to undo it.
    """
    attributes = {name: vars(tensor)[name] for name in _ATTRIBUTES if name in vars(tensor)}
    with as_they_are():
        swap_memory(tensor, other)
    clear_attributes(tensor)
    return FormerMemory(other, type(tensor), attributes)


def clear_attributes(tensor: Any) -> None:
    """Delete the attributes by which a tensor is, or was, a deferred one."""
    for name in _ATTRIBUTES:
        vars(tensor).pop(name, None)


def defer(tensor: Any, maker: Maker | None, name: str, where: str) -> None:
    """Turn a tensor on the meta device into a deferred one; it stays the same object.

    Args:
        tensor: the tensor.
        maker: knows how its numbers are made; ``None``: another rank owns it.
        name: its name in errors.
        where: where its numbers are, in the words of errors.
    """
    tensor.__class__ = DeferredParameter if isinstance(tensor, nn.Parameter) else DeferredTensor
    tensor._maker = maker
    tensor._full_name = name
    tensor._where = where


def _error_elsewhere(tensor: Any) -> DeferredError:
    """Make the error for a read of a deferred tensor that another rank owns."""
    if not tensor._where.startswith("on "):
        return DeferredError(
            f"{tensor._full_name!r} is {tensor._where}. Make the module anew, and load a "
            "checkpoint into it."
        )
    return DeferredError(
        f"{tensor._full_name!r} is {tensor._where}: a network that is made in "
        "configure_model is whole on no rank. trainer.save_checkpoint() and "
        "strategy.full_state_dict() gather all weights; a network that fits on every rank can be "
        "made in __init__, and is whole there after fit."
    )


def show(tensor: Any, value: Tensor) -> FormerMemory:
    """Turn a tensor, deferred or not, into an ordinary one in the memory of ``value``.

    It stays the same object. It counts as of one rank (:func:`is_of_one_rank`).

    Args:
        tensor: the tensor.
        value: an ordinary tensor of its size and type.

    Returns:
        What :func:`restore` needs to undo it.
    """
    before = exchange_memory(tensor, ordinary(tensor, value))
    with as_they_are():
        tensor.__class__ = nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor
        # (for `is_of_one_rank`: other ranks still lack this tensor)
        tensor._was_deferred = True
    return before


def restore(tensor: Any, before: FormerMemory) -> None:
    """Undo :func:`exchange_memory`, and :func:`show` or :func:`defer` that have followed it.

    Args:
        tensor: the tensor.
        before: what :func:`exchange_memory` or :func:`show` has returned for it.
    """
    with as_they_are():
        swap_memory(tensor, before.memory)
        tensor.__class__ = before.kind
        clear_attributes(tensor)
        vars(tensor).update(before.attributes)


# ---------------------------------------------------------------- operations on deferred tensors


class _Computes(BaseException):
    """Raised by `_OnlyLooks` if an operation reads the numbers of a tensor or writes to it."""


class _OnlyLooks(TorchDispatchMode):
    """Runs operations that only make views of deferred tensors; others raise `_Computes`."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # (a view in autograd's graph needs real memory, since its gradient belongs to the tensor)
        tracked = torch.is_grad_enabled() and schema(func).name != "aten::detach"
        with as_they_are():
            wanted = tracked and any(t.requires_grad for _, t in tensors_in((args, kwargs)))
        if not makes_views(func) or wanted:
            raise _Computes
        return func(*args, **(kwargs or {}))


def makes_views(operator: Any) -> bool:
    """Whether all that an operator returns are views of its arguments, which it does not change."""
    aliases = [returned.alias_info for returned in schema(operator).returns]
    return bool(aliases) and all(a is not None and not a.is_write for a in aliases)


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], deferred: list[Any]) -> Any:
    """Run an operation on the numbers of deferred tensors.

    The numbers are temporary, unless the operation writes to them or autograd records it: then the
    tensors become ordinary ones.

    Args:
        func: the operation.
        args: its arguments.
        kwargs: its keywords.
        deferred: the deferred tensors among them.

    Returns:
        What the operation returns.

    Raises:
        DeferredError: another rank owns one of them.
    """
    with as_they_are():
        trains = torch.is_grad_enabled() and any(t.requires_grad for t in deferred)
    if trains:  # (autograd refers to the tensors themselves)
        materialize(deferred)
        return func(*args, **kwargs)
    for tensor in deferred:
        if tensor._maker is None:
            raise _error_elsewhere(tensor)
    with as_they_are():
        values = list(deferred[0]._maker.numbers(deferred))
        versions = [version(value) for value in values]
        of = {id(tensor): value for tensor, value in zip(deferred, values)}
        back = {id(value): tensor for tensor, value in zip(deferred, values)}
        # (an operation may return one of its arguments: the deferred tensor is put in its place)
        args, kwargs = rebuild((args, kwargs), lambda v: of.get(id(v), v))
    result = func(*args, **kwargs)
    with as_they_are():
        for tensor, value, before in zip(deferred, values, versions):
            if version(value) != before and is_deferred(tensor):
                tensor._maker.give_memory(tensor, value)
    if any(id(tensor) in back for _, tensor in tensors_in(result)):
        return rebuild(result, lambda v: back.get(id(v), v))
    return result


def _moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out ``to``, ``cpu`` or ``cuda`` on a deferred tensor.

    The tensor itself is the result, since it has no memory on any device, unless its type is to
    change: then its numbers are made and converted.

    Args:
        func: the method of tensors.
        args: its arguments, the deferred tensor first.
        kwargs: its keywords.
    """
    tensor = args[0]
    with as_they_are():
        dtype = tensor.dtype
    if func is Tensor.to and torch.empty(0, dtype=dtype).to(*args[1:], **kwargs).dtype != dtype:
        return _compute(func, args, kwargs, [tensor])
    return tensor


def _same_memory(result: Any, deferred: list[Any]) -> Any:
    """Turn the tensors in a result that are views of a deferred tensor into deferred ones.

    Args:
        result: the result of an operation that makes views on the meta device.
        deferred: the deferred tensors among the arguments of the operation.

    Returns:
        The result.
    """
    for _, tensor in tensors_in(result):
        if type(tensor) is Tensor and tensor.is_meta:
            key = storage_key(tensor.untyped_storage())
            source = next(
                (t for t in deferred if storage_key(t.untyped_storage()) == key), deferred[0]
            )
            if source._maker is None:
                defer(tensor, None, source._full_name, source._where)
            else:
                source._maker.open(tensor, source._full_name)
    return result


SEEMING: Mapping[Any, Callable[[torch.device], Any]] = {
    Tensor.device.__get__: lambda device: device,
    Tensor.is_meta.__get__: lambda device: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
}
"""What reading the device of a deferred tensor gives, by the device that it seems to be on."""

NUMBERS = {
    Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.item, Tensor.data_ptr, Tensor.__format__,
    Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__,
}  # fmt: skip
"""Methods that read the memory of a tensor by no operator of torch."""

MEMORY = {Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage}
"""Methods that tell where a tensor is in memory; libraries that save tensors compare that."""

MOVES = {Tensor.to, Tensor.cpu, Tensor.cuda}

GRADIENTS = {
    *getters("grad"),
    *(getattr(Tensor.grad, name) for name in ("__set__", "__delete__")),
}

_Deferred.looks = LOOKS | {
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
}


def is_vacant(tensor: Any) -> bool:
    """Whether a tensor is vacant: :func:`vacate` has freed its memory."""
    with as_they_are():
        if is_deferred(tensor) or tensor.layout is not torch.strided or tensor.is_meta:
            return False
        return bool(tensor.numel()) and not tensor.untyped_storage().nbytes()


def vacate(tensor: Tensor, *, in_graph: bool = False) -> None:
    """Free a tensor's memory, unless another tensor shares it or autograd's graph refers to it.

    A tensor that is not contiguous keeps its memory, without which TorchDynamo cannot capture it.

    Args:
        tensor: the tensor.
        in_graph: whether to do so also where a graph refers to it. The caller knows that nobody
            runs a backward of that graph.
    """
    with torch.no_grad(), as_they_are():
        if is_deferred(tensor) or tensor.layout is not torch.strided or not tensor.is_contiguous():
            return
        if is_vacant(tensor) or is_shared(tensor) or tensor.is_inference():
            return
        if is_held(tensor) and not in_graph:
            return
        empty = torch.empty_like(tensor)
        # (by `data`, so that it stays the object that modules and optimizers refer to)
        empty.untyped_storage().resize_(0)
        refuse_pointer(empty)  # (NumPy would read at address 0)
        tensor.data = empty


def occupy(tensor: Tensor, device: torch.device | None = None) -> None:
    """Give a vacant tensor memory again, uninitialised.

    Args:
        tensor: any tensor; one that is not vacant stays as it is.
        device: where the memory is; ``None``: where it was before.
    """
    if is_vacant(tensor):
        with torch.no_grad(), as_they_are():
            contiguous = torch.contiguous_format
            empty = torch.empty_like(tensor, device="meta", memory_format=contiguous)
            tensor.data = with_memory(empty, device or tensor.device)


_LOST = "not here: its rank has failed, or could not hand it over"


def give_up(tensor: Tensor, name: str) -> None:
    """Have each read of a tensor raise an error, since the numbers of its owner will not come.

    Args:
        tensor: the tensor; its memory is freed.
        name: its name in the LightningModule.
    """
    offload(tensor, name, _LOST)


def refuse_lost(tensors: Iterable[Tensor]) -> None:
    """Refuse to begin a run with tensors whose numbers were lost in an earlier one.

    Raises:
        DeferredError: :func:`give_up` was called for a tensor, and it was not made anew since.
    """
    for tensor in tensors:
        if isinstance(tensor, _Deferred) and tensor._where == _LOST:
            raise _error_elsewhere(tensor)
