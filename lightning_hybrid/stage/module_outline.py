"""The names and shapes of a module, from which a process without its classes makes a shell.

A worker computes with the code of stages, which only looks up parts of the module and their tensors
by name. So a shell replaces the module there: its parts are plain modules, except for layers that
the engine treats in a special way (batch normalisation, sparse embeddings), and its tensors have no
memory until their values arrive.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.modules import BatchNorm, tables
from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.remote import vacate


@dataclass(frozen=True)
class _TensorOutline:
    """A parameter or a buffer without its numbers.

    Attributes:
        names: its dotted names in the module; a tied tensor has several.
        shape: its shape.
        stride: its strides in memory, in numbers.
        dtype: the type of its numbers.
        parameter: whether it is a parameter.
        trained: whether it requires a gradient.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    parameter: bool
    trained: bool

    def shell(self) -> Tensor:
        """Make a parameter or buffer of this shape and type, without memory."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        vacate(tensor)
        return nn.Parameter(tensor, requires_grad=self.trained) if self.parameter else tensor


@dataclass(frozen=True)
class _PartOutline:
    """A part of a module without its code.

    Attributes:
        name: its dotted name in the module.
        momentum: for a batch normalisation, a tuple with its momentum (``None``: it takes a
            cumulative average); for any other layer, an empty tuple.
        sparse: whether it is an embedding whose gradients are sparse.
    """

    name: str
    momentum: tuple[float | None, ...] = ()
    sparse: bool = False

    @classmethod
    def of(cls, name: str, part: nn.Module) -> "_PartOutline":
        """Make the outline of a part of a module, whose dotted name there is ``name``."""
        momentum = (part.momentum,) if isinstance(part, BatchNorm) else ()
        embeds = isinstance(part, nn.Embedding | nn.EmbeddingBag)
        return cls(name, momentum, sparse=embeds and bool(part.sparse))

    def shell(self) -> nn.Module:
        """Make a module of this kind. The caller must replace the tensors that it has."""
        if self.momentum:
            return nn.BatchNorm1d(1, momentum=self.momentum[0])
        return nn.Embedding(1, 1, sparse=True) if self.sparse else nn.Module()


@dataclass(frozen=True)
class ModuleOutline:
    """What a module consists of, without code and numbers.

    Attributes:
        parts: its submodules, each before the ones inside of it.
        tensors: its dense parameters and buffers.
        others: by name, its buffers that are not dense, with their numbers, on the CPU.
    """

    parts: tuple[_PartOutline, ...]
    tensors: tuple[_TensorOutline, ...]
    others: dict[str, Tensor]

    @classmethod
    def of(cls, module: nn.Module) -> "ModuleOutline":
        """Make the outline of a module as it is now."""
        named = (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
        same: dict[int, tuple[Tensor, list[str]]] = {}
        for name, tensor in named:
            same.setdefault(id(tensor), (tensor, []))[1].append(name)
        named_parts = module.named_modules(remove_duplicate=False)
        parts = [_PartOutline.of(name, part) for name, part in named_parts if name]
        with as_they_are():
            dense = [pair for pair in same.values() if pair[0].layout is torch.strided]
            outlines = [_outline(tensor, names) for tensor, names in dense]
            others = [pair for pair in same.values() if pair[0].layout is not torch.strided]
        found = {name: tensor.detach().cpu() for tensor, names in others for name in names}
        return cls(tuple(parts), tuple(outlines), found)

    def shell(self) -> nn.Module:
        """Make a module with parts and tensors of these names; dense tensors have no memory."""
        module = nn.Module()
        for part in self.parts:
            owner, _, name = part.name.rpartition(".")
            module.get_submodule(owner).add_module(name, shell := part.shell())
            for tensors in tables(shell):  # (the outlines of tensors add them)
                tensors.clear()
        for outline in self.tensors:
            tensor = outline.shell()
            for name in outline.names:
                _register(module, name, tensor)
        for name, tensor in self.others.items():
            _register(module, name, tensor)
        return module


def _outline(tensor: Tensor, names: Iterable[str]) -> _TensorOutline:
    return _TensorOutline(
        names=tuple(names),
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        dtype=tensor.dtype,
        parameter=isinstance(tensor, nn.Parameter),
        trained=tensor.requires_grad,
    )


def _register(module: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, key = name.rpartition(".")
    part = module.get_submodule(owner)
    if isinstance(tensor, nn.Parameter):
        part.register_parameter(key, tensor)
    else:
        part.register_buffer(key, tensor)
