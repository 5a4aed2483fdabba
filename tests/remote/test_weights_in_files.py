"""Weights that ``configure_model`` loads stay in their file until a rank makes its stages."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from deferring import build, made
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from lightning_hybrid.errors import DeferredError
from lightning_hybrid.remote import initialization_tape, mapped_files
from lightning_hybrid.remote.deferred import is_deferred, materialize, offload, value_of
from lightning_hybrid.remote.deferred_maker import file_parts, forget_made
from lightning_hybrid.remote.mapped_files import FileOfTensors, in_mapped_file, let_go_of_file

SIZE, MIB = 1100, 2**20  # of a weight of 2.3 MiB in bfloat16
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are looked at in /proc")


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(4)))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "weights.pt"
    torch.save(made(layers).bfloat16().state_dict(), path)
    return path


def in_memory(path: Path) -> int | None:
    """How many bytes of a mapped file were read; ``None``: it is not mapped."""
    found, ours = None, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split(maxsplit=5)
        if not name.endswith(":"):
            ours = bool(rest) and rest[-1] == str(path)
        elif ours and name == "Rss:":
            found = (found or 0) + int(rest[0]) * 1024
    return found


def copied(path: Path) -> nn.Module:
    network = layers()
    network.load_state_dict(torch.load(path, mmap=True))
    return network


def assigned(path: Path) -> nn.Module:
    with torch.device("meta"):
        network = layers()
    network.load_state_dict(torch.load(path, mmap=True), assign=True)
    return network


def copied_as_they_are(path: Path) -> nn.Module:
    network = layers().bfloat16()
    network.load_state_dict(torch.load(path, mmap=True))
    return network


def converted(path: Path) -> nn.Module:
    return assigned(path).double()


def in_threads(path: Path) -> nn.Module:
    """Converts weights in threads, as `transformers` does."""
    with torch.device("meta"):
        network = layers()
    with ThreadPoolExecutor(2) as pool:
        values = torch.load(path, mmap=True).items()
        waiting = {name: pool.submit(value.to, torch.float32) for name, value in values}
    for name, value in waiting.items():
        layer = network.get_submodule(name.removesuffix(".weight"))
        layer.weight = nn.Parameter(value.result())
    return network


def joined(path: Path) -> nn.Module:
    """Makes one weight of several, as of the experts of a mixture."""
    network = layers()
    values = [*torch.load(path, mmap=True).values()]
    network[1].weight = nn.Parameter(torch.cat([values[1][:100], values[2][100:]]))
    return network


@pytest.mark.parametrize(
    "load", [copied, assigned, copied_as_they_are, converted, in_threads, joined]
)
def test_a_rank_reads_what_it_makes_and_keeps_it_once(
    load: Callable[[Path], nn.Module], saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def let_go_of_file(tensor: Tensor) -> None:
        read.append(in_memory(saved) or 0)
        mapped_files.let_go_of_file(tensor)

    monkeypatch.setattr(initialization_tape, "let_go_of_file", let_go_of_file)
    torch.manual_seed(5)
    expected = load(saved)[1].weight.detach().clone()
    network, _ = build(lambda: load(saved))
    assert all(map(is_deferred, network.parameters()))
    assert (in_memory(saved) or 0) < MIB
    materialize(network[1].parameters())
    assert torch.equal(network[1].weight, expected)
    assert network[1].weight.dtype == expected.dtype
    assert 2 * MIB < max(read) < 4 * MIB
    assert (in_memory(saved) or 0) < MIB
    for number in (0, 2, 3):
        offload(network[number].weight, f"{number}.weight", "on rank 1")
    forget_made()
    assert in_memory(saved) is None


def named(network: nn.Module) -> dict[str, Tensor]:
    return dict(network.named_parameters())


@pytest.mark.parametrize("load", [assigned, copied_as_they_are])
def test_what_is_in_a_file_as_it_is_can_be_read_there_by_anyone(
    load: Callable[[Path], nn.Module], saved: Path
) -> None:
    expected = named(load(saved))
    network, _ = build(lambda: load(saved))
    parts = file_parts(named(network))
    assert parts.keys() == expected.keys()
    for name, part in parts.items():
        assert part.file == FileOfTensors.at(str(saved))
        found = torch.empty_like(expected[name])
        part.read_into(found)
        assert torch.equal(found, expected[name])


@pytest.mark.parametrize("load", [copied, converted, in_threads, joined, lambda _: layers()])
def test_what_is_computed_converted_or_drawn_is_in_no_file(
    load: Callable[[Path], nn.Module], saved: Path
) -> None:
    network, _ = build(lambda: load(saved))
    assert not file_parts({"1.weight": network[1].weight})


def test_a_file_that_was_replaced_or_memory_that_was_written_to_is_no_source(saved: Path) -> None:
    def written() -> nn.Module:
        values = torch.load(saved, mmap=True)
        values["2.weight"].data.view(torch.uint8)[5] = 1  # (a version counter of its own)
        network = layers().to("meta")
        network.load_state_dict(values, assign=True)
        return network

    network, _ = build(written)
    assert file_parts(named(network)).keys() == {"0.weight", "1.weight", "3.weight"}
    before = FileOfTensors.at(str(saved))
    torch.save(torch.load(saved), saved.with_suffix(".new"))
    saved.with_suffix(".new").replace(saved)
    assert not file_parts(named(network))
    assert FileOfTensors.at(str(saved)) != before
    assert FileOfTensors.at(str(saved.parent)) is None


def test_a_large_tensor_in_a_mapped_file_is_known(saved: Path, tmp_path: Path) -> None:
    torch.save(torch.ones(9), tmp_path / "small.pt")
    weights = torch.load(saved, mmap=True)
    assert in_mapped_file(weights["1.weight"])
    assert in_mapped_file(weights["1.weight"].view(-1)[5:])
    assert not in_mapped_file(torch.load(saved)["1.weight"])
    assert not in_mapped_file(torch.load(tmp_path / "small.pt", mmap=True))
    assert not in_mapped_file(torch.ones(MIB).share_memory_())


@pytest.mark.parametrize("change", [None, 0, SIZE // 2], ids=["read", "first", "middle"])
def test_what_was_written_to_a_mapped_file_is_kept(saved: Path, change: int | None) -> None:
    weight = torch.load(saved, mmap=True)["1.weight"]
    if change is not None:
        weight[change, 3] = 7
    before = weight.clone()
    assert (in_memory(saved) or 0) > 2 * MIB
    let_go_of_file(weight)
    assert ((in_memory(saved) or 0) < MIB) is (change is None)
    assert torch.equal(weight, before)


def test_what_is_asked_for_on_meta_draws_and_has_nothing() -> None:
    def with_bare() -> nn.Module:
        with torch.device("meta"):
            bare = nn.Linear(5, 5)
            nn.init.normal_(bare.bias)
        network = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), bare)
        network[1].weight = nn.Parameter(torch.empty_like(bare.weight, device="cpu"))
        nn.init.normal_(network[1].weight)
        return network

    expected, state = made(with_bare), torch.get_rng_state()
    network, _ = build(with_bare)
    assert torch.equal(torch.get_rng_state(), state)
    assert [p.is_meta and not is_deferred(p) for p in network[2].parameters()] == [True, True]
    for found, value in zip(network[:2].parameters(), expected[:2].parameters()):
        assert torch.equal(value_of(found), value)


def test_numbers_that_one_device_does_not_have_are_refused() -> None:
    def reads() -> nn.Module:
        layer, bare = nn.Linear(3, 3), torch.empty(3, device="meta")
        with torch.no_grad():
            layer.bias.copy_(bare)
        return layer

    with pytest.raises(DeferredError, match=r"copy_.* reads a tensor of size \(3,\).*meta"):
        build(reads)


def test_quantised_weights_are_refused_by_their_class() -> None:
    def quantised() -> nn.Module:
        layer = nn.Linear(2, 2)
        with torch.no_grad():
            layer.bias.copy_(TwoTensor(torch.ones(2), torch.ones(2)).abs())
        return layer

    with pytest.raises(DeferredError, match="makes a TwoTensor, which keeps its numbers in other"):
        build(quantised)


def test_what_code_has_another_view_of_stays_with_it() -> None:
    table = torch.arange(6.0)
    tensors: list[Tensor] = []

    def shared() -> nn.Module:
        layer = nn.Linear(2, 3, bias=False)
        with torch.device("meta"):
            bare = nn.Linear(2, 3, bias=False)
        bare.weight = nn.Parameter(table.view(3, 2))
        tensors.append(bare.weight)
        return nn.Sequential(layer, bare)

    network, _ = build(shared)
    assert [is_deferred(p) for p in network.parameters()] == [True, False]
    table[0] = 7
    assert tensors[0][0, 0] == 7


def test_what_another_rank_has_is_not_read_by_a_load_that_writes_a_part() -> None:
    network, deferral = build(lambda: nn.Linear(4, 4))
    offload(network.weight, "weight", "on rank 1")
    with deferral.loading(network), torch.no_grad():
        network.weight[:2] = 1
    with pytest.raises(DeferredError, match="'weight' is on rank 1"):
        materialize([network.weight])
