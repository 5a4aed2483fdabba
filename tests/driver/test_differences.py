"""Nested results are equal up to rounding, and what differs is named."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hybrid.driver.differences import (
    differences,
    epsilon_of,
    first_samples,
    leaves_in,
    numbers_in,
)

EPSILON = torch.finfo(torch.float64).eps
CPU = torch.device("cpu")


@dataclass
class Output:
    logits: Tensor
    more: Any = None


def result(shift: float = 0.0, **others: Any) -> dict[str, Any]:
    logits = torch.linspace(-1, 1, 8, dtype=torch.float64).view(4, 2) + shift
    return {"output": Output(logits, [logits.sin(), ("text", 3)]), **others}


def test_equal_results_have_no_differences_whatever_their_structure() -> None:
    assert differences(result(), result(), EPSILON) == []
    nan = {"output": torch.tensor([float("nan"), float("inf")])}
    assert differences(nan, {"output": nan["output"].clone()}, EPSILON) == []
    other_objects = {"output": object()}
    assert differences(other_objects, {"output": object()}, EPSILON) == []


def test_what_differs_is_named_as_code_writes_it() -> None:
    found = differences(result(0.5), result(), EPSILON)
    assert [text.partition(" of shape (4, 2) differs by up to ")[0] for text in found] == [
        "output.logits",
        "output.more[0]",
    ]
    assert "0.5, where the largest number is 1" in found[0]
    one, other = {"a": [1, True, "x"]}, {"a": [2, True, "y"]}
    assert differences(one, other, EPSILON) == [
        "a[0] is 1 and should be 2",
        "a[2] is 'x' and should be 'y'",
    ]
    assert differences({"a": 1}, {"b": None}, EPSILON) == [
        "a should not be there",
        "b is missing",
    ]
    assert differences({"a": torch.ones(2)}, {"a": 1.0}, EPSILON) == [
        "a is a tensor and should be 1.0"
    ]
    [line] = differences({"a": torch.ones(3, 2)}, {"a": torch.ones(3, 2).half()}, EPSILON)
    assert (
        line == "a is of shape (3, 2) and torch.float32 and should be of (3, 2) and torch.float16"
    )
    [line] = differences({"a": torch.tensor([1, 2])}, {"a": torch.tensor([1, 3])}, EPSILON)
    assert line == "a of shape (2,) differs in 1 of 2 numbers"


def test_the_order_of_an_ordered_dictionary_counts() -> None:
    one, other = OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)
    [line] = differences({"self.order": one}, {"self.order": other}, EPSILON)
    assert line.startswith("the order of self.order is ")
    assert differences({"x": {**one}}, {"x": {**other}}, EPSILON) == []


def test_rounding_is_no_difference() -> None:
    assert differences(result(1e-12), result(), EPSILON) == []
    zero = {"large": torch.ones(1), "zero": torch.zeros(2)}
    noise = {"large": torch.ones(1), "zero": torch.full((2,), 1e-12)}
    assert differences(noise, zero, 1e-7) == []
    assert differences({"a": 1.0 + 1e-12}, {"a": 1.0}, EPSILON) == []
    sparse = torch.eye(2).to_sparse()
    assert differences({"a": sparse}, {"a": sparse.clone()}, 1e-7) == []
    turned = torch.ones(2, dtype=torch.complex64)
    assert differences({"a": turned * 1j}, {"a": turned}, 1e-7)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), complex(float("nan"), 1.0)])
def test_a_number_that_is_not_finite_equals_itself_alone(odd: complex) -> None:
    other = type(odd)(1.0)
    again = complex(odd.real, odd.imag) if isinstance(odd, complex) else float(odd)
    assert differences({"a": odd}, {"a": again}, EPSILON) == []
    assert differences({"a": odd}, {"a": other}, EPSILON) == [
        f"a is {odd!r} and should be {other!r}"
    ]
    assert differences({"a": other}, {"a": odd}, EPSILON) == [
        f"a is {other!r} and should be {odd!r}"
    ]


def test_the_first_samples_are_compared_with_a_part_and_numbers_are_not() -> None:
    whole = result(size=4, first=torch.arange(6).view(2, 3), feature=torch.eye(3))
    part = {
        "output": Output(whole["output"].logits[:2], [whole["output"].more[0][:2], ("text", 2)]),
        "size": 2,
        "first": whole["first"][:, :2],
        "feature": torch.eye(3),
    }
    assert differences(whole, part, EPSILON, part=True) == []
    part["output"].logits = part["output"].logits + 1
    [line] = differences(whole, part, EPSILON, part=True)
    assert line.startswith("output.logits")
    sizes = {path: tuple(value.shape) for path, value in first_samples(whole, part).items()}
    assert sizes["output.logits"] == (2, 2)
    assert sizes["first"] == (2, 2)
    assert numbers_in(whole) == {"output.more[1][0]": "text", "output.more[1][1]": 3, "size": 4}


@pytest.mark.parametrize(
    ("dtype", "autocast", "expected"),
    [
        (torch.float32, False, torch.float32),
        (torch.float32, True, torch.bfloat16),
        (torch.float64, False, torch.float64),
    ],
)
def test_the_precision_is_the_lowest_of_those_that_a_call_may_compute_in(
    dtype: torch.dtype, autocast: bool, expected: torch.dtype
) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        epsilon = epsilon_of({"a": torch.ones(1, dtype=dtype), "b": torch.ones(1).bool()}, CPU)
    assert epsilon == torch.finfo(expected).eps
    assert epsilon_of({"a": 1}, CPU) == 0


def test_keys_that_are_objects_are_told_apart_by_their_order() -> None:
    """A copy has other objects in their places, and a weight may have no memory to be printed."""
    weight, other = (nn.Parameter(torch.ones(2)) for _ in range(2))
    weight.untyped_storage().resize_(0)
    one, same = {weight: 1, "a": 2, ("b", 1): 3}, {other: 1, "a": 2, ("b", 1): 3}
    assert not differences({"state": one}, {"state": same}, EPSILON)
    assert differences({"state": one}, {"state": {**same, other: 4}}, EPSILON)


def test_parameters_in_attributes_are_not_looked_at() -> None:
    """Their memory may be freed: reading it would end the process."""
    network = nn.LSTM(2, 3)
    held = {"self._flat_weights": network._flat_weights, "self.count": [network.bias_ih_l0, 4]}
    assert leaves_in(held) == {"self.count[1]": 4}
