"""A network built without memory gets the numbers that one device would draw."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from deferring import build, made, pair
from monai.networks.nets import DenseNet, SwinUNETR, UNet, ViT, resnet18
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_hybrid._torch.tensors import is_shared, storage_key
from lightning_hybrid.errors import DeferredError
from lightning_hybrid.remote.deferred import (
    is_deferred,
    is_offloaded,
    materialize,
    offload,
    value_of,
)
from lightning_hybrid.remote.deferred_maker import DeferredMaker
from lightning_hybrid.remote.unread import unread

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # weight_norm as it was


class Computed(nn.Module):
    """Values read while the network is made, a table of positions, a tensor as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, 7, 12))
        nn.init.trunc_normal_(self.position, std=0.02)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 5)]
        self.listed = nn.Parameter(torch.tensor(torch.linspace(0, 1, 4).tolist()))
        grid = torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij")
        self.register_buffer("grid", torch.stack(grid).flatten(1))
        self.constant = torch.arange(3.0) * 2


def initialised(function: Callable[[Tensor], object]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layer = nn.Linear(20, 30)
        function(layer.weight)
        nn.init.constant_(layer.bias, 0.5)
        return layer

    return build


def tied() -> nn.Module:
    network = nn.Sequential(nn.Embedding(10, 6, padding_idx=2), nn.Linear(6, 10))
    network[1].weight = network[0].weight
    return network


def rebound() -> nn.Module:
    """Weights get memory of the other kind by `data`: numbers that were read, or drawn ones."""
    read, drawn = nn.Linear(5, 5), nn.Linear(5, 5)
    read.weight = nn.Parameter(torch.from_numpy(np.ones((5, 5), np.float32)))
    read.weight.data = drawn.weight.data
    drawn.weight.data = torch.from_numpy(np.full((5, 5), 2, np.float32))
    drawn.bias.data.add_(torch.from_numpy(np.ones(1, np.float32)).expand(5))
    return nn.Sequential(read, drawn)


def loaded() -> nn.Module:
    layer = nn.Linear(5, 5)
    layer.load_state_dict({"weight": torch.full((5, 5), 3.0), "bias": torch.arange(5.0)})
    return layer


def changed() -> nn.Module:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(9, 9))

    def change(module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(torch.as_tensor(module.weight))
            module.weight.data.mul_(2)
            module.bias.data[1:3] = 7

    return network.apply(change).double().to("cpu")


def own_generator() -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    layer = nn.Linear(9, 9)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(9, 9, generator=generator))
        layer.bias.copy_(torch.rand(9) + torch.randperm(9))
    return layer


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(100, 50),
    "convolution": lambda: nn.Conv3d(3, 8, 3),
    "batch norm": lambda: nn.BatchNorm2d(5),
    "layer norm": lambda: nn.LayerNorm(7),
    "attention": lambda: nn.MultiheadAttention(16, 4),
    "transformer": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2
    ),
    "lstm": lambda: nn.LSTM(4, 5, 2),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(5, 6)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(5, 6)),
    "old weight norm": lambda: nn.utils.weight_norm(nn.Linear(5, 6)),
    "computed": Computed,
    "orthogonal": initialised(nn.init.orthogonal_),
    "sparse": initialised(lambda weight: nn.init.sparse_(weight, 0.3)),
    "tied": tied,
    "loaded": loaded,
    "rebound": rebound,
    "changed": changed,
    "own generator": own_generator,
    "resnet": lambda: resnet18(
        spatial_dims=3, n_input_channels=1, num_classes=2, widen_factor=0.125
    ),
    "densenet": lambda: DenseNet(3, 1, 2, 8, growth_rate=4, block_config=(2, 2)),
    "unet": lambda: UNet(3, 1, 2, (4, 8, 16), (2, 2)),
    "vit": lambda: ViT(
        1, (32, 32, 32), (16, 16, 16), 48, 64, num_layers=2, num_heads=4, classification=True
    ),
    "swin": lambda: SwinUNETR(in_channels=1, out_channels=2, feature_size=12),
}


def tensors_of(network: nn.Module) -> dict[str, Tensor]:
    return dict([*network.named_parameters(), *network.named_buffers()])


@pytest.mark.parametrize("name", NETWORKS)
def test_numbers_and_generator_are_those_of_one_device(name: str) -> None:
    if name == "vit":
        pytest.importorskip("einops", reason="MONAI's patch embedding wants it")
    expected = made(NETWORKS[name])
    state = torch.get_rng_state()
    network, _ = build(NETWORKS[name])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(is_deferred(parameter) or name == "computed" for parameter in network.parameters())
    identities = {key: id(value) for key, value in tensors_of(network).items()}
    # each for itself, in any order
    values = {key: value_of(value) for key, value in reversed(tensors_of(network).items())}
    materialize(tensors_of(network).values())
    assert torch.equal(torch.get_rng_state(), state)
    assert {key: id(value) for key, value in tensors_of(network).items()} == identities
    for key, value in tensors_of(expected).items():
        for found in (values[key], tensors_of(network)[key]):
            assert torch.equal(found, value)
            assert (found.dtype, found.stride()) == (value.dtype, value.stride())
    assert all(type(parameter) is nn.Parameter for parameter in network.parameters())
    assert list(network.state_dict()) == list(expected.state_dict())
    if name == "computed":
        assert network.rates == expected.rates
        assert torch.equal(network.constant, expected.constant)


