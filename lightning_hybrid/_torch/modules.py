"""Modules: their tables of tensors and of hooks, and functions inside torch's own layers."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_hybrid._torch.private_names import find

# the base class of every batch normalisation, SyncBatchNorm too; there is no public one
if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
else:
    BatchNorm = find("torch.nn.modules.batchnorm:_BatchNorm")

_VF = find("torch:_VF", SimpleNamespace())

# the function by which torch's transformers find out whether a mask is the causal one
detects_causal_mask: Any = find("torch.nn.modules.transformer:_detect_is_causal_mask")

__all__ = ["BatchNorm", "detects_causal_mask"]


def tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tables of a module's parameters and of its buffers (``setattr`` refuses other types)."""
    return module._parameters, module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The table of a module's parts (``named_children`` leaves out what is there twice)."""
    return module._modules


def outline(module: nn.Module, known: dict[int, nn.Module] | None = None) -> nn.Module:
    """A module of the parts that a module has now, with the tables of tensors that are theirs.

    Hooks of the user's may replace, wrap or delete parts: this one keeps them under the names of
    now, and shows the tensors that they have later.

    Args:
        module: the module.
        known: by ``id``, the outlines of its parts that are made already.
    """
    known = {} if known is None else known
    found = known.get(id(module))
    if found is None:
        found = known[id(module)] = nn.Module()
        parameters, buffers = tables(module)
        parts = {
            key: None if part is None else outline(part, known)  # (a part may be empty, so false)
            for key, part in children_of(module).items()
        }
        vars(found).update(_parameters=parameters, _buffers=buffers, _modules=parts)
    return found


def is_compiled(module: nn.Module) -> bool:
    """Whether a module, or a part of it, was compiled by `torch.compile` or `nn.Module.compile`.

    ``compile`` leaves its mark in an attribute; there is no public way to ask.
    """
    # looked up here, since a process that only serves loads no TorchDynamo
    optimized = find("torch._dynamo:OptimizedModule", ())
    return any(
        isinstance(part, optimized) or part._compiled_call_impl is not None
        for part in module.modules()
    )


def check_dimensions(norm: BatchNorm, value: Tensor) -> None:
    """Check that a value has the dimensions that this class of batch normalisation wants.

    Raises:
        ValueError: it has not.
    """
    norm._check_input_dim(value)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether full backward hooks are on a module; there is no public way to ask."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def drop_hooks(module: nn.Module, of: tuple[str, ...]) -> None:
    """Remove forward hooks whose functions are defined in certain packages.

    Args:
        module: the module, whose submodules are looked at too.
        of: beginnings of the names of the Python modules that define these functions.
    """
    for part in module.modules():
        for table in (part._forward_hooks, part._forward_pre_hooks):
            for key, hook in list(table.items()):
                function = getattr(hook, "func", hook)
                owner = getattr(function, "__self__", function)
                name = getattr(owner, "__module__", None) or type(owner).__module__
                if str(name).startswith(of):
                    del table[key]


def recurrent_functions() -> Any:
    """The namespace in which `torch.nn.LSTM` and the like look up their operations."""
    return _VF
