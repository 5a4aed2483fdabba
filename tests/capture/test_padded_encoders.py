"""An encoder that packs padded sequences by the values of their mask is not captured."""

import pytest
import torch
from capturing import InParts
from torch import Tensor, nn

from lightning_hybrid.capture.capture import Capture, NotCaptured
from lightning_hybrid.capture.rewritten_functions import PACKS
from lightning_hybrid.graph import compute_whole


class Inside(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor, *, src_key_padding_mask: Tensor | None = None) -> Tensor:
        found: Tensor = self.encoder(x, src_key_padding_mask=src_key_padding_mask)
        return found


def captured(network: nn.Module, *, padded: bool = True) -> bool:
    class Seen(Exception):
        pass

    def run(*_: object) -> list[Tensor]:
        raise Seen

    mask = torch.arange(5) >= torch.tensor([[3], [5]])
    try:
        Capture(network, network.forward, run)(
            (torch.rand(2, 5, 8),), {"src_key_padding_mask": mask if padded else None}
        )
    except Seen:
        return True
    except NotCaptured as error:
        if error.reason != PACKS or not error.only_in_this_mode:
            raise
    return False


def test_layers_without_padding_are_captured_as_in_training() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
    encoder, x = nn.TransformerEncoder(layer, 2).double(), torch.rand(2, 5, 8, dtype=torch.double)
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=x.dtype)
    parts = InParts(encoder.eval())
    for fast in (True, False):
        torch.backends.mha.set_fastpath_enabled(fast)
        try:
            with torch.no_grad():
                torch.testing.assert_close(parts(x, mask=mask), encoder(x, mask=mask))
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        assert parts.graph is not None
        assert {"layers.0.linear1", "layers.1.linear2"} <= {y.module for y in parts.graph.layers}
    assert torch.backends.mha.get_fastpath_enabled.__module__ == "torch.backends.mha"


@pytest.mark.conformance
@pytest.mark.parametrize("make", [lambda encoder: encoder, Inside], ids=["itself", "inside"])
def test_only_what_may_pack_is_not_captured(make: type[Inside]) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2)
    network = make(encoder)
    assert captured(network)  # in training
    network.eval()
    assert captured(network)  # which learns
    with torch.no_grad():
        assert not captured(network)
        assert captured(network, padded=False)
    encoder.requires_grad_(False)
    assert not captured(network)
    assert captured(make(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).eval())


class BehindABreak(Inside):
    def forward(self, x: Tensor, *, src_key_padding_mask: Tensor | None = None) -> Tensor:
        print("a break of the graph")
        return super().forward(x + 1, src_key_padding_mask=src_key_padding_mask)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_it_packs_between_the_graphs_of_a_chain() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
    network = BehindABreak(nn.TransformerEncoder(layer, 2)).double().eval()
    x, mask = torch.rand(2, 5, 8, dtype=torch.double), torch.arange(5) >= torch.tensor([[3], [5]])
    chain = Capture(network, network.forward, compute_whole, whole=False)
    with torch.no_grad():
        expected = network(x, src_key_padding_mask=mask)
        found = chain((x,), {"src_key_padding_mask": mask})
    assert not expected[0, 3:].any()  # as only what packs returns it
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert torch.backends.mha.get_fastpath_enabled()
