"""TorchDynamo guards what code has found; here also what it has looked for in vain.

``try: scale = self.table["scale"]`` with ``except KeyError: scale = 1.0`` is captured with the 1.
In later calls TorchDynamo asks whether ``table`` is the same kind of object, not whether the key
is there by now: the graph with the 1 would be used for ever. The same is true of attributes of
objects, classes, modules and functions, of ``vars(object)``, of attributes of dictionaries, of
``os.getenv``, of hooks on all modules, and of what a base class or ``__getattr__`` gives as long as
the class or the object itself has none.
"""

import os
from collections.abc import Callable
from functools import partial
from types import FunctionType, MemberDescriptorType
from typing import Any

from torch import Tensor
from torch._dynamo import symbolic_convert
from torch._dynamo.exc import ObservedAttributeError
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, GlobalStateSource, TypeDictSource, TypeSource
from torch._dynamo.variables import nn_module
from torch._dynamo.variables.base import NO_SUCH_SUBOBJ
from torch._dynamo.variables.dicts import ConstDictVariable, DunderDictVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.misc import PythonModuleVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.user_defined import (
    UserDefinedClassVariable,
    UserDefinedObjectVariable,
)
from torch.nn import Module
from torch.nn.modules import module as modules

from lightning_hybrid._torch.containers import refuse_to_follow

_HOOKS_ON_ALL_MODULES = (
    modules._global_forward_pre_hooks,
    modules._global_forward_hooks,
    modules._global_backward_pre_hooks,
    modules._global_backward_hooks,
)
_NOWHERE = object()
_CONSTANT = (bool, int, float, str, type(None))


def _find_key(own: Any, self: Any, tx: Any, key: Any) -> Any:
    if key not in self:
        self.install_dict_contains_guard(tx, [key])
    return own(self, tx, key)


def _find_in_object(own: Any, self: Any, tx: Any, name: str) -> Any:
    written = tx.output.side_effects.has_pending_mutation_of_attr
    if self.source is None or written(self, name) or written(self, "__dict__"):
        return own(self, tx, name)
    of_class = self.lookup_class_mro_attr(name)
    if not (of_class is NO_SUCH_SUBOBJ or isinstance(of_class, MemberDescriptorType)):
        return own(self, tx, name)
    attributes = getattr(self.value, "__dict__", None)
    if isinstance(self.value, dict) and attributes is not None:
        if isinstance(attributes.get(name), _CONSTANT):
            _guard(self.source, _same_attribute, name=name)
        elif not self.value and not isinstance(attributes[name], Tensor):
            refuse_to_follow(f"{type(self.value).__name__}.{name}, of an empty dictionary,")
        return own(self, tx, name)
    # (a guard must not run methods of the user's)
    runs_code = self._object_has_getattribute or isinstance(self._check_for_getattr(), FunctionType)
    if runs_code and not _is_plain_module(self.value):
        if attributes is not None and name not in attributes:
            _guard(self.source, GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr=name)
        return own(self, tx, name)
    try:
        return own(self, tx, name)
    except ObservedAttributeError:
        _guard(self.source, GuardBuilder.HASATTR, attr=name)
        raise


def _same_attribute(builder: Any, guard: Any, name: str) -> None:
    """A dictionary that has attributes (of a class derived from `dict`) has this one as it was.

    TorchDynamo makes guards of such attributes, and does not ask them where the dictionary is empty
    (``DictGuardManager.check_nopybind`` returns early).
    """
    was = vars(builder.get(guard)).get(name, _NOWHERE)

    def is_same(dictionary: object) -> bool:
        now = vars(dictionary).get(name, _NOWHERE)
        return type(now) is type(was) and now == was

    code, names = f"___is_same({builder.arg_ref(guard)})", {"___is_same": is_same}
    builder.add_python_lambda_leaf_guard_to_root([code], [f"{code}  # {name}"], names)


def _is_plain_module(value: object) -> bool:
    kind: Any = type(value)
    return (
        isinstance(value, Module)
        and kind.__getattr__ is Module.__getattr__
        and kind.__getattribute__ is object.__getattribute__
    )


