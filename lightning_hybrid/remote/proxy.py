"""Proxies: tensors of other ranks that look like tensors of this one.

The class of a proxy intercepts the operations on it (:mod:`lightning_hybrid.remote.intercepted`).
Before an operation uses its values, it has :class:`~lightning_hybrid.remote.proxies.Proxies`
fetch them; after an operation has written to them, it tells that object.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import Any, Protocol
from weakref import WeakValueDictionary, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hybrid._torch.autograd import is_wrapped
from lightning_hybrid._torch.tensors import as_they_are, version
from lightning_hybrid._trees import tensors_in
from lightning_hybrid.errors import HybridError
from lightning_hybrid.remote.intercepted import LOOKS, Intercepted, getters, intercepted_in


class RemoteKind(Enum):
    """Kinds of tensors that another rank owns."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"


class RemoteStore(Protocol):
    """Reads and sets tensors on the ranks that own them, by their names in the LightningModule."""

    def give(self, kind: RemoteKind, names: list[str]) -> Mapping[str, Tensor]:
        """Fetch the present values of tensors, and return them by name.

        Args:
            kind: the kind of the tensors.
            names: their names, for gradients those of the parameters.
        """

    def bring(self, kind: RemoteKind, memory: Mapping[str, Tensor]) -> Collection[str]:
        """Write the present values of parameters or gradients into memory on this device.

        Args:
            kind: parameters or gradients.
            memory: by name, the tensors that are written to.

        Returns:
            The names of the tensors that were written. Use :meth:`give` for the others.
        """

    def take(self, kind: RemoteKind, values: Mapping[str, Tensor], *, add: bool = False) -> None:
        """Set tensors at their owners.

        Args:
            kind: the kind of the tensors.
            values: the values by name.
            add: whether the values are added to what the owners have; for gradients alone.
        """

    def clear_gradients(self, names: list[str]) -> None:
        """Set the gradients of parameters to None at their owners."""

    def gradient_names(self) -> set[str]:
        """Ask the owners which parameters have a gradient; return the names of these."""


class UsesOfProxies(Protocol):
    """Hears from proxies how the user's code uses them, and fetches their values in time.

    Attributes:
        device: the device on which proxies seem to be.
    """

    device: torch.device

    def read(self, remote: "Remote") -> None:
        """Fetch a tensor from its owner if its values here are stale; they are read next."""

    def touch(self, remote: "Remote") -> None:
        """Note that code has written to a tensor here; its owner does not have the values yet."""

    def enter_graph(self, remote: "Remote") -> None:
        """Note that autograd has recorded a use of a parameter."""

    def done(self) -> None:
        """Note that an operation is over, so that the values that it has read may be freed."""

    def gradient(self, remote: "Remote") -> Tensor | None:
        """Return what ``parameter.grad`` is for another rank's parameter; ``None``: no gradient."""

    def assign_gradient(self, remote: "Remote", value: Tensor | None) -> None:
        """Carry out ``parameter.grad = value`` for a parameter of another rank.

        Args:
            remote: the parameter.
            value: the gradient; ``None``: it is cleared.
        """


