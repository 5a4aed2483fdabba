"""Replicas of a stage hold the mean of their gradients, whoever has some, whenever they travel."""

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nccl_rules import StrictGroup
from prepared import start_ranks
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_hybrid.comm.connections import ConnectionLost
from lightning_hybrid.errors import HybridError
from lightning_hybrid.stage import gradient_averaging
from lightning_hybrid.stage.gradient_averaging import AveragingGroup, broadcast_module

pytestmark = pytest.mark.distributed
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
SIZES = (2, 3)


class Zoo(nn.Module):
    """Parameters of several sizes and types, in the state of one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.everywhere = nn.ParameterList(
            [torch.zeros(shape, dtype=dtype) for dtype in DTYPES for shape in ((5, 7), (3,), ())]
        )
        self.on_rank_1 = Parameter(torch.zeros(4, 2))
        self.nowhere = Parameter(torch.zeros(6))
        self.frozen = Parameter(torch.zeros(6), requires_grad=False)
        self.register_buffer("mean", torch.full((3,), float(rank)))
        self.register_buffer("count", torch.tensor(rank))
        self.register_buffer("short", torch.tensor([rank] * 3, dtype=torch.int16))
        self.register_buffer("flags", torch.tensor([rank == 0, True]))
        self.register_buffer("turned", torch.full((2, 3), float(rank)).t())
        self.register_buffer("waves", torch.full((3,), complex(rank, 1)))
        for number, parameter in enumerate(self.everywhere):
            parameter.grad = gradient(rank, number, parameter)
        if rank == 1:
            self.on_rank_1.grad = gradient(rank, 99, self.on_rank_1)


def gradient(rank: int, number: int, parameter: Tensor) -> Tensor:
    """Multiples of 6: a half or a third of them, and all sums, are exact in every type."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    return 6 * torch.randint(-5, 6, parameter.shape, generator=generator).to(parameter.dtype)


def accumulated(rank: int, group: Any, zoo: Zoo) -> dict[str, Any]:
    """Gradients that stand already, averaged at once; twice, since buckets are kept."""
    averaging_group = AveragingGroup(zoo.parameters(), zoo.buffers, group)
    averaging_group.reduce()
    first = gradients(zoo)
    for parameter in zoo.everywhere:
        parameter.grad = torch.full_like(parameter, 6.0 * rank)
    zoo.nowhere.grad = None if rank else torch.full_like(zoo.nowhere, 6.0)
    zoo.frozen.requires_grad_()
    zoo.frozen.grad = torch.full_like(zoo.frozen, 6.0 * rank)
    averaging_group.reduce()
    averaging_group.broadcast_buffers()
    averaging_group.close()
    buffers = {name: buffer.clone() for name, buffer in zoo.named_buffers()}
    return {"first": first, "second": gradients(zoo), "buffers": buffers}


def network(rank: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(5)
    layers = [nn.Linear(6, 6) for _ in range(4)]
    layers[1].weight.requires_grad_(False)
    generator = torch.Generator().manual_seed(rank)
    return nn.Sequential(*layers), torch.randn(4, 6, generator=generator)


def overlapping(rank: int, group: Any, _: Zoo) -> dict[str, Any]:
    """Two backward passes; the second sends its gradients as they come, or all are sent later."""
    found = {}
    for overlap in (False, True):
        net, x = network(rank)
        averaging_group = AveragingGroup(net.parameters(), tuple, group)
        for step in range(2):
            net.zero_grad()
            net(x).square().sum().backward()
            if overlap:
                averaging_group.arm()
            net(x + step).sum().backward()
            if overlap:
                averaging_group.finish()
            else:
                averaging_group.reduce()
        found[overlap] = gradients(net)
        averaging_group.close()
    found["in two stages"] = in_two_stages(rank, group)
    return found


def in_two_stages(rank: int, group: Any) -> dict[str, Tensor | None]:
    """The same, where the last two layers have their gradients before the others."""
    net, x = network(rank)
    early, late = net[:2], net[2:]
    averaging_group = AveragingGroup(net.parameters(), tuple, group)
    for step in range(2):
        net.zero_grad()
        net(x).square().sum().backward()
        between = early(x + step)
        handed_on = between.detach().requires_grad_()
        late(handed_on).sum().backward()
        averaging_group.arm(list(late.parameters()))
        between.backward(handed_on.grad)
        averaging_group.finish()
    averaging_group.close()
    return gradients(net)


def broadcast(rank: int, group: Any, zoo: Zoo) -> dict[str, Any]:
    with torch.no_grad():
        for parameter in zoo.parameters():
            parameter.fill_(rank + 1)
    broadcast_module(zoo, group)
    return {name: tensor.detach().clone() for name, tensor in zoo.state_dict().items()}


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}


