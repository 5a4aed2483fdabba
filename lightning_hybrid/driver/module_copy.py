"""The network's own Python, run beside a call on a copy of the module, so that little remains.

Parameters are shared with the module (a forward reads them), so that a copy needs no memory for
them where they are. Buffers, attributes and arguments are copied; code, data sets, loaders and
optimizers are not. What the forward prints, logs, warns of and draws is swallowed.

Objects that a copy shares with the module are put back as they were: a forward hook keeps a feature
in an attribute of the LightningModule, in what its closure holds or in a global dictionary; a class
counts its calls. Attributes of modules and of objects whose methods are hooks, the containers in
them, closures and globals of hooks and forwards, and attributes of the modules' classes are put
back; what those functions call elsewhere, and files, are not looked at.
"""

import copy
import io
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from lightning_hybrid._torch.modules import is_compiled, tables
from lightning_hybrid._torch.tensors import as_they_are, same_numbers, version
from lightning_hybrid._trees import tensors_in
from lightning_hybrid.capture import plain

_CONTAINERS = (dict, list, set, deque)
_MANY = 10_000
"""Larger containers hold data, and are not looked through."""
_VALUES = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None), Tensor)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "forward")


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """What the user has put on a module and its parts to be called in a forward."""
    for part in module.modules():
        for name in _HOOKS:
            held = vars(part).get(name)
            yield from held.values() if isinstance(held, dict) else () if held is None else (held,)


def owner_of(hook: Any) -> Any:
    """The object whose method a hook is; ``None``: it is none's."""
    while isinstance(hook, partial):
        hook = hook.func
    return hook.__self__ if isinstance(hook, MethodType) else None


@contextmanager
def undone(root: nn.Module, module: nn.Module) -> Iterator[None]:
    """Inside, code of the user's runs beside a call; afterwards things are as before.

    Args:
        root: the LightningModule.
        module: the network; what runs is a copy of it.
    """
    noted = _Noted()
    for part in {id(p): p for p in (*root.modules(), *module.modules())}.values():
        noted.container(vars(part))
        noted.numbers(tables(part)[1].values())
    for kind in {type(part) for part in module.modules()}:
        if not kind.__module__.startswith("torch."):
            noted.attributes_of_class(kind)
            noted.function(kind.forward)
    for hook in hooks_of(module):
        noted.function(hook)
    try:
        yield
    finally:
        noted.put_back()