class Remote:
    """A tensor that another rank owns, and what this rank knows of it.

    Attributes:
        table: is told by the tensor's proxies how they are used, and fetches the values.
        kind: its kind.
        name: name of the tensor, or of the parameter of a gradient, in the LightningModule.
        value: its values on this rank: the parameter or buffer itself, or memory for a gradient.
        seen: the age (:class:`~lightning_hybrid.remote.proxies.Proxies`) in which ``value``
            was fetched; ``None``: never.
        version: the version counter of ``value`` when it was last equal to the owner's.
        written: whether a proxy has noted a write to ``value`` since then.
    """

    __slots__ = ("_shown", "kind", "name", "seen", "table", "value", "version", "written")

    def __init__(self, table: UsesOfProxies, kind: RemoteKind, name: str, value: Tensor) -> None:
        self._shown: ref[Tensor] | None = None
        self.table = table
        self.kind = kind
        self.name = name
        self.value = value
        self.seen: int | None = None
        # (a write before the first fetch is overwritten by it, and not sent)
        self.version = version(value)
        self.written = False

    def show(self, make: Callable[[], Tensor]) -> Tensor:
        """Return the proxy of this gradient that code here refers to already, or else a new one.

        Args:
            make: makes a proxy; called if there is none, or none any more.
        """
        proxy = self.shown
        if proxy is None:
            proxy = make()
            self._shown = ref(proxy)
        return proxy

    @property
    def shown(self) -> Tensor | None:
        """The proxy that :meth:`show` has given, if any code here still refers to it; else None."""
        return self._shown() if self._shown is not None else None

    def keep(self) -> None:
        """Cut the link to the owner, which is about to drop the tensor; proxies keep the values."""
        self.table = _Kept(self.value.device)

    @property
    def changed(self) -> bool:
        """Whether ``value`` was written to here since it was last equal to the owner's."""
        return self.written or (self.seen is not None and version(self.value) != self.version)

    def note_equal(self) -> None:
        """Note that ``value`` is now equal to what the owner has, as after a fetch or a send."""
        self.version = version(self.value)
        self.written = False


