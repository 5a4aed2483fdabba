"""Settings of torch for the whole process are read and set as user code would."""

from collections.abc import Iterator

import pytest
import torch
from torch import backends
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_hybrid.comm import set_switches, switches


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = switches()
    yield
    set_switches(before)
    assert switches() == before


def test_what_user_code_sets_is_set_on_another_process() -> None:
    before = switches()
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True, warn_only=True)
    backends.cudnn.benchmark = True
    backends.cudnn.conv.fp32_precision = "ieee"
    backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    with sdpa_kernel(SDPBackend.MATH):
        changed = switches()
    set_switches(before)
    assert torch.get_float32_matmul_precision() == "highest"
    assert backends.cuda.flash_sdp_enabled()
    set_switches(changed)
    assert torch.get_float32_matmul_precision() == "medium"
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert backends.cudnn.benchmark
    assert backends.cudnn.conv.fp32_precision == "ieee"
    assert not backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert not backends.cuda.flash_sdp_enabled()
    assert backends.cuda.math_sdp_enabled()
    assert switches() == changed


def test_a_precision_of_one_kind_of_product_outlives_that_of_all() -> None:
    torch.set_float32_matmul_precision("high")
    backends.cuda.matmul.fp32_precision = "ieee"
    mixed = switches()
    torch.set_float32_matmul_precision("highest")
    backends.cuda.matmul.fp32_precision = "tf32"
    set_switches(mixed)
    assert switches() == mixed