def work(rank: int, folder: Path) -> None:
    """What each process does: every job, in groups of each size."""
    torch.set_num_threads(1)
    gradient_averaging.BUCKET_BYTES = 64  # several buckets per type
    store = dist.FileStore(str(folder / "store"), max(SIZES))
    for size in SIZES:
        found = {}
        for job in (accumulated, overlapping, broadcast) if rank < size else ():
            prefix = dist.PrefixStore(f"{job.__name__}{size}", store)
            gloo = dist.ProcessGroupGloo(prefix, rank, size, timedelta(seconds=60))
            group = StrictGroup(gloo)
            found[job.__name__] = job(rank, group, Zoo(rank))
        torch.save(found, folder / f"size{size}.rank{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processes have left what they found."""
    folder = tmp_path_factory.mktemp("replicas")
    ranks = start_ranks(
        [__file__, str(folder)],
        max(SIZES),
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "helpers")},
        cwd=folder,
        output=folder / "output.txt",
    )
    for rank in ranks:
        assert rank.wait(timeout=120) == 0, (folder / "output.txt").read_text()
    return folder


@pytest.fixture(params=SIZES)
def ranks(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Any]]:
    """What each rank of a group has found."""
    size = request.param
    return [torch.load(folder / f"size{size}.rank{rank}.pt") for rank in range(size)]


def mean(values: list[Tensor | None]) -> Tensor | None:
    """Over all ranks; one without a gradient counts as zero, unless none has one."""
    present = [value for value in values if value is not None]
    return sum(present) / len(values) if present else None


def assert_equal(found: Tensor | None, expected: Tensor | None) -> None:
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_the_average_is_the_mean_over_the_ranks(ranks: list[dict[str, Any]]) -> None:
    before = [gradients(Zoo(rank)) for rank in range(len(ranks))]
    for rank in ranks:
        for name, found in rank["accumulated"]["first"].items():
            assert_equal(found, mean([gradients[name] for gradients in before]))


def test_a_parameter_without_gradients_has_none_afterwards(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["accumulated"]["first"]
        assert found["nowhere"] is None
        assert found["frozen"] is None
        assert found["on_rank_1"] is not None


def test_buckets_follow_what_is_trained_now(ranks: list[dict[str, Any]]) -> None:
    size = len(ranks)
    average = 6 * sum(range(size)) / size
    for rank in ranks:
        found = rank["accumulated"]["second"]
        assert torch.equal(found["frozen"], torch.full((6,), average))  # no longer frozen
        assert torch.equal(found["nowhere"], torch.full((6,), 6 / size))
        assert torch.equal(found["everywhere.0"], torch.full((5, 7), average))


def test_overlap_changes_no_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        later, *others = (rank["overlapping"][how] for how in (False, True, "in two stages"))
        for name, expected in later.items():
            for overlapped in others:
                assert_equal(overlapped[name], expected)
            assert_equal(expected, ranks[0]["overlapping"][False][name])


def test_an_overlapped_average_is_the_mean(ranks: list[dict[str, Any]]) -> None:
    alone = []
    for rank in range(len(ranks)):
        net, x = network(rank)
        (net(x).square().sum() + net(x + 1).sum()).backward()
        alone.append(gradients(net))
    for name, found in ranks[0]["overlapping"][True].items():
        expected = mean([gradients[name] for gradients in alone])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_buffers_are_those_of_replica_0(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["accumulated"]["buffers"]
        assert torch.equal(found["mean"], torch.zeros(3))
        assert found["count"] == 0
        # of types and in an order that NCCL does not take
        for name, expected in Zoo(0).named_buffers():
            assert torch.equal(found[name], expected)
            assert found[name].stride() == expected.stride()


def test_a_module_is_broadcast_whole(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for name, tensor in rank["broadcast"].items():
            assert torch.equal(tensor, ranks[0]["broadcast"][name])
        for name, _ in Zoo(0).named_parameters():
            assert (rank["broadcast"][name] == 1).all()


if __name__ == "__main__":
    work(int(os.environ["LOCAL_RANK"]), Path(sys.argv[1]))


class Lost:
    """A group of two, of which the other rank is gone."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def allreduce(self, tensors: list[Tensor], *options: Any) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1234")

    broadcast = allgather = allreduce


@pytest.mark.parametrize("act", ["reduce", "broadcast_buffers"])
def test_a_lost_replica_is_named_as_such(act: str) -> None:
    layer: Any = nn.BatchNorm1d(3)
    layer.weight.grad = torch.ones(3)
    lost: Any = Lost()
    group = AveragingGroup(layer.parameters(), layer.buffers, lost)
    with pytest.raises(ConnectionLost, match="another replica"):
        getattr(group, act)()


def test_a_sparse_gradient_is_refused_by_name() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    lost: Any = Lost()
    group = AveragingGroup(table.parameters(), table.buffers, lost)
    with pytest.raises(HybridError, match=r"here is a sparse one .* Use sparse=False"):
        group.reduce()
