"""A class of tensors is asked before every operation that is more than a look."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.remote.intercepted import LOOKS, Intercepted, intercepted_in, ordinary

ASKED: list[Any] = []


class Doubled(Intercepted):
    """Tensors that hold half of their numbers, and note the operations on them."""

    looks = LOOKS

    @classmethod
    def operate(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ASKED.append(func)
        with as_they_are():
            return func(*args, **kwargs)

    def numbers(self) -> Tensor:
        with as_they_are():
            return self.detach() * 2  # type: ignore[attr-defined,no-any-return]


class DoubledTensor(Doubled, Tensor):  # type: ignore[misc]
    pass


class DoubledParameter(Doubled, nn.Parameter):  # type: ignore[misc]
    pass


def doubled(tensor: Any) -> Any:
    is_parameter = isinstance(tensor, nn.Parameter)
    tensor.__class__ = DoubledParameter if is_parameter else DoubledTensor
    ASKED.clear()
    return tensor


@pytest.mark.parametrize(
    "look",
    [
        lambda t: (t.shape, t.dtype, t.ndim, len(t), t.size(0), t.numel(), t.stride()),
        lambda t: (t.requires_grad, t.is_leaf, t.grad_fn, t.is_floating_point()),
        lambda t: (torch.is_floating_point(t), torch.numel(t), t.is_contiguous()),
        lambda t: t.requires_grad_(False).requires_grad,
        lambda t: setattr(t, "requires_grad", False),
        lambda t: t in {t: 1},
    ],
)
def test_looks_ask_nobody_and_see_what_is_there(look: Callable[[Any], Any]) -> None:
    parameter = doubled(nn.Parameter(torch.ones(2, 3)))
    assert look(parameter) == look(nn.Parameter(torch.ones(2, 3)))
    assert ASKED == []


@pytest.mark.parametrize(
    ("use", "functions"),
    [
        (lambda t: t + 1, {Tensor.add}),
        (lambda t: torch.stack([torch.ones(3), t]), {torch.stack}),
        (lambda t: nn.functional.linear(torch.ones(1, 3), t), {nn.functional.linear}),
        (lambda t: t.add_(1), {Tensor.add_}),
        (lambda t: t.device, {Tensor.device.__get__}),  # type: ignore[attr-defined]
        (lambda t: t.tolist(), {Tensor.tolist}),
    ],
)
def test_everything_else_does(use: Callable[[Any], Any], functions: set[Any]) -> None:
    with torch.no_grad():
        use(doubled(torch.ones(3)))
    assert functions <= {*ASKED}


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))],
    ids=["copy", "pickle"],
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_copies_are_ordinary_tensors_with_its_numbers(
    copied: Callable[[Any], Any], requires_grad: bool
) -> None:
    weight = doubled(nn.Parameter(torch.arange(3.0), requires_grad))
    buffer = doubled(torch.arange(4.0).view(2, 2).t())
    found = copied({"weight": weight, "buffer": buffer})
    assert type(found["weight"]) is nn.Parameter
    assert found["weight"].requires_grad == requires_grad
    assert found["weight"].tolist() == [0, 2, 4]
    assert type(found["buffer"]) is Tensor
    assert found["buffer"].tolist() == [[0, 4], [2, 6]]
    assert found["buffer"].stride() == (1, 2)


def test_one_with_two_names_is_copied_once_and_shares_no_memory() -> None:
    class Shared(DoubledTensor):
        def numbers(self) -> Tensor:
            with as_they_are():
                return self.detach()

    weight: Any = torch.ones(3)
    weight.__class__ = Shared
    one, other = copy.deepcopy([weight, weight])
    assert one is other
    one.zero_()
    with as_they_are():
        assert weight.tolist() == [1, 1, 1]


def test_those_of_a_class_are_found_in_nested_arguments_in_order() -> None:
    one, other = doubled(torch.ones(1)), doubled(nn.Parameter(torch.ones(1)))
    found = [*intercepted_in(((torch.ones(1), [one]), {"a": {"b": (other, 3, one)}}), Doubled)]
    assert [id(tensor) for tensor in found] == [id(one), id(other), id(one)]


def test_a_value_becomes_what_the_tensor_is() -> None:
    frozen = doubled(nn.Parameter(torch.ones(2), requires_grad=False))
    value = torch.zeros(2)
    assert type(ordinary(frozen, value)) is nn.Parameter
    assert not ordinary(frozen, value).requires_grad
    assert ordinary(doubled(torch.ones(2)), value) is value
