"""What is encoded is decoded, and a training step in its steady state pickles nothing."""

from typing import Any

import pytest
import torch

from lightning_hybrid.comm import message_channel as frames
from lightning_hybrid.comm.message_channel import FRAME, decode, encode, ready
from lightning_hybrid.comm.protocol import (
    Answer,
    Backward,
    ClipNorm,
    ClipValues,
    CommitEarlyForward,
    CutNetwork,
    DropEarlyForward,
    Forward,
    FreeCall,
    GradientNorm,
    GradientPattern,
    Header,
    Leaving,
    Message,
    Placement,
    Reduce,
    Status,
    StepOptimizer,
    StillAlive,
    SynchronizeBuffers,
    TakeWeights,
    Unscale,
    ZeroGrad,
)
from lightning_hybrid.comm.tensor_specs import CallKey, CallPrecision, TensorSpec
from lightning_hybrid.comm.travelling_errors import Failure

SPEC = TensorSpec((2, 3), torch.float64, requires_grad=True)
KEY = CallKey(
    0, ((SPEC,),), ((1,),), True, True, (True,), CallPrecision.current(torch.device("cpu"))
)
PLACEMENT = Placement((1, 0), (frozenset("a"), frozenset()), "zero_bubble", (1,), True)
STEADY = [
    Forward(0, 10**12, -5, 2, False, True, False),
    DropEarlyForward(0, 3),
    Backward(1, 7, 0, False, True, False, True, False),
    FreeCall(0, 3),
    CommitEarlyForward(0, 3),
    Reduce(2),
    SynchronizeBuffers(True),
    ZeroGrad(0, False),
    GradientNorm(0, torch.inf),
    *(ClipNorm(1, 1e300, total, torch.bfloat16) for total in (0.1, torch.inf, 5e-324)),
    ClipValues(0, 0.5),
    Unscale(0, 2.0**-16),
    Answer(holds=True),
    StepOptimizer(1),
    Status(),
    StillAlive(),
]
OTHERS = [
    Forward(0, 1, 2, 3, True, True, True, KEY),
    Forward(0, 1, 2, 3, True, True, True, KEY),
    StepOptimizer(0, [{"lr": 0.1, "params": ["a"]}]),
    CutNetwork(0, "net", {}, PLACEMENT, 2**64 - 1),
    Answer(value={"a": 1}),
    Header([SPEC], uses_rng=True),
    Status(Failure("text")),
    GradientPattern([True, False]),
    Leaving(Failure("text")),
]


def passed(message: Message) -> tuple[Message, int]:
    frame, data, _ = encode(message)
    assert len(frame) == FRAME
    kind, values, _ = decode(torch.tensor(frame).tolist(), data)
    return kind(**values), len(data)


@pytest.mark.parametrize("message", [*STEADY, *OTHERS], ids=repr)
def test_a_message_arrives_as_it_was(message: Message) -> None:
    assert passed(message)[0] == message


@pytest.mark.parametrize("message", STEADY, ids=repr)
def test_a_steady_step_pickles_nothing(message: Message, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("pickled")

    monkeypatch.setattr(frames.pickle, "dumps", refuse)
    monkeypatch.setattr(frames.pickle, "loads", refuse)
    assert passed(message)[1] == 0


def test_flags_are_flags_again() -> None:
    message: Any = passed(ZeroGrad(0, True))[0]
    assert message.set_to_none is True


def test_tensors_are_not_pickled() -> None:
    values = {"a": torch.zeros(10**6), "b": torch.ones(2)}
    frame, data, tensors = encode(TakeWeights(values.items()))
    assert len(data) < 1000
    assert [tensor.shape for tensor in tensors] == [value.shape for value in values.values()]
    assert decode(frame, data)[2]["b"] == TensorSpec((2,), torch.float32)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([3j]).conj().imag,
    ],
)
def test_what_travels_has_the_numbers_that_one_reads(tensor: torch.Tensor) -> None:
    travels = ready(tensor)
    assert torch.equal(travels, tensor)
    assert travels.is_contiguous()
    assert not travels.is_conj()
    assert not travels.is_neg()


def test_a_sparse_tensor_travels_in_the_message_among_dense_ones() -> None:
    tensors = {"a": torch.ones(2), "graph": torch.eye(3).to_sparse(), "b": torch.zeros(3)}
    frame, data, dense = encode(TakeWeights(tensors.items()))
    assert [tensor.tolist() for tensor in dense] == [[1, 1], [0, 0, 0]]
    *_, specs = decode(frame, data)
    assert list(specs) == ["a", "graph", "b"]
    graph = specs["graph"]
    assert isinstance(graph, torch.Tensor)
    assert torch.equal(graph.to_dense(), torch.eye(3))
