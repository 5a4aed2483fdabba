"""The code of a stage as plain data, which is sent to another process and becomes a function there.

An ``fx.GraphModule`` cannot be sent in general: unpickling one traces it again, which fails on code
that ``fx`` cannot trace (factory functions with symbolic sizes, ``vmap``). So the nodes are sent as
data, with the qualified names of the functions that they call.
"""

from __future__ import annotations

import builtins
import importlib
import pickle
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from lightning_hybrid._torch.graphs import (
    is_region,
    modules_of_operator,
    names_of_operator,
    numpy_from_parts,
    parts_of_numpy,
    qualified_name_by_fx,
)
from lightning_hybrid.errors import NetworkError


@dataclass(frozen=True)
class _NodeName:
    """Stands for a node among the arguments of another one in a `GraphCode`.

    Attributes:
        name: of the node in its graph.
    """

    name: str


@dataclass(frozen=True)
class _Nested:
    """Stands for a graph that an operation takes (the body of a checkpointed region).

    Attributes:
        code: the graph as plain data.
    """

    code: GraphCode


@dataclass(frozen=True)
class _Constant:
    """A tensor that a graph holds, as it is sent to another process.

    Attributes:
        tensor: the tensor, on the CPU.
        stays: whether it is to stay on the CPU there, as it did at the capture while other tensors
            were on another device: operations that take lengths or sizes as tensors want them
            there.
    """

    tensor: Tensor
    stays: bool


class _Here:
    """Stands for the device of the rank that runs the code, among arguments in a `GraphCode`."""