class _Kept:
    """Takes the place of `Remote.table` for tensors that no other rank has any more.

    Nothing is fetched or sent.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def read(self, remote: Remote, _: Tensor | None = None) -> Any:
        """Do nothing."""

    def done(self) -> None:
        """Do nothing."""

    touch = enter_graph = gradient = assign_gradient = read


class _Proxy(Intercepted):
    """Base of the two classes of proxies.

    Attributes:
        _source: the tensor of another rank whose values the proxy shows.
    """

    _source: Remote

    @classmethod
    def operate(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], RemoteParameter):
            source = args[0]._source
            if func in _HOOKS:
                raise hook_refused(source.name)
            if func == _GET_GRADIENT:
                return source.table.gradient(source)
            if func in _SET_GRADIENT:
                value = args[1] if len(args) > 1 else None
                return source.table.assign_gradient(source, value)
        if func in _PLACES:
            return func(torch.empty(0, device=args[0]._source.table.device))
        proxies = list(intercepted_in((args, kwargs), _Proxy))
        with as_they_are():
            for proxy in proxies:
                proxy._source.table.read(proxy._source)
            # (a write by any operation shows in the version counter)
            before = [version(proxy) for proxy in proxies]
            result = func(*args, **kwargs)
            for proxy, count in zip(proxies, before):
                written = func in _NORMS and not isinstance(proxy, RemoteParameter)
                # (inference tensors have no version counter)
                written |= proxy.is_inference() and func not in _Proxy.looks
                if written or version(proxy) != count or func == _SET_DATA:
                    proxy._source.table.touch(proxy._source)
            if torch.is_grad_enabled() and any(t.requires_grad for _, t in tensors_in(result)):
                _enter_graph(proxies)
            result = _same_memory(result, proxies)
            _done(proxies)
            return result

    def numbers(self) -> Tensor:
        with as_they_are():
            self._source.table.read(self._source)
            return self.detach()  # type: ignore[attr-defined,no-any-return]


class RemoteTensor(_Proxy, Tensor):
    """A proxy of a buffer or a gradient, or a view of a proxy."""


class RemoteParameter(_Proxy, nn.Parameter):
    """A proxy of a parameter."""


_made: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
"""By ``id``, all proxies that exist (tensors cannot be keys themselves, as they do not compare)."""


def make_proxy(tensor: Any, source: Remote) -> Tensor:
    """Turn a tensor into a proxy; it stays the same object, which is returned.

    Args:
        tensor: the tensor.
        source: the tensor of another rank whose values the proxy shows.
    """
    make_proxy_again(tensor, source)
    proxy: Tensor = tensor
    _made[id(proxy)] = proxy
    return proxy


def make_proxy_again(tensor: Any, source: Remote) -> None:
    """Turn a tensor that was made a proxy before, and is ordinary now, into a proxy again.

    Args:
        tensor: the tensor, for which :func:`make_proxy` was called.
        source: the tensor of another rank whose values the proxy shows.
    """
    # (looked up for every weight in every call: `isinstance` asks the metaclass of parameters)
    plain = type(tensor) is nn.Parameter or isinstance(tensor, nn.Parameter)
    tensor.__class__ = RemoteParameter if plain else RemoteTensor
    tensor._source = source


def all_proxies() -> list[Tensor]:
    """Return all tensors that were made proxies and still exist.

    Some of them are possibly ordinary tensors again.
    """
    return list(_made.values())


def make_plain(tensor: Any) -> None:
    """Turn a proxy into an ordinary tensor, with the values that it has here.

    Other tensors stay as they are. It stays the same object.
    """
    # (of every weight in every call of a network: no table of classes is made for each)
    kind = type(tensor)
    if kind is RemoteParameter:
        tensor.__class__ = nn.Parameter
        del tensor._source
    elif kind is RemoteTensor:
        tensor.__class__ = Tensor
        del tensor._source
    else:
        vars(tensor).pop("_source", None)


def read_now(tensor: Tensor) -> Tensor:
    """Return the present values of a proxy as an ordinary tensor, detached.

    Tensors that are no proxies, and proxies that require a gradient, are returned as they are.
    """
    if not isinstance(tensor, _Proxy) or tensor.requires_grad:
        return tensor
    return tensor.numbers()


def source_of(tensor: Any) -> Remote | None:
    """Return the tensor of another rank whose values a proxy shows.

    ``None``: the tensor is no proxy.
    """
    return tensor._source if isinstance(tensor, _Proxy) else None


def writes_to(tensor: Tensor) -> int:
    """Return a number by which to see whether code on this rank has written to a tensor.

    It is another one after a write than before. (A fetch of a proxy's values is no write.)
    """
    source = source_of(tensor)
    with as_they_are():
        return version(tensor) if source is None else source.changed


def _enter_graph(proxies: Sequence[Any]) -> None:
    """Note that autograd has recorded a use of those proxies that are parameters with gradients."""
    for proxy in proxies:
        if isinstance(proxy, RemoteParameter) and proxy.requires_grad:
            proxy._source.table.enter_graph(proxy._source)


def _done(proxies: Sequence[Any]) -> None:
    """Note that an operation has used what it has read of these proxies."""
    for proxy in proxies:
        proxy._source.table.done()


def _same_memory(result: Any, proxies: Sequence[Any]) -> Any:
    """Turn a result that lies in the memory of a proxy (``data``, ``detach()``) into a proxy too.

    A view in autograd's graph stays as it is: its changes show in the parameter's version counter.
    """
    if type(result) is not Tensor or is_wrapped(result):
        return result
    if not result.requires_grad and result.layout is torch.strided:
        # (all empty tensors have the address 0)
        address = result.untyped_storage().data_ptr()
        for proxy in proxies:
            if address and address == proxy.untyped_storage().data_ptr():
                return make_proxy(result, proxy._source)
    return result


def hook_refused(name: str) -> HybridError:
    """Make the error for a hook that code puts on a parameter whose gradient is on another rank.

    Args:
        name: name of the parameter.
    """
    return HybridError(
        f"A hook was put on parameter {name!r} in the middle of a run, but another rank owns it "
        "and its gradient arises there. Put hooks on parameters before the first batch (in "
        "__init__, setup, configure_model or on_fit_start); or read and change parameter.grad "
        "after the backward."
    )


_PLACES = {*getters("device", "is_cuda", "is_cpu", "is_meta", "is_xla"), Tensor.get_device}
_Proxy.looks = LOOKS | {Tensor.is_pinned, Tensor.retain_grad}

_NORMS = {
    F.batch_norm,
    F.instance_norm,
    torch.batch_norm,
    torch.instance_norm,
    torch.native_batch_norm,
    torch.cudnn_batch_norm,
    torch.miopen_batch_norm,
}
"""Operations that change running statistics without counting it in their version counters."""

_HOOKS = {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook}
_GRADIENT: Any = Tensor.grad
_GET_GRADIENT, _SET_GRADIENT = _GRADIENT.__get__, {_GRADIENT.__set__, _GRADIENT.__delete__}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