class _Noted:
    """Notes values that a check of the network may change, so that they can be put back."""

    def __init__(self) -> None:
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._places: list[tuple[Callable[[], Any], Callable[[Any], object], Any]] = []
        self._numbers: list[tuple[Tensor, Tensor]] = []
        self._seen = set[int]()

    def container(self, value: Any) -> None:
        """Note what a container holds, and what the containers in it hold."""
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if not isinstance(one, _CONTAINERS) or id(one) in self._containers or len(one) > _MANY:
                continue
            self._containers[id(one)] = one, one.copy()
            waiting += one.values() if isinstance(one, dict) else one

    def numbers(self, buffers: Iterable[Any]) -> None:
        """Note the numbers of tensors that may be written to in place."""
        with as_they_are():
            self._numbers += [(b, b.detach().clone()) for b in buffers if b is not None]

    def function(self, function: Any) -> None:
        """Note what a function can change: its closure, its globals, the object of a method."""
        waiting = [function]
        while waiting:
            one = waiting.pop()
            if id(one) in self._seen:
                continue
            self._seen.add(id(one))
            if isinstance(one, partial):
                waiting += [one.func, *one.args, *one.keywords.values()]
            elif isinstance(one, MethodType):
                waiting += [one.__func__, one.__self__]
            elif isinstance(one, FunctionType):
                waiting += self._held_by(one)
            elif isinstance(one, _CONTAINERS):
                self.container(one)
            elif not isinstance(one, type | nn.Module) and hasattr(one, "__dict__"):
                self.container(vars(one))

    def attributes_of_class(self, kind: Any) -> None:
        """Note the attributes of a class that are values and containers, not code."""
        for name, value in [*vars(kind).items()]:
            if isinstance(value, (*_VALUES, *_CONTAINERS)) and not name.startswith("__"):
                self.container(value)
                self._place(partial(getattr, kind, name), partial(setattr, kind, name))

    def _held_by(self, function: FunctionType) -> Iterator[Any]:
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # it is not filled yet
                continue
            if isinstance(value, _VALUES):
                self._place(
                    partial(getattr, cell, "cell_contents"), partial(setattr, cell, "cell_contents")
                )
            yield value
        names = function.__globals__
        for name in _names(function.__code__):
            value = names.get(name)
            if name in names and isinstance(value, (*_VALUES, *_CONTAINERS)):
                self.container(value)
                self._place(partial(names.get, name), partial(names.__setitem__, name))

    def _place(self, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self._places.append((read, write, read()))

    def put_back(self) -> None:
        # names first: a container that was replaced is back before what it holds is put back
        for read, write, value in self._places:
            if read() is not value:
                write(value)
        for container, before in self._containers.values():
            if not _is_same(container, before):
                container.clear()
                getattr(container, "extend" if isinstance(before, list | deque) else "update")(
                    before
                )
        with torch.no_grad(), as_they_are():
            for tensor, before in self._numbers:
                # (a write counts, and autograd refuses what was written to)
                same = tensor.layout is not torch.strided or same_numbers(tensor, before)
                if not same and not torch.allclose(tensor, before, 0, 0, equal_nan=True):
                    tensor.copy_(before)


def _names(code: CodeType) -> Iterator[str]:
    """Names that code and the functions in it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_same(one: Any, other: Any) -> bool:
    if len(one) != len(other):
        return False
    if isinstance(one, set):
        return {*map(id, one)} == {*map(id, other)}
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items())
        return all(a is c and b is d for (a, b), (c, d) in pairs)
    return all(a is b for a, b in zip(one, other))


Rows = Callable[[Tensor], Tensor]
"""Chooses some samples of a tensor that has all of a batch."""


class RandomStates:
    """Where the generators of Python and NumPy stand; torch's are those of a micro-batch."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, what is drawn is what was drawn from here on; afterwards they are where they are.

        Those of now, that is: the call has drawn, too.
        """
        now = RandomStates()
        self._set()
        try:
            yield
        finally:
            now._set()

    def _set(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)


class WritesWeights(RuntimeError):
    """A copy has changed the parameters that it shares."""


class ModuleCopy:
    """A module and the arguments of a call, as they are now.

    Args:
        root: the LightningModule.
        module: the network, with all of its weights.
        arguments: of the call.
        keywords: of the call.
        batched: the tensors whose first dimension is the batch's, wherever the call finds them.
        writes: whether the forward changes parameters, so that the copy needs its own.

    Attributes:
        is_complete: whether all of ``batched`` are in the copy.

    Raises:
        Exception: an object of the module refuses to be copied, in any way it likes.
    """

    def __init__(
        self,
        root: nn.Module,
        module: nn.Module,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        batched: Iterable[Tensor] = (),
        *,
        writes: bool = False,
    ) -> None:
        self._root, self._origin, self._writes = root, module, writes
        weights = {id(p): p for p in (*root.parameters(), *module.parameters())}
        # a deep copy takes what is in its memo as it is: so weights are shared, and need no memory
        memo: dict[int, Any] = {key: _another(p) if writes else p for key, p in weights.items()}
        self._weights: list[Any] = [*memo.values()]
        self._trainers = [_trainer_of(part) for part in module.modules()]
        held = [vars(part) for part in module.modules()]
        inside = {id(part) for part in module.modules()}
        data = [v for values in held for v in values.values() if isinstance(v, _DATA)]
        # an object whose method is a hook is no part of the network, and may hold anything
        owners = [o for o in map(owner_of, hooks_of(module)) if id(o) not in inside]
        # (as large as a data set, or holding one, as a LightningModule does by its Trainer)
        fabrics = [values.get(name) for values in held for name in _OF_FABRIC]
        shared = [*data, *owners, *self._trainers, *fabrics, *([] if root is module else [root])]
        self._shared: dict[int, Any] = {id(v): v for v in shared if v is not None}
        memo |= self._shared
        buffers = {id(buffer) for buffer in module.buffers()}
        rows = {_memory(tensor) for tensor in batched}
        self._buffers, self._batched = set[int](), set[int]()
        self._tensors: list[Tensor] = []
        seen = set[Any]()
        for _, tensor in tensors_in((arguments, keywords, *held)):
            if id(tensor) in memo:
                continue
            copied = memo[id(tensor)] = _another(tensor)
            self._tensors.append(copied)
            if id(tensor) in buffers:
                self._buffers.add(id(copied))
            if _memory(tensor) in rows:
                self._batched.add(id(copied))
                seen.add(_memory(tensor))
        self.is_complete = seen == rows
        self._made = copy.deepcopy((module, arguments, keywords), memo)
        self._here: dict[int, Any] = {}

    @property
    def module(self) -> nn.Module:
        """The copy, which has not been called."""
        made: nn.Module = self._made[0]
        return made

    def missing_bytes(self, device: torch.device) -> int:
        """Memory that the weights need on a device where they are not."""
        return sum(p.nbytes for p in self._weights if p.device != device)

    def release(self) -> None:
        """Let go of the weights that were brought to a device."""
        self._here.clear()

    def call(
        self,
        device: torch.device,
        draws: AbstractContextManager[Any],
        rows: Rows | None = None,
        *,
        through: Callable[..., Any] | None = None,
    ) -> tuple[nn.Module, Any, tuple[Any, ...]]:
        """Run the module's Python, on a copy of the copy. Nothing is kept for a backward.

        Args:
            device: where.
            draws: inside, torch draws what it is to draw.
            rows: chooses the samples; ``None``: all of them.
            through: calls the copy otherwise, with its arguments and keywords.

        Returns:
            The copy, what it has returned, and its arguments after the call.

        Raises:
            WritesWeights: it has changed the module's parameters.
            Exception: of the user's code.
        """
        if self._writes or not self._here:
            with as_they_are():
                here = [p.device == device and not self._writes for p in self._weights]
            pairs = zip(self._weights, here)
            self._here = {id(p): p if stays else _another(p, device) for p, stays in pairs}
        memo = self._here | self._shared
        for tensor in self._tensors:
            chosen = rows if id(tensor) in self._batched else None
            where = device if id(tensor) in self._buffers else tensor.device
            memo[id(tensor)] = _another(tensor, where, chosen)
        module, arguments, keywords = copy.deepcopy(self._made, memo)
        for part, trainer in zip(module.modules(), self._trainers):
            if trainer is not None:  # copies of a LightningModule have none
                part.trainer = trainer
        weights = [] if self._writes else [*self._here.values()]
        # the run itself trains these: a forward that writes to them cannot be run beside it
        before = [version(p) for p in weights]
        with ExitStack() as stack:
            stack.enter_context(undone(self._root, self._origin))
            stack.enter_context(_unheard())
            # torch.compile of the user's would compile the copy anew, at each check
            if is_compiled(module):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(draws)
            if through is None:
                result = module.forward(*arguments, **keywords)
            else:
                result = through(module, arguments, keywords)
        if before != [version(p) for p in weights]:
            raise WritesWeights("it writes into its parameters")
        return module, result, (arguments, keywords)


_DATA = (Dataset, DataLoader, Optimizer)
"""What a copy of a module shares with it."""


_OF_FABRIC = ("_fabric", "_fabric_optimizers")
"""Where Fabric puts itself and what it has set up into a LightningModule."""


def _trainer_of(part: nn.Module) -> Any:
    """Lightning's, of a LightningModule that has one."""
    if not isinstance(getattr(type(part), "trainer", None), property):
        return None
    try:
        return part.trainer
    except RuntimeError:  # it is not attached
        return None


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that show the same memory in the same way, whatever their class."""
    with as_they_are():
        strided = tensor.layout is torch.strided
        place = tensor.data_ptr() if strided and tensor.numel() else id(tensor)
        return place, tuple(tensor.shape), tensor.stride() if strided else None


def _another(tensor: Tensor, device: torch.device | None = None, rows: Rows | None = None) -> Any:
    """An ordinary tensor with the same numbers, in memory of its own."""
    with as_they_are():
        value = plain(tensor).detach()
        wants, leaf = tensor.requires_grad, tensor.is_leaf
        value = (value if rows is None else rows(value)).to(device or value.device, copy=True)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(value, wants)
        value = value.requires_grad_(wants)
        return value if leaf or not wants else value.clone()


@contextmanager
def _unheard() -> Iterator[None]:
    """Inside, code of the user's prints, warns and keeps tensors for a backward in vain."""

    def keep(_: Tensor) -> None:
        return None

    def give(_: None) -> Tensor:
        raise RuntimeError("it runs a backward")

    # what autocast keeps of weights here has no graph, and the call itself would find it there
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with (
            warnings.catch_warnings(),
            redirect_stdout(io.StringIO()),
            torch.autograd.graph.saved_tensors_hooks(keep, give),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