def _find_in_base(own: Any, self: Any, tx: Any, name: str) -> Any:
    source = own(self, tx, name)
    of_class = isinstance(self, UserDefinedClassVariable)
    kind, its = (self.value, self.source) if of_class else (type(self.value), self.cls_source)
    known = tx.output.guarded_mro_absent_keys
    if name in vars(kind) or kind.__module__.startswith("torch.") or (id(kind), name) in known:
        return source
    known.add((id(kind), name))
    _guard(TypeDictSource(its), GuardBuilder.DICT_NOT_CONTAINS, key=name)
    return source


def _find_attribute(own: Any, self: Any, tx: Any, name: str) -> Any:
    try:
        return own(self, tx, name)
    except ObservedAttributeError:
        _guard_attribute(self, name)
        raise


def _ask_for_attribute(own: Any, self: Any, tx: Any, name: str) -> Any:
    _guard_attribute(self, name)
    return own(self, tx, name)


def _guard_attribute(variable: Any, name: str) -> None:
    """Of a class, a module or a function."""
    if isinstance(variable, PythonModuleVariable) and variable.is_torch:
        return
    is_function = isinstance(variable, UserFunctionVariable)
    source = variable.get_source() if is_function else variable.source
    if source is not None:
        _guard(source, GuardBuilder.HASATTR, attr=name)


def _ask_for_key_of_attributes(own: Any, self: Any, tx: Any, keys: Any) -> None:
    ConstDictVariable.install_dict_contains_guard(self, tx, keys)


def _list_attributes(own: Any, self: Any) -> None:
    ConstDictVariable.install_dict_keys_match_guard(self)


def _call_of_attributes(own: Any, self: Any, tx: Any, name: str, *arguments: Any) -> Any:
    if name == "copy":
        self.install_dict_keys_match_guard()
    return own(self, tx, name, *arguments)


def _same_hooks_on_all_modules(builder: Any, guard: Any) -> None:
    """No hook on all modules of the process has come or gone: each has its number."""
    was = [[*hooks] for hooks in _HOOKS_ON_ALL_MODULES]

    def are_same() -> bool:
        return [[*hooks] for hooks in _HOOKS_ON_ALL_MODULES] == was

    code, names = "___are_same()", {"___are_same": are_same}
    builder.add_python_lambda_leaf_guard_to_root([code], [f"{code}  # hooks on modules"], names)


def _watch_forward(own: Any, source: Any, module: Any) -> Any:
    """Another `forward` of a module's class is seen; classes of torch's keep theirs."""
    _guard(GlobalStateSource(), _same_hooks_on_all_modules)
    kind = type(module)
    if source is not None and not kind.__module__.startswith("torch."):
        _guard(AttrSource(TypeSource(source), "forward"), GuardBuilder.CLOSURE_MATCH)
    return own(source, module)


def _never_changes(own: Any, module: Any) -> bool:
    """Whether what functions of a standard module read there needs no guards: not `os.environ`."""
    return bool(own(module)) and module is not os


def _guard(source: Any, kind: Any, **what: str) -> None:
    install_guard(source.make_guard(partial(kind, **what) if what else kind))


ABSENT_NAMES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (ConstDictVariable, "getitem_const_raise_exception_if_absent", _find_key),
    (UserDefinedObjectVariable, "generic_getattr", _find_in_object),
    (UserDefinedObjectVariable, "get_source_by_walking_mro", _find_in_base),
    (UserDefinedClassVariable, "get_source_by_walking_mro", _find_in_base),
    (UserDefinedClassVariable, "var_getattr", _find_attribute),
    (PythonModuleVariable, "var_getattr", _find_attribute),
    (PythonModuleVariable, "call_obj_hasattr", _ask_for_attribute),
    (UserFunctionVariable, "var_getattr", _find_attribute),
    (UserFunctionVariable, "call_obj_hasattr", _ask_for_attribute),
    (DunderDictVariable, "install_dict_contains_guard", _ask_for_key_of_attributes),
    (DunderDictVariable, "install_dict_keys_match_guard", _list_attributes),
    (DunderDictVariable, "call_method", _call_of_attributes),
    (TensorVariable, "var_getattr", _find_attribute),
    (nn_module, "guard_to_detect_forward_monkeypatching", _watch_forward),
    (symbolic_convert, "is_stdlib", _never_changes),
)
"""What takes the place of methods and functions of TorchDynamo; see `exchanged_methods`."""
