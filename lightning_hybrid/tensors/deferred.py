"""Networks that are whole on no rank: weights have no memory until a rank makes its own.

Inside `Deferral.building` every new tensor is on the meta device and a `Tape` takes down what is
done to it; random generators go on as on one device (the numbers are drawn into scratch memory and
dropped). Afterwards the module's parameters and buffers are *unmade*: the objects that they will
stay, of a class that hears of every operation on them.

* Looking (size, type, device) costs nothing.
* Reading plays the tape into temporary memory. So even a whole network runs, slowly.
* What is written to, and what enters a graph, is made for good.
* `make` makes the tensors of a stage; `put_away` marks those that another rank has. Reading one of
  these is an error that says where it is.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_hybrid._torch import (
    TorchDispatchMode,
    as_they_are,
    schema,
    storage_key,
    swap_memory,
    version,
)
from lightning_hybrid._trees import rebuild, tensors_in
from lightning_hybrid.errors import DeferredError
from lightning_hybrid.tensors.tape import Tape, View, memory_for


class _Unmade:
    """What both classes of unmade tensors have in common."""

    _deferral: Deferral | None
    _full_name: str
    _where: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _operate(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = copy = _ordinary(self, _numbers(self).clone())
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _ordinary(self, _numbers(self)).__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:
        with as_they_are():
            size = tuple(self.shape)  # type: ignore[attr-defined]
        return f"<{self._full_name or 'a tensor'} of size {size}, {self._where or 'not made yet'}>"


class UnmadeTensor(_Unmade, Tensor):  # type: ignore[misc]
    """A buffer, or memory shared with one or with a parameter."""


class UnmadeParameter(_Unmade, nn.Parameter):  # type: ignore[misc]
    """A parameter."""


def is_unmade(tensor: Any) -> bool:
    """Whether a tensor has no memory on this rank."""
    return isinstance(tensor, _Unmade)


def is_away(tensor: Any) -> bool:
    """Whether another rank has made a tensor, and this one has not."""
    return isinstance(tensor, _Unmade) and tensor._deferral is None


def is_deferred(tensor: Any) -> bool:
    """Whether a tensor was made in ``configure_model`` for one rank alone, here or elsewhere."""
    return isinstance(tensor, _Unmade) or "_was_deferred" in vars(tensor)


def has_loaded(tensor: Any) -> bool:
    """Whether a tensor has been loaded from a checkpoint and waits for the rank that owns it."""
    deferral: Deferral | None = getattr(tensor, "_deferral", None)
    if deferral is None:
        return False
    with as_they_are():
        return deferral.tape.is_marked(tensor)


# ---------------------------------------------------------------- making


def make(tensors: Iterable[Tensor]) -> None:
    """Give tensors their memory and numbers, for good; made ones stay as they are.

    Raises:
        DeferredError: another rank has one.
    """
    for tensor in tensors:
        if isinstance(tensor, _Unmade):
            if tensor._deferral is None:
                raise _elsewhere(tensor)
            with as_they_are():
                tensor._deferral.make(tensor)


@contextlib.contextmanager
def made(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Inside, tensors have their memory and numbers; changes of them are lost."""
    with contextlib.ExitStack() as stack:
        for tensor in tensors:
            if isinstance(tensor, _Unmade):
                stack.enter_context(lent(tensor, _numbers(tensor)))
        yield


@contextlib.contextmanager
def lent(tensor: Any, value: Tensor) -> Iterator[None]:
    """Inside, an unmade tensor has the memory of ``value``."""
    kind, attributes = type(tensor), {k: vars(tensor)[k] for k in _ATTRIBUTES}
    other = _show(tensor, value)
    try:
        yield
    finally:
        with as_they_are():
            swap_memory(tensor, other)
            tensor.__class__ = kind
            vars(tensor).update(attributes)
            vars(tensor).pop("_was_deferred", None)


