"""Builds a network of deferred tensors, without memory, and makes their numbers when needed.

Inside `DeferredMaker.building` every new tensor is on the meta device, and a `Tape` records the
operations on it; random generators advance as on one device (the numbers are drawn into scratch
memory and dropped). Afterwards the module's parameters and buffers are deferred
(:mod:`lightning_hybrid.remote.deferred`), and playing the tape makes their numbers.

Numbers that code reads from files are read again when they are needed. A large tensor in the memory
of a mapped file is not read while the network is built: views of it are made, all other operations
on it are recorded. Threads that are started meanwhile record as well, since libraries load files in
threads. A tensor that code makes with ``device="meta"`` has no numbers on one device either, and is
left alone.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_hybrid._torch.tensors import (
    TorchDispatchMode,
    as_they_are,
    draws,
    is_composed,
    is_shared,
    schema,
    swap_memory,
)
from lightning_hybrid._trees import rebuild, tensors_in
from lightning_hybrid.errors import DeferredError
from lightning_hybrid.remote.deferred import (
    MOVES,
    NUMBERS,
    SEEMING,
    Maker,
    defer,
    elsewhere,
    is_deferred,
    is_offloaded,
    makes_views,
    offload,
    show,
)
from lightning_hybrid.remote.initialization_tape import Tape, View
from lightning_hybrid.remote.intercepted import ordinary
from lightning_hybrid.remote.mapped_files import FilePart, MappedFiles, in_mapped_file
from lightning_hybrid.remote.own_memory import memory_for
from lightning_hybrid.remote.unread import is_unread


def _was_loaded(tensor: Any) -> bool:
    """Whether the checkpoint that is being loaded has written to a tensor.

    ``False`` for a tensor that is not deferred, or that another rank owns.
    """
    deferral: DeferredMaker | None = getattr(tensor, "_maker", None)
    if deferral is None:
        return False
    with as_they_are():
        return deferral.tape.is_marked(tensor)


def has_source(tensor: Any) -> bool:
    """Whether a deferred tensor's numbers can be made at any time, and take no memory until then.

    That is so if they are drawn or computed, or read from a file. It is False for other tensors.
    """
    maker = getattr(tensor, "_maker", None)
    if not isinstance(maker, DeferredMaker):
        return False
    with as_they_are():
        return not maker.tape.holds_memory(tensor)


def file_parts(tensors: Mapping[str, Any]) -> dict[str, FilePart]:
    """Find deferred tensors whose numbers are in a file, as they are.

    Args:
        tensors: tensors by name; others than deferred ones are left out.

    Returns:
        By name, where they are.
    """
    makers = {n: t._maker for n, t in tensors.items() if is_deferred(t)}
    found = {n: m.tape for n, m in makers.items() if isinstance(m, DeferredMaker)}
    files = MappedFiles() if found else None
    with as_they_are():
        parts = {n: tape.file_part(tensors[n], files) for n, tape in found.items() if files}
    return {name: part for name, part in parts.items() if part is not None}


_living: weakref.WeakSet[DeferredMaker] = weakref.WeakSet()


def forget_made() -> None:
    """Drop what all makers have recorded and no deferred tensor of this rank needs any more.

    Called after a cut. Files from which only dropped tensors were to be read are closed.
    """
    for deferral in _living:
        deferral.tape.forget()


class DeferredMaker(Maker):
    """The maker of the deferred tensors of one LightningModule.

    Args:
        device: the device on which a run on one device would make the numbers.

    Attributes:
        tape: has what was recorded, and makes numbers of it.
        device: see above.
        active: whether a module is being built or loaded.
        lock: held while an operation is recorded or numbers are made, which threads do in turn.
    """

    on_one_rank = True

    def __init__(self, device: torch.device) -> None:
        self.tape = Tape(device)
        self.device = device
        self.active = False
        self.lock = threading.RLock()
        self._thread = threading.local()
        self._shown: dict[int, list[weakref.ref[Any]]] = {}
        _living.add(self)

    @property
    def recording(self) -> bool:
        """Whether this thread records what is done to tensors."""
        return self.active and not getattr(self._thread, "unrecorded", 0)

    @contextlib.contextmanager
    def building(self, module: nn.Module) -> Iterator[None]:
        """Inside, new tensors have no memory; afterwards those of ``module`` are deferred.

        Tensors that the module had before stay as they are.

        Args:
            module: the LightningModule, to which the user's hooks add modules inside.
        """
        before = {id(tensor) for _, tensor in _state(module)}
        with self._noting(), _started_threads(self._recorded):
            yield
        self._free_loaded(tensor for _, tensor in _state(module) if id(tensor) not in before)
        self._defer_recorded(module)

    @contextlib.contextmanager
    def loading(self, module: nn.Module) -> Iterator[None]:
        """Inside, a checkpoint is loaded into a module with deferred tensors, which get no memory.

        What is written to them is recorded; their numbers are read when they are needed.

        Args:
            module: the LightningModule; other ranks may own some of its tensors after an earlier
                run.
        """
        away = self._open_remote(module)
        with self._noting(marking=True):
            yield
        for tensor, name, where in away:
            if not _was_loaded(tensor):
                offload(tensor, name, where)
        self.tape.marked.clear()
        self._defer_recorded(module)

    @contextlib.contextmanager
    def _noting(self, *, marking: bool = False) -> Iterator[None]:
        """Inside, operations on tensors without memory are recorded on the tape.

        Args:
            marking: whether tensors that are written to are marked as loaded.
        """
        self.active = True
        self.tape.marking = marking
        try:
            with self._recorded():
                yield
        finally:
            self.active = self.tape.marking = False

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        """Inside, this thread records operations, as long as a module is built or loaded."""
        # (one answers what Python reads of tensors, the other records what autograd calls)
        with _Answers(self), _TapeRecorder(self):
            yield

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Inside, operations of this thread run as ordinary ones and are not recorded."""
        self._thread.unrecorded = getattr(self._thread, "unrecorded", 0) + 1
        try:
            yield
        finally:
            self._thread.unrecorded -= 1

    def _open_remote(self, module: nn.Module) -> list[tuple[Tensor, str, str]]:
        """Let a load write to tensors of a module that other ranks own.

        Until :meth:`loading` has ended they are deferred tensors of this maker, without numbers.

        Returns:
            For each of these tensors the tensor, its name, and which rank owns it in the words of
            errors ("on ..."): those that the load leaves out are turned into remote ones again.
        """
        away: list[Any] = [tensor for _, tensor in _state(module) if is_offloaded(tensor)]
        before = [(tensor, tensor._full_name, tensor._where) for tensor in away]
        for tensor, name, where in before:
            with as_they_are():
                # (what is not written to cannot be read)
                self.tape.put(tensor, elsewhere(tensor, name, where))
                self.open(tensor, name)
        return before

    def numbers(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        # (so that the operations that the tape plays are not recorded again)
        with self.lock, self.unrecorded():
            return self.tape.real([self.tape.view(tensor) for tensor in tensors])

    def give_memory(self, tensor: Tensor, value: Tensor) -> None:
        storage, key = value.untyped_storage(), self.tape.view(tensor).key
        for reference in self._shown.pop(key, []):
            other: Any = reference()
            # (a load may have put it into other memory since, and this key may be a new storage's)
            if is_deferred(other) and other._maker is self:
                place = self.tape.view(other)
                if place.key == key:
                    show(other, place.of(storage))

    def open(self, tensor: Tensor, name: str) -> None:
        defer(tensor, self, name, "")
        self._shown.setdefault(self.tape.view(tensor).key, []).append(weakref.ref(tensor))

    def _free_loaded(self, tensors: Iterable[Tensor]) -> None:
        """Free the memory of ordinary tensors; the tape holds their numbers to make them again.

        (They were loaded from files while the module was built.) Tensors that share their memory,
        or are in autograd's graph, stay as they are.
        """
        with as_they_are():
            for tensor in tensors:
                plain = type(tensor) in (nn.Parameter, Tensor) and tensor.layout is torch.strided
                # (what code has another view of stays in that view's memory)
                if plain and tensor.is_leaf and not (tensor.is_meta or is_shared(tensor)):
                    swap_memory(tensor, ordinary(tensor, self.tape.lift(tensor)))

    def _defer_recorded(self, module: nn.Module) -> None:
        """Turn a module's parameters and buffers that the tape has recorded into deferred tensors.

        Other recorded tensors (attributes, tensors of other classes) get their memory and numbers
        now, unless they are in autograd's graph: these become deferred too.
        """
        state = {id(t): (name, t) for name, t in _state(module)}
        with as_they_are():
            for name, tensor in state.values():
                # (also those deferred already: loading may have put them into other memory)
                deferred = is_deferred(tensor) and not is_offloaded(tensor)
                ours = deferred or type(tensor) in (nn.Parameter, Tensor)
                if ours and self.tape.knows(tensor):
                    self.open(tensor, name)
            for name, tensor in (*state.values(), *_attributes(module)):
                if not is_deferred(tensor) and self.tape.knows(tensor):
                    if tensor.grad_fn is None:
                        # (of a class of its own, or neither parameter nor buffer: mostly small)
                        swap_memory(tensor, ordinary(tensor, self.numbers([tensor])[0]))
                    else:  # (a weight that is computed from others before each forward)
                        self.open(tensor, name)
        self.tape.forget()


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in attributes of modules that are no parameters or buffers.

    Each comes with its dotted name. Tensors in lists and dictionaries are found too.
    """
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if key not in ("_parameters", "_buffers", "_modules", "_trainer"):
                for _, tensor in tensors_in(value):
                    yield f"{name}.{key}".removeprefix("."), tensor


_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]


class _Answers(TorchFunctionMode):
    """While a module is built, makes tensors that the tape knows behave as if they had memory.

    They say that they are on the maker's device, and moves to that device leave them without
    memory. ``tensor.data = ...`` works between them and ordinary tensors. Their numbers are made
    when Python reads them. Meta tensors that the user's code has made are left alone.

    Args:
        deferral: the maker.
    """

    def __init__(self, deferral: DeferredMaker) -> None:
        super().__init__()
        self._deferral = deferral

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._deferral.recording:
            return func(*args, **kwargs)
        of_storage = func is torch.asarray and not isinstance(args[0], Tensor)
        if of_storage or _is_meta(kwargs.get("device")):
            with self._deferral.unrecorded():
                return func(*args, **kwargs)
        if func in SEEMING or func in NUMBERS:
            with as_they_are():
                known = isinstance(args[0], Tensor) and self._deferral.tape.knows(args[0])
                if known and func in SEEMING:
                    return SEEMING[func](self._deferral.device)
                if known:
                    return func(self._deferral.numbers(args[:1])[0], *args[1:], **kwargs)
        if func in MOVES or func in (torch.as_tensor, torch.asarray):
            return self._move(func, args, kwargs)
        if func == _SET_DATA:
            self._prepare_assignment(*args)
        return func(*args, **kwargs)

    def _prepare_assignment(self, tensor: Tensor, data: Tensor) -> None:
        """Prepare ``tensor.data = data``, if only one of the two has memory.

        Torch refuses to set ``data`` on another device: so `tensor` gets empty memory on the device
        of `data`.
        """
        known = map(self._deferral.tape.knows, (tensor, data))
        with as_they_are(), self._deferral.unrecorded():
            if tensor.is_meta is not data.is_meta and any(known):
                empty = torch.empty(0, dtype=data.dtype, device=data.device)
                swap_memory(tensor, ordinary(tensor, empty))

    def _move(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out a move of a tensor to a device.

        A tensor without memory that seems to be on that device already stays without.

        Args:
            func: ``to``, ``cpu``, ``cuda``, `torch.as_tensor` or `torch.asarray`.
            args: its arguments, the tensor first.
            kwargs: its keywords.
        """
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


class _TapeRecorder(TorchDispatchMode):
    """While a module is built, runs operations on tensors without memory, and records them."""

    def __init__(self, deferral: DeferredMaker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._deferral = deferral
        self._tape = deferral.tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not self._deferral.recording:
            return func(*args, **(kwargs or {}))
        with self._deferral.lock, as_they_are():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation: without memory if it makes tensors or has arguments without memory.

        Raises:
            DeferredError: the operation cannot be put off.
        """
        tensors = [tensor for _, tensor in tensors_in((args, kwargs))]
        if (composed := next(filter(is_composed, tensors), None)) is not None:
            raise DeferredError(
                f"configure_model makes a {type(composed).__name__}, which keeps its numbers in "
                "other tensors, as quantised weights do: such cannot be left to the rank that is "
                "to own it. Leave the quantisation out, or use one device."
            )
        if any(isinstance(value, torch.UntypedStorage) for value in args):
            # (as `torch.load` does: an empty tensor gets the memory that was read or mapped)
            swap_memory(args[0], torch.empty(0, dtype=args[0].dtype, device=args[1].device))
            return func(*args, **kwargs)
        if any(map(is_unread, tensors)):  # (of a checkpoint: the tape reads them when it is played)
            lifted = rebuild((args, kwargs), lambda v: self._tape.lift(v) if is_unread(v) else v)
            return self._run(func, *lifted)
        names = {argument.name for argument in schema(func).arguments}
        # (`new_empty` and the like have a tensor among their arguments, and make another one)
        makes = "device" in names and (not tensors or schema(func).name.startswith("aten::new_"))
        bare = [t for t in tensors if t.is_meta and not self._tape.knows(t)]
        if bare:  # (made with `device="meta"`)
            return self._beside_bare(func, args, kwargs, bare)
        if not makes and not any(tensor.is_meta for tensor in tensors):
            if _is_meta(kwargs.get("device")):  # (as by `device=weight.device`)
                kwargs = {**kwargs, "device": self._tape.device}
            if makes_views(func) or not any(map(in_mapped_file, tensors)):
                return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        if not all(tensor.is_meta for tensor in written):
            return self._for_real(func, args, kwargs, written)
        if "device" in names and (makes or kwargs.get("device") is not None):
            given = kwargs.get("device")
            device = self._tape.device if given is None or _is_meta(given) else given
            kwargs = {**kwargs, "device": device}
        return self._without_memory(func, args, kwargs, written)

    def _beside_bare(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], bare: list[Tensor]
    ) -> Any:
        """Run an operation with an argument on the meta device, which has numbers on no rank.

        Args:
            func: the operation.
            args: its arguments.
            kwargs: its keywords.
            bare: those of its arguments that code has made with ``device="meta"``.

        Raises:
            DeferredError: the operation needs their numbers.
        """
        known = [t for _, t in tensors_in((args, kwargs)) if self._tape.knows(t)]
        device = kwargs.get("device")
        if not known and (device is None or _is_meta(device)):
            return func(*args, **kwargs)
        if schema(func).name.endswith("_like") or schema(func).name.startswith("aten::new_"):
            # (it looks at sizes and type alone)
            alike = {id(t): self._tape.made(t) for t in bare}
            return self._run(func, *rebuild((args, kwargs), lambda v: alike.get(id(v), v)))
        written = _written(func, args, kwargs)
        if not known or (written and not any(map(self._tape.knows, written))):
            return func(*args, **kwargs)
        raise DeferredError(
            f"{func} in configure_model reads a tensor of size {tuple(bare[0].shape)} that was "
            'made with device="meta" and has no numbers.'
        )

    def _without_memory(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor]
    ) -> Any:
        """Run an operation on the meta device, and record it on the tape.

        Args:
            func: the operation.
            args: its arguments.
            kwargs: its keywords.
            written: those of its arguments that it writes to.
        """
        given = rebuild((args, kwargs), lambda v: self._tape.lift(v) if _has_memory(v) else v)
        noted = rebuild(given, lambda v: self._tape.view(v) if isinstance(v, Tensor) else v)
        places = [self._tape.view(tensor) for tensor in written]
        hidden = {name: value for name, value in _ON_META.items() if name in kwargs}
        try:
            returned = func(*given[0], **{**given[1], **hidden})
        except (NotImplementedError, RuntimeError) as error:
            return self._for_real(func, args, kwargs, written, error)
        results = [tensor for _, tensor in tensors_in(returned)]
        if any(result.layout is not torch.strided for result in results):
            return self._for_real(func, args, kwargs, written)
        random = None
        if draws(func, args, kwargs):
            generator = kwargs.get("generator") or _default_generator(self._tape.device)
            random = generator, generator.get_state()
            # (so that later operations draw what they would draw on one device)
            self._draw(func, noted, places)
        # (a change of size or strides alone leaves the memory as it is)
        if torch.Tag.inplace_view not in func.tags:
            self._tape.record(func, noted, results, places, random)
        return returned

    def _draw(self, func: Any, noted: tuple[Any, Any], written: list[View]) -> None:
        """Advance the random generator as an operation does: draw its numbers and drop them.

        Args:
            func: the operation, which draws random numbers.
            noted: its arguments and keywords, with a `View` for each tensor without memory.
            written: the views among them that it writes to.
        """
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
        """Run an operation on real tensors, made for those without memory, and do not record it.

        Args:
            func: the operation, which needs numbers or writes to a real tensor.
            args: its arguments.
            kwargs: its keywords.
            written: those of its arguments that it writes to.
            reason: the error that it has raised on the meta device, if it was tried there.

        Raises:
            DeferredError: it writes to a tensor without memory.
        """
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


@contextlib.contextmanager
def _started_threads(
    inside: Callable[[], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
    """Inside, each thread that this one starts runs in a context of its own.

    So do threads that these threads start.

    Args:
        inside: makes the context for one thread.
    """
    kind: Any = threading.Thread
    original, members = kind.start, {threading.get_ident()}

    def start(thread: threading.Thread) -> None:
        run = thread.run

        def run_inside() -> None:
            members.add(threading.get_ident())
            with inside():
                run()

        if threading.get_ident() in members:
            thread.run = run_inside  # type: ignore[method-assign]
        original(thread)

    kind.start = start
    try:
        yield
    finally:
        kind.start = original


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments of an operation that it writes to."""
    given = dict(zip((argument.name for argument in schema(func).arguments), args)) | kwargs
    found: list[Tensor] = []
    for argument in schema(func).arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += [tensor for _, tensor in tensors_in(given.get(argument.name))]
    return found


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_meta


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    generators: tuple[torch.Generator, ...] = torch.cuda.default_generators
    return generators[device.index or 0]


_ON_META = {"device": "meta", "generator": None, "pin_memory": None}
"""The keywords with which an operation runs without memory."""

_FILLS = {
    f"aten::{name}_"
    for name in (
        "normal",
        "uniform",
        "random",
        "exponential",
        "geometric",
        "cauchy",
        "log_normal",
        "bernoulli",
    )
}
"""Random operations that overwrite a tensor without reading it."""