@dataclass(frozen=True)
class GraphCode:
    """An fx graph as plain data, which can be pickled.

    Attributes:
        nodes: per node, in order: (kind, name, target, positional arguments, keyword arguments).
            The target of a function is its `qualified_name`; among arguments other nodes are
            `_NodeName`, and the device of the capture is `_Here`.
        attributes: (name, value) of each tensor (`_Constant`), nested graph (`_Nested`) or other
            value that a ``get_attr`` node names.
    """

    nodes: tuple[tuple[str, str, Any, Any, Any], ...]
    attributes: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, graph: fx.Graph, attributes: Mapping[str, Any], device: torch.device) -> GraphCode:
        """Turn an fx graph into plain data.

        Args:
            graph: its nodes must be operations of torch, or functions that can be found by name.
            attributes: the values of its ``get_attr`` nodes, by name.
            device: the device of the capture; on another rank that rank's device replaces it.

        Raises:
            NetworkError: a function cannot be found by its name.
        """

        def leaf(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return _NodeName(value.name)
            is_here = isinstance(value, torch.device) and _same(value, device)
            return _Here() if is_here else value

        nodes = []
        for node in graph.nodes:
            # (by name: an operator is an object of its process, and cannot be pickled)
            target = node.target if isinstance(node.target, str) else qualified_name(node.target)
            if is_region(node):
                target = qualified_name(checkpointed)
            args, kwargs = (fx.node.map_aggregate(each, leaf) for each in (node.args, node.kwargs))
            nodes.append((node.op, node.name, target, args, kwargs))
        kept = {str(node.target) for node in graph.find_nodes(op="get_attr")}
        held = ((name, value) for name, value in attributes.items() if name in kept)
        return cls(tuple(nodes), tuple((name, _travelling(v, device)) for name, v in held))

    def graph(self, device: torch.device) -> tuple[fx.Graph, dict[str, Any]]:
        """Make an fx graph again.

        Args:
            device: where it is to run.

        Returns:
            The graph, and the values of its ``get_attr`` nodes by name.

        Raises:
            NetworkError: a function is not there on this rank.
        """
        graph = fx.Graph()
        made: dict[str, fx.Node] = {}

        def leaf(value: Any) -> Any:
            if isinstance(value, _NodeName):
                return made[value.name]
            return device if isinstance(value, _Here) else value

        for op, name, target, args, kwargs in self.nodes:
            # methods and placeholders are names already
            found = function_named(target) if op == "call_function" else target
            given, named = (fx.node.map_aggregate(each, leaf) for each in (args, kwargs))
            made[name] = graph.create_node(op, found, given, named, name)
        return graph, {name: _arrived(value, device) for name, value in self.attributes}

    def function(
        self, device: torch.device, without: Collection[Callable[..., Any]] = ()
    ) -> Callable[..., Any]:
        """Make a Python function of the graph, which frees each tensor after its last use.

        Args:
            device: where it is to run.
            without: functions that ``torch.compile`` is to leave uncompiled.

        Returns:
            The function: it takes the values of the placeholders in order, and returns what the
            graph returns.

        Raises:
            NetworkError: a function that it calls is not there on this rank.
        """
        graph, attributes = self.graph(device)
        root = _holder(attributes)
        code = graph.python_code("self")
        scope: dict[str, Any] = {
            name: torch.compiler.disable(value) if any(value is f for f in without) else value
            for name, value in code.globals.items()
        }
        exec(compile(code.src, "<stage>", "exec"), scope)
        forward = scope["forward"]
        return lambda *values: forward(root, *values)

    def passed_on(self) -> list[int | None]:
        """For each output, the number of the input that it is; ``None``: operations compute it.

        Inputs are all placeholders, counted from 0: of a stage first its parameters and buffers.
        """
        names = [name for op, name, *_ in self.nodes if op == "placeholder"]
        numbers = {_NodeName(name): number for number, name in enumerate(names)}
        return [numbers.get(output) for output in self._outputs()]

    def used_inputs(self) -> list[int]:
        """The numbers of the inputs that operations take, as in `passed_on`, rising.

        All other inputs are passed on, or not used at all.
        """
        used = self._used()
        names = (name for op, name, *_ in self.nodes if op == "placeholder")
        return [number for number, name in enumerate(names) if name in used]

    def shape(self) -> Hashable:
        """Make a key of the operations, by which equal stages are found and measured once.

        It is equal for graphs that differ only in the names of their nodes, and in inputs that they
        pass on without using them.
        """
        used, passed_on = self._used(), self.passed_on()
        nodes = [n for n in self.nodes[:-1] if n[0] != "placeholder" or n[1] in used]
        numbers = {name: index for index, (_, name, *_) in enumerate(nodes)}

        def leaf(value: Any) -> Any:
            if isinstance(value, _NodeName):
                return f"%{numbers[value.name]}"
            return "here" if isinstance(value, _Here) else value

        computed = [leaf(o) for o, number in zip(self._outputs(), passed_on) if number is None]
        return tuple(computed), tuple(
            (
                op,
                "" if op == "placeholder" else target,
                *(repr(fx.node.map_aggregate(each, leaf)) for each in (args, kwargs)),
            )
            for op, _, target, args, kwargs in nodes
        )

    def _outputs(self) -> list[Any]:
        """The outputs of the graph; its last node returns them as one list."""
        _, _, _, (outputs,), _ = self.nodes[-1]
        return list(outputs)

    def _used(self) -> set[str]:
        """The names of the nodes that operations take as arguments."""
        used = set[str]()

        def leaf(value: Any) -> Any:
            if isinstance(value, _NodeName):
                used.add(value.name)
            return value

        for *_, args, kwargs in self.nodes[:-1]:
            fx.node.map_aggregate((args, kwargs), leaf)
        return used

    def check(self) -> None:
        """Check that workers can run the code: they can import modules, but not the user's script.

        Raises:
            NetworkError: an argument cannot be pickled, or something is defined in the script
                itself.
        """
        for _, name, target, args, kwargs in self.nodes:
            try:  # one by one, to say which it is
                packed = pickle.dumps((args, kwargs))
            except Exception as error:
                raise NetworkError(
                    f"operation {name!r} ({target}) takes an argument that cannot travel to "
                    f"another process: {error}"
                ) from error
            if _is_of_script(target) or b"__main__" in packed:
                raise NetworkError(
                    f"operation {name!r} ({target}) is defined in the script itself, or takes an "
                    "object of such a class. The script runs on drivers alone, so workers do not "
                    "have it. Move it to a module, which the script imports."
                )


def checkpointed(body: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run a region under activation checkpointing; returns what ``body`` returns.

    In the code of stages this replaces TorchDynamo's own operation, which does not restore random
    generators for the second run: it leaves that to a compiler.

    Args:
        body: the region, as a function.
        args: its inputs, among them the parameters that it reads.
        options: as in `torch.utils.checkpoint.checkpoint`. With ``use_reentrant=True`` the region
            runs without gradients: only regions that get none have this option here.
    """
    if options.pop("use_reentrant", False):
        with torch.no_grad():
            return body(*args)
    # `checkpoint` is given only what cannot change before the backward (counters of batches do)
    kept = [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad]

    def run(*values: Any) -> Any:
        given = dict(zip(kept, values))
        return body(*(given.get(i, a) for i, a in enumerate(args)))

    return checkpoint(run, *(args[i] for i in kept), use_reentrant=False, **options)


def held_by(module: fx.GraphModule) -> dict[str, Any]:
    """The values of a graph module's ``get_attr`` nodes (constants, nested graphs), by name."""
    names = [str(node.target) for node in module.graph.find_nodes(op="get_attr")]
    return {name: attrgetter(name)(module) for name in names}


def _holder(attributes: Mapping[str, Any]) -> nn.Module:
    """Make a module with these attributes, by dotted name, for the code of a graph to read."""
    root = nn.Module()
    for name, value in attributes.items():
        owner = root
        *path, last = name.split(".")
        for part in path:
            if not hasattr(owner, part):
                setattr(owner, part, nn.Module())
            owner = getattr(owner, part)
        setattr(owner, last, value)
    return root


def _same(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (one.index or 0) == (other.index or 0)


def _travelling(value: Any, device: torch.device) -> Any:
    if isinstance(value, fx.GraphModule):
        return _Nested(GraphCode.of(value.graph, held_by(value), device))
    if isinstance(value, Tensor):
        stays = value.device.type == "cpu" != device.type
        return _Constant(value.detach().cpu(), stays)
    return value


def _arrived(value: Any, device: torch.device) -> Any:
    if isinstance(value, _Nested):
        graph, attributes = value.code.graph(device)
        return fx.GraphModule(_holder(attributes), graph)
    if isinstance(value, _Constant):
        return value.tensor if value.stays else value.tensor.to(device)
    return value


# ---------------------------------------------------------------- names of functions


def qualified_name(function: Any) -> str:
    """A text for a function that a node calls, by which `function_named` finds it in any process.

    Mostly it is ``module:name``; operators and functions of NumPy have longer forms.

    Raises:
        NetworkError: another process would not find it by any name.
    """
    of_numpy = parts_of_numpy(function)
    if of_numpy is not None:
        kind, called = of_numpy
        return f"{_NUMPY}{kind}:{called if isinstance(called, str) else qualified_name(called)}"
    # a name is good only if it leads back to this very function
    for name in _candidates(function):
        try:
            if function_named(name) is function or function_named(name) == function:
                return name
        except (ImportError, AttributeError, NetworkError):
            continue
    if getattr(function, "__name__", "") == "set_":
        raise NetworkError(
            "the network gives a tensor other memory in its forward (`tensor.data = ...`), which "
            "tensors on other ranks do not follow. Change its values: tensor.copy_(...)."
        )
    raise NetworkError(
        f"the network calls {function!r}, which another process cannot find by its name. Make it a "
        "function of a module, or an operator (torch.library.custom_op)."
    )


_OTHER_PLACES = (
    "torch",
    "torch.nn.functional",
    "torch._C._nn",
    "torch._C",
    "_operator",
    "torch._numpy",
)
"""Modules to look for functions whose ``__module__`` names another module."""


def _candidates(function: Any) -> Iterable[str]:
    for operator in names_of_operator(function):
        yield from (f"{m}{_REGISTERS}{operator}" for m in modules_of_operator(function))
        yield operator
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", "")
    module = getattr(function, "__module__", None)
    if module:
        yield f"{module}:{name}"
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type):
        yield f"{owner.__module__}:{owner.__qualname__}.{function.__name__}"
    for known in _OTHER_PLACES:
        yield f"{known}:{getattr(function, '__name__', name)}"
    head, _, tail = qualified_name_by_fx(function).rpartition(".")
    yield f"{head}:{tail}"
    # a module may have it under another name than its `__name__` (NumPy's `power` is a `pow`)
    here = vars(sys.modules.get(module or "", builtins))
    yield from (f"{module}:{other}" for other, value in here.items() if value is function)


_NUMPY = "numpy as torch:"
_REGISTERS = " registers "


def _is_of_script(target: str) -> bool:
    return target.startswith(("__main__:", f"__main__{_REGISTERS}"))


def function_named(name: str) -> Any:
    """Find the function that has a name from `qualified_name`; may import its module.

    Raises:
        NetworkError: no function of this name is on this rank.
    """
    if name.startswith(_NUMPY):
        kind, _, called = name.removeprefix(_NUMPY).partition(":")
        return numpy_from_parts(kind, function_named(called) if ":" in called else called)
    registers, _, operator = name.rpartition(_REGISTERS)
    module, _, path = operator.partition(":")
    try:
        if registers:  # importing it puts the operator into `torch.ops`
            importlib.import_module(registers)
        value: Any = builtins if module == "builtins" else importlib.import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        operator = path.removeprefix("ops.").replace(".", "::", 1)
        raise NetworkError(
            f"the network calls {operator if path.startswith('ops.') else f'{module}.{path}'}, "
            "which is not there on this rank. Define it, and register operators, where a module is "
            "imported: a worker imports the module, and does not run the script"
        ) from error
    return value


def stable(value: Any) -> str:
    """A text for a value in a graph that is the same in every process, for fingerprints.

    (It has no addresses of objects: a function is shown by its `qualified_name`.)
    """
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, tuple | list):
        return f"({', '.join(stable(part) for part in value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {stable(v)}' for k, v in value.items())}}}"
    if callable(value):
        try:
            return qualified_name(value)
        except NetworkError:
            return type(value).__qualname__
    return repr(value)