class Hollow:
    """Shows tensors that have no memory here, or wait elsewhere, as TorchDynamo can look at them.

    Inside, each such tensor is an ordinary one on ``device``, with its size and an empty storage:
    enough to capture a network, and an error for whoever computes with it. It stays the same
    object, and looks the same each time.

    Args:
        module: whose parameters and buffers they are.
        device: where the network runs.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self._kept: dict[int, tuple[Any, Tensor]] = {}
        self._shown: list[tuple[Any, type, dict[str, Any], Tensor]] = []
        self._needed = True

    def __enter__(self) -> None:
        if not self._needed:
            return
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            with as_they_are():
                waits = isinstance(tensor, _Unmade) or tensor.device != self._device
            if waits:
                before = {name: vars(tensor)[name] for name in _ATTRIBUTES if name in vars(tensor)}
                kind = type(tensor)
                self._shown.append((tensor, kind, before, _show(tensor, self._empty(tensor))))
        # what has its memory here keeps it
        self._needed = bool(self._shown)

    def __exit__(self, *_: object) -> None:
        while self._shown:
            tensor, kind, before, other = self._shown.pop()
            with as_they_are():
                swap_memory(tensor, other)
                tensor.__class__ = kind
                vars(tensor).update(before)
                if before:
                    vars(tensor).pop("_was_deferred", None)

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Inside, they are what they were."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def _empty(self, tensor: Tensor) -> Tensor:
        known = self._kept.get(id(tensor))
        if known is None or known[0] is not tensor:
            with as_they_are():
                empty = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device
                )
            if empty.is_contiguous():  # others cannot be captured without memory
                empty.untyped_storage().resize_(0)
            known = self._kept[id(tensor)] = tensor, empty
        return known[1]


def claim(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Give tensors their memory here, whoever had them before.

    Returns:
        Those whose numbers are on another rank and must still come.
    """
    missing = []
    for tensor in tensors:
        if is_away(tensor):
            missing.append(tensor)
            with as_they_are():
                empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            _show(tensor, empty)
        else:
            make([tensor])
    return missing


def value_of(tensor: Tensor) -> Tensor:
    """The numbers of a tensor: its own, or those that it would have, in memory of their own."""
    return _numbers(tensor) if isinstance(tensor, _Unmade) else tensor.detach()


def put_away(tensor: Any, name: str, where: str) -> None:
    """Free a tensor's memory: another rank owns it from here on.

    Args:
        tensor: a parameter or buffer.
        name: in the LightningModule.
        where: says which rank has it.
    """
    with as_they_are():
        if not isinstance(tensor, _Unmade):
            twin: Any = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
            )
            is_parameter = isinstance(tensor, nn.Parameter)
            if is_parameter:
                twin = nn.Parameter(twin, tensor.requires_grad)
            swap_memory(tensor, twin)
        _mark(tensor, None, name, where)


_ATTRIBUTES = ("_deferral", "_full_name", "_where")


def _mark(tensor: Any, deferral: Deferral | None, name: str, where: str) -> None:
    """Make an unmade tensor of one that has no memory; it stays the same object."""
    tensor.__class__ = UnmadeParameter if isinstance(tensor, nn.Parameter) else UnmadeTensor
    tensor._deferral, tensor._full_name, tensor._where = deferral, name, where


def _numbers(tensor: Any) -> Tensor:
    if tensor._deferral is None:
        raise _elsewhere(tensor)
    with as_they_are():
        numbers: Tensor = tensor._deferral.numbers([tensor])[0]
        return numbers


def _elsewhere(tensor: Any) -> DeferredError:
    return DeferredError(
        f"{tensor._full_name!r} is {tensor._where}: a network that is made in configure_model is "
        "whole on no rank. trainer.save_checkpoint() and strategy.full_state_dict() gather all "
        "weights; a network that fits on every rank can be made in __init__, and is whole there "
        "after fit."
    )


def _ordinary(tensor: Any, value: Tensor) -> Tensor:
    with as_they_are():
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(value, tensor.requires_grad)
        return value


def _show(tensor: Any, value: Tensor) -> Tensor:
    """Make an ordinary tensor of an unmade one, with this memory. Returns what it was."""
    with as_they_are():
        other = _ordinary(tensor, value)
        kind = nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor
        swap_memory(tensor, other)
        tensor.__class__ = kind
        for name in _ATTRIBUTES:
            vars(tensor).pop(name, None)
        tensor._was_deferred = True
        return other


# ---------------------------------------------------------------- building


