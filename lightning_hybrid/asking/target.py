"""Make a network from the options of a command line, and capture a call of it."""

import argparse
import ast
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid._trees import rebuild, tensors_in
from lightning_hybrid.asking.partition_costs import capture_call
from lightning_hybrid.errors import HybridError, PlanError


@dataclass(frozen=True)
class Target:
    """A network that the user has named, and how to make it.

    Attributes:
        name: name of the network for messages, as the user has given it.
        make: function that builds the network.
        inputs: shape and type of each input of a call; empty: those of the network's
            `example_input_array`.
        trainer: arguments of the Trainer in the user's configuration; empty: there is none.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    trainer: Mapping[str, Any]


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a network and its inputs to a parser."""
    parser.add_argument(
        "network",
        nargs="?",
        help="package.module:Name of a class or a function that makes the network, with arguments "
        "if it needs any: models:ResAttNet3D or 'models:ResAttNet3D(depth=34)'",
    )
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="SIZE[:TYPE]",
        help="sizes of an input of the network, the batch of one replica first: 6,1,91,109,91 or, "
        "for tokens, 8,128:int64; once for each input",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="configuration of a LightningCLI: its model and number of devices; where the model "
        "has no class_path, name the class as NETWORK",
    )


def read_target(options: argparse.Namespace) -> Target:
    """Find the network that the user has named; it is not made yet.

    Puts the current folder on ``sys.path``, so that the user's modules are found as with
    ``python -m``.

    Args:
        options: what the parser has made of the options of `add_target_options`.

    Raises:
        PlanError: the options name no network, or the network, its configuration or the type of an
            input does not exist.
    """
    # so that the user's modules can be imported, as with `python -m`
    sys.path.insert(0, str(Path.cwd()))
    config = _read_config(options.config) if options.config else {}
    inputs = tuple(_shape(text) for text in options.input)
    trainer = config.get("trainer") or {}
    if options.network and not options.config:
        return Target(options.network, _maker(options.network), inputs, {})
    if not options.config:
        raise PlanError("name a network, such as models:ResAttNet3D, or give --config FILE")
    model = _with_class(config.get("model"), options.network, f"{options.config}: model")
    name = str(model["class_path"]).rpartition(".")[2]
    return Target(
        name,
        lambda: _network(_instance(model, f"{options.config}: model"), name),
        inputs,
        trainer,
    )


def call_on_paper(target: Target) -> tuple[Any, list[Tensor]]:
    """Capture a call in training mode of a network without memory (on the meta device).

    If that fails, the network is made in memory: see `call_for_real`.

    Args:
        target: the network.

    Returns:
        The graph (a `NetworkGraph`), and the input tensors of the call in the order in which the
        graph takes them.

    Raises:
        PlanError: the network cannot be made, called or captured.
    """
    try:
        # tensors on the meta device take no memory, whatever the size of the network
        with torch.device("meta"):
            network = target.make().train()
            args, kwargs = _arguments(target, network, torch.device("meta"))
        with _quiet():
            return capture_call(network, args, kwargs)
    except PlanError:
        raise
    except Exception:  # some networks need real tensors to be made or called
        return call_for_real(target)


def call_for_real(target: Target) -> tuple[Any, list[Tensor]]:
    """Capture a call in training mode of a network that is made in memory, on the CPU.

    So its partitions can be run and measured.

    Args:
        target: the network.

    Returns:
        The graph (a `NetworkGraph`), and the input tensors of the call in the order in which the
        graph takes them.

    Raises:
        PlanError: the network cannot be made, called or captured.
    """
    try:
        network = target.make().train()
    except HybridError:
        raise
    except Exception as error:
        raise PlanError(f"{target.name} cannot be made: {_said(error)}") from error
    args, kwargs = _arguments(target, network, torch.device("cpu"))
    try:
        with _quiet():
            return capture_call(network, args, kwargs)
    except HybridError:
        raise
    except Exception as error:
        shapes = ", ".join(str(tuple(t.shape)) for _, t in tensors_in((args, kwargs)))
        raise PlanError(
            f"{target.name} cannot be called with {shapes or 'no inputs'}: {_said(error)}"
        ) from error


