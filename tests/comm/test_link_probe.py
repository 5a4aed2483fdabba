"""What is measured of a link is what the link has."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lightning_hybrid.comm import link_probe

LATENCY_S, BYTES_PER_S, FLOPS = 0.001, 2e9, 5e10


class Link:
    """Ranks 0 and 1, on a clock that moves with messages alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def carry(self, tensor: Tensor, _: int) -> None:
        self.now += LATENCY_S + tensor.nbytes / BYTES_PER_S

    def reduce(self, tensor: Tensor) -> None:
        self.now += 2 * tensor.nbytes / BYTES_PER_S

    def multiply(self, a: Tensor, b: Tensor) -> None:
        self.now += 2 * a.numel() * b.shape[1] / FLOPS


@pytest.fixture(autouse=True)
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    made = Link()
    messages = SimpleNamespace(
        get_rank=lambda: 0,
        barrier=lambda: None,
        send=made.carry,
        recv=made.carry,
        all_reduce=made.reduce,
    )
    monkeypatch.setattr(link_probe, "dist", messages)
    monkeypatch.setattr(link_probe, "time", SimpleNamespace(perf_counter=lambda: made.now))
    monkeypatch.setattr(torch, "mm", made.multiply)
    return made


def test_a_pair_has_the_latency_and_the_bandwidth_of_its_link() -> None:
    found = link_probe.probe_pair(0, 1, torch.device("cpu"))
    assert found is not None
    assert found.ranks == (0, 1)
    assert found.latency_s.median == pytest.approx(LATENCY_S, rel=1e-4)
    assert found.bandwidth_bytes_per_s.median == pytest.approx(BYTES_PER_S, rel=1e-4)


def test_a_rank_that_is_none_of_a_pair_measures_nothing(link: Link) -> None:
    assert link_probe.probe_pair(1, 2, torch.device("cpu")) is None
    assert link.now == 0


def test_an_all_reduce_and_a_product_take_what_they_take() -> None:
    seconds = 2 * link_probe.LARGE_BYTES / BYTES_PER_S
    assert link_probe.probe_all_reduce(torch.device("cpu")).median == pytest.approx(seconds)
    assert link_probe.probe_flops(torch.device("cpu"), width=8) == pytest.approx(FLOPS)


def test_a_spread_holds_the_middle_and_both_ends() -> None:
    assert link_probe.Spread.of([3.0, 1.0, 5.0]) == link_probe.Spread(
        median=3.0, least=1.0, most=5.0
    )
