"""Modules: their dicts of tensors, submodules and hooks, and functions inside torch's layers."""

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
    """Return the dicts in which a module keeps its own parameters and its own buffers, by name.

    An entry may be replaced by a tensor of any type; ``setattr`` refuses some.
    """
    return module._parameters, module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dict in which a module keeps its submodules, by name.

    Unlike ``named_children`` it has a submodule under each of its names, and empty places.
    """
    return module._modules


def outline(module: nn.Module, known: dict[int, nn.Module] | None = None) -> nn.Module:
    """Make a module that keeps the present structure of another one, and shares its tensors.

    The user's hooks may replace, wrap or delete submodules later. The outline keeps the tree of
    submodules as it is now. The dicts of parameters and buffers are shared, so it also shows
    tensors that replace others later.

    Args:
        module: the module.
        known: outlines that are made already, by ``id`` of the submodule; for the recursion.
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
    """Whether a module or one of its submodules was compiled, by `torch.compile` or its method.

    There is no public way to ask; both leave marks on modules.
    """
    # looked up here, since a process that only serves loads no TorchDynamo
    optimized = find("torch._dynamo:OptimizedModule", ())
    return any(
        isinstance(part, optimized) or part._compiled_call_impl is not None
        for part in module.modules()
    )


def check_dimensions(norm: BatchNorm, value: Tensor) -> None:
    """Check that an input has the number of dimensions that a batch normalisation wants.

    Args:
        norm: the batch normalisation.
        value: the input.

    Raises:
        ValueError: it has another number.
    """
    norm._check_input_dim(value)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module itself, not its submodules, has backward hooks or pre-hooks of any kind.

    There is no public way to ask.
    """
    return bool(module._backward_hooks or module._backward_pre_hooks)


def drop_hooks(module: nn.Module, of: tuple[str, ...]) -> None:
    """Remove forward hooks, and forward pre-hooks, that are defined in certain packages.

    Args:
        module: the module; hooks on its submodules are removed too.
        of: beginnings of the names of the Python modules that define the hooks to remove.
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
    """Return the namespace in which `torch.nn.LSTM` and the like look up their operations.

    Functions in it can be replaced.
    """
    return _VF
