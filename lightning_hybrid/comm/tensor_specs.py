"""Descriptions of tensors and of calls of a network, which a receiver needs before tensors come.

In the first call with a `CallKey`, specs of activations travel from stage to stage in a
`protocol.Header`, which ``stage/forward_pass.py`` sends and receives.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lightning_hybrid.comm.call_precision import CallPrecision
from lightning_hybrid.remote import with_memory


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, type and strides of a tensor that is sent.

    The result of an operation possibly depends on strides: ``view`` and ``as_strided`` read them,
    and convolutions choose an algorithm by them. So the receiver's tensor has its dimensions in the
    same order in memory as the sender's, but without gaps between the numbers.

    Attributes:
        shape: sizes.
        dtype: element type.
        requires_grad: whether the sender wants its gradient back.
        strides: strides without gaps, in numbers; ``None`` for a contiguous tensor.
        on_cpu: whether the tensor is on the CPU. Then it is on the CPU on every rank, whatever the
            device of the stages: a state of a generator, sequence lengths, a Python number.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    strides: tuple[int, ...] | None = None
    on_cpu: bool = False

    @classmethod
    def of(cls, tensor: Tensor, *, gradient: bool = True) -> "TensorSpec":
        """Make the spec of ``tensor``.

        Args:
            tensor: the tensor to send.
            gradient: whether its gradient comes back if it requires one; else ``requires_grad`` is
                false.
        """
        strides = (
            None if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
        )
        wants = gradient and tensor.requires_grad
        on_cpu = tensor.device.type == "cpu"
        return cls(tuple(tensor.shape), tensor.dtype, wants, strides, on_cpu)

    def empty(self, device: torch.device) -> Tensor:
        """Make an uninitialised tensor of this spec, on ``device`` unless it stays on the CPU."""
        device = torch.device("cpu") if self.on_cpu else device
        if self.strides is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def empty_in_own_memory(self) -> Tensor:
        """Make an uninitialised CPU tensor of this spec.

        Its memory goes back to the system as soon as the tensor is dropped.
        """
        meta = replace(self, on_cpu=False).empty(torch.device("meta"))
        return with_memory(meta, torch.device("cpu"))

    def zeros(self, device: torch.device) -> Tensor:
        """Make a tensor of this spec that is filled with zeros, on the device of :meth:`empty`."""
        return self.empty(device).zero_()

    def laid_out(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, detached, with the strides of this spec; a copy if its own differ.

        A conjugation or negation that torch has put off is carried out.
        """
        # torch may represent a conjugate or negative lazily, as a flag on another tensor's memory
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if self.strides is None:
            return tensor.contiguous()
        if tensor.stride() == self.strides:
            return tensor
        return self.empty(tensor.device).copy_(tensor)


def bytes_of(tensor: Tensor) -> Tensor:
    """View the memory of a tensor as one dimension of bytes, a type that every backend can send.

    (NCCL refuses 16-bit integers and complex numbers.)

    Args:
        tensor: a tensor without gaps between its numbers, in any order of dimensions.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


Inside = Literal["", "falling", "rising"]
"""The order of micro-batches in a call whose backwards run inside of it, before the user's
backward (schedule ``1f1b``): ``"rising"`` or ``"falling"`` numbers; empty: no backwards run
inside."""


@dataclass(frozen=True)
class CallKey:
    """All that determines the shapes sent in a call; only a key's first call exchanges shapes.

    Attributes:
        specialization: number of the captured graph. When a value that the network's Python code
            depends on changes, another graph is captured and cut at the same places.
        inputs: for each micro-batch, the specs of the inputs of stage 0.
        numbers: for each micro-batch, the values of ``NetworkGraph.numbers`` (Python numbers that
            follow from the sizes of the inputs).
        grad: whether the call is differentiable.
        training: whether the network is in training mode.
        trainable: ``requires_grad`` of every parameter of the network, in the order of
            ``network.parameters()`` (a frozen weight: False).
        precision: autocast and default type of the call.
        continues_generators: whether the call continues the sequence of random numbers of the code
            around it (``rng="device"``, or the network is several graphs): then the states of the
            generators are the last inputs, and there is one micro-batch.
        inside: whether its backwards run inside of it (schedule ``1f1b``), and the order of
            micro-batches; empty: they do not run inside.
    """

    specialization: int
    inputs: tuple[tuple[TensorSpec, ...], ...]
    numbers: tuple[tuple[int | float, ...], ...]
    grad: bool
    training: bool
    trainable: tuple[bool, ...]
    precision: CallPrecision
    continues_generators: bool = False
    inside: Inside = ""

    @property
    def microbatches(self) -> int:
        return len(self.inputs)