def test_only_what_was_loaded_is_here_again() -> None:
    network, deferral = build(pair)
    offload(network[1].bias, "1.bias", "on rank 1")
    state = {"0.weight": torch.ones(5, 4)}
    with deferral.loading(network):
        network.load_state_dict(state, strict=False)
    assert is_offloaded(network[1].bias)
    assert torch.equal(value_of(network[0].weight), state["0.weight"])
    with deferral.loading(network):
        network.load_state_dict({"1.bias": torch.ones(3)}, strict=False)
    assert torch.equal(value_of(network[1].bias), torch.ones(3))


def test_what_was_loaded_once_is_left_to_its_owner_when_less_is_loaded() -> None:
    network, deferral = build(pair)
    with deferral.loading(network):
        network.load_state_dict({"1.bias": torch.ones(3)}, strict=False)
    offload(network[1].bias, "1.bias", "on rank 1")
    with deferral.loading(network):
        network.load_state_dict({"0.weight": torch.ones(5, 4)}, strict=False)
    assert is_offloaded(network[1].bias)


def test_what_is_loaded_from_a_file_is_read_when_its_rank_makes_it() -> None:
    network, deferral = build(pair)
    value, reads = torch.arange(20.0).view(5, 4), list[bool]()

    def read() -> Tensor:
        reads.append(True)
        return value.clone().view(-1).view(torch.uint8)

    state = {"0.weight": unread(torch.empty_like(value, device="meta"), read)}
    with deferral.loading(network):
        network.load_state_dict(state, strict=False)
    assert reads == []
    assert torch.equal(value_of(network[0].weight), value)


def test_what_a_later_load_overwrites_is_forgotten() -> None:
    network, deferral = build(lambda: nn.Linear(800, 700))
    values = [torch.full((700, 800), float(number)) for number in range(3)]
    for value in values:
        with deferral.loading(network):
            network.load_state_dict({"weight": value}, strict=False)
    assert [is_shared(value) for value in values] == [False, False, True]
    assert torch.equal(value_of(network.weight), values[-1])
    assert torch.equal(value_of(network.bias), made(lambda: nn.Linear(800, 700)).bias)
    materialize(network.parameters())
    with deferral.loading(network):
        pass
    assert not is_shared(values[-1])


def test_weights_that_loads_put_into_other_memory_keep_their_numbers() -> None:
    network, deferral = build(lambda: nn.Sequential(*[nn.Linear(3, 3) for _ in range(8)]))
    values = {}
    # (each load frees the memory of some, whose keys the next one uses again)
    for names in ((0, 1, 2, 3), (4, 5, 6, 7), (1, 3, 5, 7)):
        with deferral.loading(network):
            for number in names:
                values[number] = 10.0 * names[0] + number
                network[number].weight.data = torch.full((3, 3), values[number])
    for number in reversed(range(8)):
        materialize(network[number].parameters())
    assert all((network[number].weight == value).all() for number, value in values.items())


def test_a_copy_on_another_device_is_one_and_a_move_to_the_same_device_is_none() -> None:
    root, deferral = nn.Module(), DeferredMaker(torch.device("cuda"))
    with deferral.building(root):
        here = torch.zeros(3)
        moved = [here.cuda(), here.to("cuda"), here.cpu(), here.to("cpu"), here.to(device="cpu")]
    keys = {storage_key(tensor.untyped_storage()) for tensor in moved}
    assert all(tensor.is_meta for tensor in moved)
    assert moved[0] is moved[1] is here
    assert len(keys) == 4


def test_an_initialisation_that_needs_numbers_to_go_on_is_refused_by_name() -> None:
    def resized() -> nn.Module:
        layer = nn.Linear(4, 4)
        with torch.no_grad():
            layer.weight.masked_scatter_(layer.weight > 0, torch.ones(16)).data.set_()
            torch.sort(layer.bias, out=(layer.bias.data, torch.tensor([0, 0, 0, 0])))
        return layer

    with pytest.raises(DeferredError, match=r"sort.*__init__"):
        build(resized)


def test_after_a_build_that_failed_new_tensors_have_their_memory() -> None:
    def broken() -> nn.Module:
        nn.Linear(2, 2)
        raise KeyError("on purpose")

    with pytest.raises(KeyError):
        build(broken)
    assert torch.equal(nn.init.ones_(nn.Linear(2, 2).weight), torch.ones(2, 2))