def make_optimizer(text: str, network: nn.Module) -> Optimizer:
    """Make an optimizer for all parameters of a network, from the option ``--optimizer``.

    Args:
        text: the value of the option, such as `Adam` or `SGD(momentum=0.9)`.
        network: the network.

    Raises:
        PlanError: there is no such optimizer, or it does not take these arguments.
    """
    name, keywords = _call(text, "--optimizer")
    kind = getattr(torch.optim, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)) or kind is Optimizer:
        raise PlanError(f"--optimizer {text}: torch.optim has no {name!r}; write Adam, AdamW, SGD")
    try:
        return kind(network.parameters(), **({"lr": 1e-3} | keywords))
    except (TypeError, ValueError) as error:
        raise PlanError(f"--optimizer {text}: {_said(error)}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, log messages up to ERROR are suppressed: torch logs a traceback for refused calls."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def _maker(text: str) -> Callable[[], nn.Module]:
    """Return a function that makes the network which a text names, such as `models:Net(depth=34)`.

    Args:
        text: ``module:name``, with arguments or without; the name is of a class or function that
            makes a network, or of a network that exists already.

    Raises:
        PlanError: there is nothing of that name, or it is neither of these. (The function that is
            returned raises it if what it makes is no network.)
    """
    module, _, call = text.partition(":")
    if not call:
        raise PlanError(f"{text!r} names no network: write package.module:Name, as models:ResNet")
    name, keywords = _call(call, text)
    found = _attribute(module, name)
    if isinstance(found, nn.Module):
        return lambda: _network(found, text)
    if not callable(found):
        raise PlanError(
            f"{text!r} is {found!r}: a class or function that makes a network is needed"
        )
    return lambda: _network(found(**keywords), text)


def _network(made: Any, name: str) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise PlanError(f"{name} makes a {type(made).__name__}: a torch.nn.Module is needed")
    return made


def _call(text: str, where: str) -> tuple[str, dict[str, Any]]:
    """Parse `Name` or `Name(key=value)`, whose values are Python literals.

    Args:
        text: the text.
        where: where the user has written it, for the error.

    Returns:
        The name; and the keyword arguments by name, empty for a name alone.

    Raises:
        PlanError: the text has another form.
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, {}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            values = {k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg}
            return node.func.id, values
    except (SyntaxError, ValueError):
        pass
    raise PlanError(f"{where}: write a name, or a name with arguments as in Name(depth=34)")


def _attribute(module: str, name: str) -> Any:
    try:
        found = import_module(module)
    except (ImportError, ValueError) as error:  # the latter of an empty name
        raise PlanError(
            f"no module {module!r} can be imported from here or from the installed packages: "
            f"{_said(error)}"
        ) from error
    if not hasattr(found, name):
        raise PlanError(f"module {module!r} has no {name!r}")
    return getattr(found, name)


def _shape(text: str) -> tuple[tuple[int, ...], torch.dtype]:
    sizes, _, kind = text.partition(":")
    try:
        shape = tuple(int(size) for size in sizes.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise PlanError(f"--input {text}: write sizes of at least 1, as 6,1,91,109,91")
    dtype = getattr(torch, kind, None) if kind else torch.float32
    if not isinstance(dtype, torch.dtype):
        raise PlanError(f"--input {text}: torch has no type {kind!r}; write float32 or int64")
    return shape, dtype


def _arguments(
    target: Target, network: nn.Module, device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make arguments for a call of a network: zeros of the shapes and types that it wants.

    Args:
        target: the network as the user has named it, with the wanted inputs (`Target.inputs`).
        network: the network that was made; its `example_input_array` is used if `target` has none.
        device: device for the tensors.

    Returns:
        The positional arguments, and the keyword arguments by name.

    Raises:
        PlanError: neither the user nor the network says what the inputs are.
    """

    def like(value: Tensor) -> Tensor:
        return torch.zeros(value.shape, dtype=value.dtype, device=device)

    if target.inputs:
        tensors = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in target.inputs]
        return tuple(tensors), {}
    example = getattr(network, "example_input_array", None)
    if example is None:
        raise PlanError(
            f"{target.name} has no example_input_array, so --input is needed: the sizes of its "
            "input, the batch of one replica first, as --input 6,1,91,109,91"
        )
    # values do not matter to a capture, and those of an example may be on another device
    example = rebuild(example, lambda v: like(v) if isinstance(v, Tensor) else v)
    if isinstance(example, dict):
        return (), example
    return (tuple(example) if isinstance(example, list | tuple) else (example,)), {}


def _read_config(path: str) -> dict[str, Any]:
    try:
        record = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise PlanError(f"no configuration can be read from {path!r}: {_said(error)}") from error
    if not isinstance(record, dict) or "model" not in record:
        raise PlanError(f"{path} is no configuration of a LightningCLI: it has no 'model'")
    return record


def _with_class(section: Any, network: str | None, where: str) -> dict[str, Any]:
    """Return a section of a configuration with a `class_path`, added if there is none.

    Args:
        section: the section as YAML gives it: a dictionary with `class_path` and possibly
            `init_args`, or with the arguments alone; None: it is empty.
        network: the class that the user has named on the command line, as `module:Name`; it is
            taken if the section has none. None: no class was named.
        where: name of the section, for the error.

    Returns:
        The section as a dictionary with `class_path`, and with `init_args` if it has arguments.

    Raises:
        PlanError: there is no `class_path`, and no class was named.
    """
    if isinstance(section, dict) and "class_path" in section:
        return section
    if not network:
        raise PlanError(
            f"{where} has no class_path: name the class before --config, as "
            "models:ResAttNetClassifier"
        )
    return {"class_path": network.replace(":", "."), "init_args": section or {}}


def _instance(value: Any, where: str) -> Any:
    """Make the objects that a value of a configuration describes.

    Args:
        value: a section with `class_path` and `init_args`, of which an object is made; a list or
            dict, which may have such sections inside; or any other value, which is returned.
        where: name of the section, for the error.

    Returns:
        The value, with an object in place of each section.

    Raises:
        PlanError: a class does not exist, or does not take these arguments.
    """
    if isinstance(value, list):
        return [_instance(one, where) for one in value]
    if not isinstance(value, dict):
        return value
    if "class_path" not in value:
        return {key: _instance(one, where) for key, one in value.items()}
    module, _, name = str(value["class_path"]).rpartition(".")
    made = _attribute(module, name)
    arguments = _instance(value.get("init_args") or {}, where)
    try:
        return made(**arguments)
    except TypeError as error:
        raise PlanError(f"{where}: {_said(error)}") from error


def _said(error: BaseException) -> str:
    """The message of an error, in one line."""
    return " ".join(str(error).split()) or type(error).__name__