class Deferral:
    """What is known of the unmade tensors of one LightningModule.

    Args:
        device: where one device would make the numbers.
    """

    def __init__(self, device: torch.device) -> None:
        self.tape = Tape(device)
        self.device = device
        self.active = self.playing = False
        self._shown: dict[int, list[weakref.ref[Any]]] = {}

    @contextlib.contextmanager
    def building(self, module: nn.Module, *, loading: bool = False) -> Iterator[None]:
        """Inside, new tensors have no memory; afterwards those of ``module`` are unmade.

        Args:
            module: the LightningModule.
            loading: what is written to tensors comes from a checkpoint, which other ranks do not
                have; see `has_loaded`.
        """
        away = self._bring_back(module) if loading else []
        self.active, self.tape.marking = True, loading
        try:
            with _Answers(self), _Recorder(self):
                yield
        finally:
            self.active = self.tape.marking = False
        for tensor, name, where in away:
            if not has_loaded(tensor):
                put_away(tensor, name, where)
        self._take(module)

    def _bring_back(self, module: nn.Module) -> list[tuple[Tensor, str, str]]:
        """Let tensors that other ranks have be written to here. Returns what they were."""
        away: list[Any] = [tensor for _, tensor in _state(module) if is_away(tensor)]
        before = [(tensor, tensor._full_name, tensor._where) for tensor in away]
        for tensor, name, _ in before:
            with as_they_are():
                self.open(tensor, name)
        return before

    def numbers(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The numbers that tensors without memory would have; views of one share memory."""
        before, self.playing = self.playing, True
        try:
            return self.tape.real([self.tape.view(tensor) for tensor in tensors])
        finally:
            self.playing = before

    def make(self, tensor: Tensor) -> None:
        """Give a tensor, and all that show the same memory, memory for good."""
        self.settle(tensor, self.numbers([tensor])[0])

    def settle(self, tensor: Tensor, value: Tensor) -> None:
        """Let a tensor, and all that show the same memory, have that of ``value``."""
        storage = value.untyped_storage()
        for reference in self._shown.pop(self.tape.view(tensor).key, []):
            other = reference()
            if isinstance(other, _Unmade) and other._deferral is self:
                _show(other, self.tape.view(other).of(storage))  # type: ignore[arg-type]

    def open(self, tensor: Tensor, name: str) -> None:
        """Make an unmade tensor of one on the meta device that this tape knows."""
        _mark(tensor, self, name, "")
        self._shown.setdefault(self.tape.view(tensor).key, []).append(weakref.ref(tensor))

    def _take(self, module: nn.Module) -> None:
        state = {id(t): (name, t) for name, t in _state(module)}
        with as_they_are():
            for name, tensor in state.values():
                unmade = is_unmade(tensor) and not is_away(tensor)  # memory may have been replaced
                ours = unmade or type(tensor) in (nn.Parameter, Tensor)
                if ours and self.tape.knows(tensor):
                    self.open(tensor, name)
            for name, tensor in (*state.values(), *_attributes(module)):
                if not is_unmade(tensor) and self.tape.knows(tensor):
                    if tensor.grad_fn is None:
                        # a class of its own, or neither parameter nor buffer: small, as a rule
                        swap_memory(tensor, _ordinary(tensor, self.numbers([tensor])[0]))
                    else:  # a weight computed of others, before each forward
                        self.open(tensor, name)


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors among the plain attributes of modules, in lists and dictionaries too."""
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if key not in ("_parameters", "_buffers", "_modules", "_trainer"):
                for _, tensor in tensors_in(value):
                    yield f"{name}.{key}".removeprefix("."), tensor


class _Answers(TorchFunctionMode):
    """While building: tensors seem to be on the device, and their numbers can be asked for."""

    def __init__(self, deferral: Deferral) -> None:
        super().__init__()
        self._deferral = deferral

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SEEMING or func in _NUMBERS:
            with as_they_are():
                known = isinstance(args[0], Tensor) and self._deferral.tape.knows(args[0])
                if known and func in _SEEMING:
                    return _SEEMING[func](self._deferral.device)
                if known:
                    return func(self._deferral.numbers(args[:1])[0], *args[1:], **kwargs)
        if func in _MOVES or func in (torch.as_tensor, torch.asarray):
            return self._move(func, args, kwargs)
        return func(*args, **kwargs)

    def _move(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What moves a tensor to where it seems to be already must not copy it."""
        if not isinstance(args[0], Tensor) or not self._deferral.tape.knows(args[0]):
            return func(*args, **kwargs)
        home = self._deferral.device
        if func in (Tensor.cpu, Tensor.cuda):
            func, args = Tensor.to, (args[0], "cpu" if func is Tensor.cpu else "cuda", *args[1:])

        def stays(value: Any) -> Any:
            if not isinstance(value, torch.device | str):
                return value
            device = torch.device(value)
            same = device.type == home.type and device.index in (None, home.index)
            return torch.device("meta") if same else device

        args, kwargs = rebuild((args, kwargs), stays)
        return func(*args, **kwargs)


class _Recorder(TorchDispatchMode):
    """While building: what is done to tensors goes to the tape."""

    def __init__(self, deferral: Deferral) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._deferral, self._tape = deferral, deferral.tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._deferral.playing:
            return func(*args, **(kwargs or {}))
        with as_they_are():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [tensor for _, tensor in tensors_in((args, kwargs))]
        names = {argument.name for argument in schema(func).arguments}
        makes = "device" in names and (not tensors or schema(func).name.startswith("aten::new_"))
        if not makes and not any(tensor.is_meta for tensor in tensors):
            if _is_meta(kwargs.get("device")):  # `device=weight.device`
                kwargs = {**kwargs, "device": self._tape.device}
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        if not all(tensor.is_meta for tensor in written):
            return self._for_real(func, args, kwargs, written)
        if "device" in names and (makes or kwargs.get("device") is not None):
            given = kwargs.get("device")
            device = self._tape.device if given is None or _is_meta(given) else given
            kwargs = {**kwargs, "device": device}
        return self._without_memory(func, args, kwargs, written)

    def _without_memory(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor]
    ) -> Any:
        given = rebuild((args, kwargs), lambda v: self._lifted(v) if isinstance(v, Tensor) else v)
        noted = rebuild(given, lambda v: self._tape.view(v) if isinstance(v, Tensor) else v)
        places = [self._tape.view(tensor) for tensor in written]
        hidden = {
            name: value
            for name, value in (("device", "meta"), ("generator", None), ("pin_memory", None))
            if name in kwargs
        }
        try:
            returned = func(*given[0], **{**given[1], **hidden})
        except (NotImplementedError, RuntimeError) as error:
            return self._for_real(func, args, kwargs, written, error)
        results = [tensor for _, tensor in tensors_in(returned)]
        if any(result.layout is not torch.strided for result in results):
            return self._for_real(func, args, kwargs, written)
        random = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = kwargs.get("generator") or _default_generator(self._tape.device)
            random = generator, generator.get_state()
            self._draw(func, noted, places)
        if torch.Tag.inplace_view not in func.tags:
            self._tape.record(func, noted, results, places, random)
        return returned

    def _lifted(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.is_meta else self._tape.lift(tensor)

    def _draw(self, func: Any, noted: tuple[Any, Any], written: list[View]) -> None:
        """Let the generator go on: draw the numbers and drop them."""
        fills = schema(func).name in _FILLS

        def real(value: Any) -> Any:
            if not isinstance(value, View):
                return value
            if fills and value in written:
                return value.of(memory_for(self._tape.bytes_behind(value), self._tape.device))
            return self._tape.real([value])[0]

        args, kwargs = rebuild(noted, real)
        func(*args, **kwargs)

    def _for_real(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: list[Tensor],
        reason: Exception | None = None,
    ) -> Any:
        """Run an operation that needs numbers, or writes to a real tensor."""
        if any(tensor.is_meta for tensor in written):
            raise DeferredError(
                f"{func} in configure_model changes a weight in a way that cannot be put off until "
                f"a rank makes its stage ({reason or 'other tensors that it changes are real'}). "
                "Build that module in __init__, or initialise it in another way."
            ) from reason
        metas = [tensor for _, tensor in tensors_in((args, kwargs)) if tensor.is_meta]
        real = iter(self._deferral.numbers(metas))
        args, kwargs = rebuild(
            (args, kwargs),
            lambda v: next(real) if isinstance(v, Tensor) and v.is_meta else v,
        )
        return func(*args, **kwargs)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    given = dict(zip((argument.name for argument in schema(func).arguments), args)) | kwargs
    found: list[Tensor] = []
    for argument in schema(func).arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += [tensor for _, tensor in tensors_in(given.get(argument.name))]
    return found


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    generators: tuple[torch.Generator, ...] = torch.cuda.default_generators
    return generators[device.index or 0]


_FILLS = {
    f"aten::{name}_"
    for name in (
        *("normal", "uniform", "random", "exponential", "geometric", "cauchy", "log_normal"),
        "bernoulli",
    )
}
"""Random operations that do not look at what they overwrite."""


# ---------------------------------------------------------------- operations on unmade tensors


class _Computes(BaseException):
    """An operation is more than a look."""


class _OnlyLooks(TorchDispatchMode):
    """Lets pass what reads no numbers."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        described = schema(func)
        aliases = [returned.alias_info for returned in described.returns]
        views = bool(aliases) and all(a is not None and not a.is_write for a in aliases)
        tracked = torch.is_grad_enabled() and described.name != "aten::detach"
        with as_they_are():
            wanted = tracked and any(t.requires_grad for _, t in tensors_in((args, kwargs)))
        if not views or wanted:
            raise _Computes
        return func(*args, **(kwargs or {}))


def _operate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation of torch with an unmade tensor among its arguments."""
    if func in _LOOKS:
        with as_they_are():
            return func(*args, **kwargs)
    unmade: list[Any] = [t for _, t in tensors_in((args, kwargs)) if isinstance(t, _Unmade)]
    if any(tensor._deferral is not None and tensor._deferral.active for tensor in unmade):
        with as_they_are():
            return func(*args, **kwargs)
    if func in _SEEMING:
        return _SEEMING[func](torch.device("cpu"))
    if func in _MOVES:
        return _moved(func, args, kwargs)
    if func not in _NUMBERS:
        try:
            with as_they_are(), _OnlyLooks():  # type: ignore[no-untyped-call]
                result = func(*args, **kwargs)
        except _Computes:
            pass
        else:
            with as_they_are():
                return _same_memory(result, unmade)
    return _compute(func, args, kwargs, unmade)


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], unmade: list[Any]) -> Any:
    with as_they_are():
        trains = torch.is_grad_enabled() and any(t.requires_grad for t in unmade)
    if trains:
        make(unmade)
        return func(*args, **kwargs)
    for tensor in unmade:
        if tensor._deferral is None:
            raise _elsewhere(tensor)
    with as_they_are():
        values = list(unmade[0]._deferral.numbers(unmade))
        versions = [version(value) for value in values]
        of = {id(tensor): value for tensor, value in zip(unmade, values)}
        back = {id(value): tensor for tensor, value in zip(unmade, values)}
        args, kwargs = rebuild((args, kwargs), lambda v: of.get(id(v), v))
    result = func(*args, **kwargs)
    with as_they_are():
        for tensor, value, before in zip(unmade, values, versions):
            if version(value) != before and is_unmade(tensor):
                tensor._deferral.settle(tensor, value)
    if any(id(tensor) in back for _, tensor in tensors_in(result)):
        return rebuild(result, lambda v: back.get(id(v), v))
    return result


def _moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``to``, ``cpu``, ``cuda``: memory that is not there is everywhere."""
    tensor = args[0]
    with as_they_are():
        dtype = tensor.dtype
    if func is Tensor.to and torch.empty(0, dtype=dtype).to(*args[1:], **kwargs).dtype != dtype:
        return _compute(func, args, kwargs, [tensor])
    return tensor


def _same_memory(result: Any, unmade: list[Any]) -> Any:
    """A result that shows the memory of an unmade tensor is unmade too."""
    for _, tensor in tensors_in(result):
        if type(tensor) is Tensor and tensor.is_meta:
            key = storage_key(tensor.untyped_storage())
            source = next((t for t in unmade if storage_key(t.untyped_storage()) == key), unmade[0])
            if source._deferral is None:
                _mark(tensor, None, source._full_name, source._where)
            else:
                source._deferral.open(tensor, source._full_name)
    return result


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_SEEMING: Mapping[Any, Callable[[torch.device], Any]] = {
    _getter("device"): lambda device: device,
    _getter("is_meta"): lambda device: False,
    _getter("is_cpu"): lambda device: device.type == "cpu",
    _getter("is_cuda"): lambda device: device.type == "cuda",
}
"""Answers about the place of a tensor that has no memory."""

_NUMBERS = {
    Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.item, Tensor.data_ptr, Tensor.__format__,
    Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__,
}  # fmt: skip
"""Methods that look past torch's operations at the memory itself."""

_MOVES = {Tensor.to, Tensor.cpu, Tensor.cuda}

_LOOKS = {
    *map(
        _getter,
        (
            *("shape", "dtype", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "grad"),
            *("is_leaf", "grad_fn", "_version", "is_sparse", "is_quantized", "is_nested"),
        ),
    ),
    *(
        getattr(Tensor, name)
        for name in (
            *("size", "dim", "numel", "nelement", "__len__", "stride", "storage_offset"),
            *("is_contiguous", "element_size", "is_floating_point", "is_complex", "register_hook"),
            *("register_post_accumulate_grad_hook", "__hash__", "requires_grad_"),
        )
    ),
    Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    *(getattr(Tensor.grad, name) for name in ("__set__", "__delete__")),
}
"""Operations that have nothing to do with the numbers."""
