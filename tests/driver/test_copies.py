"""Copies of a stage: micro-batches dealt in turn, gradients summed; the numbers of one device."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from adopted import Driven
from driven import Model, Replica, model
from driven import batches as first_batches
from noted_messages import noted
from torch import Tensor, nn

from lightning_hybrid.comm import copies_of
from lightning_hybrid.driver.backward_passes import HeldHooks
from lightning_hybrid.errors import NetworkError

SHAPES = {
    "2-1": ((1, 2), 0),
    "3-1": ((1, 2, 3), 0),
    "2-1-1": ((1, 2), 3, 0),
    "1-2-1": (1, (2, 3), 0),
    "1-2": (1, (2, 0), 0),
    "1-3": (1, (2, 3, 0), 0),
    "2-2": ((1, 2), (3, 0), 0),
    "1-1-2": (1, 2, (3, 0), 0),
}
Make = Callable[..., Replica]
SIZES = (13, 13, 13, 2)
CLOSE: Any = {"rtol": 0.0, "atol": 1e-10}


def batches(sizes: Sequence[int]) -> list[Tensor]:
    """The last one has fewer micro-batches than a stage has copies."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in sizes]


def loss_of(module: Model, output: Tensor) -> Tensor:
    return (module.scale * output).square().mean()


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, weight_decay=0.01)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), 0.01)


def one_device(
    module: Model,
    optimizer: torch.optim.Optimizer,
    parts: int = 5,
    every: int = 1,
    sizes: Sequence[int] = SIZES,
) -> list[float]:
    """Train; the network is called once per micro-batch."""
    losses = []
    for step, value in enumerate(batches(sizes)):
        loss = loss_of(module, torch.cat([module.net(part) for part in value.chunk(parts)]))
        loss.backward()
        losses.append(loss.item())
        if (step + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def train(
    replica: Replica,
    optimizer: torch.optim.Optimizer,
    every: int = 1,
    synchronize: bool = False,
    sizes: Sequence[int] = SIZES,
    connected: bool = False,
) -> list[float]:
    """The same on all ranks of a replica.

    Args:
        replica: the ranks.
        optimizer: the user's.
        every: batches that an optimizer step is for.
        synchronize: whether gradients are made whole after each batch, and not before a step only.
        connected: the ranks have the optimizer already.
    """
    if not connected:
        replica.driver.optimizers.connect([optimizer])
    losses = []
    for step, value in enumerate(batches(sizes)):
        replica.driver.begin_step(step)
        replica.driver.gradients.synchronize = synchronize or (step + 1) % every == 0
        loss = loss_of(replica.model, replica(value))
        replica.driver.gradients.before_backward()
        loss.backward()
        replica.driver.gradients.after_backward()
        losses.append(loss.item())
        if (step + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def layers(replica: Replica) -> Any:
    """The network, as the driver's code sees it."""
    return replica.model.net


def owners(replica: Replica) -> dict[str, list[Tensor]]:
    """What each rank that owns a tensor of the network has for it, by name."""
    found: dict[str, list[Tensor]] = {}
    for rank, module in replica.modules.items():
        named: dict[str, Any] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for name in replica.driver._ownership.tensors_of(rank):
            found.setdefault(name, []).append(named[name].detach())
    return found


@pytest.mark.parametrize("shape", ["1-2", "1-3", "2-2"])
def test_no_tensor_of_the_driver_s_copy_travels_with_messages(
    shape: str, replicas: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and gradients are on wires for tensors of devices; what is told are integers."""
    replica = replicas(normalised(), SHAPES[shape], parts=4, ends=(2, 3))
    optimizer = sgd(replica.model)
    train(replica, optimizer, sizes=(12, 12))
    told = noted(monkeypatch)
    train(replica, optimizer, sizes=(12, 12), connected=True)
    assert {"Forward", "LendTensors", "Backward", "StepOptimizer"} <= {name for name, *_ in told}
    assert not [each for each in told if each[1:] != (0, 0)]


def check_copies_alike(replica: Replica) -> None:
    """The copies have the same bits; what the driver has a copy of it sees by its proxies."""
    several = [values for values in owners(replica).values() if len(values) > 1]
    workers = [set(copies_of(d)) - {0} for d in replica.network.placement.devices]
    assert bool(several) == any(len(copies) > 1 for copies in workers)
    for first, *others in several:
        assert all(torch.equal(first, other) for other in others)


def check_as_one_device(module: Model, replica: Replica) -> None:
    """The weights of the driver's module and of all ranks are those of one device."""
    replica.end()
    expected = module.state_dict()
    for name, value in replica.model.state_dict().items():
        torch.testing.assert_close(value, expected[name], **CLOSE)
    check_copies_alike(replica)


@pytest.mark.parametrize("optimizer", [pytest.param(sgd, marks=pytest.mark.conformance), adam])
@pytest.mark.parametrize("shape", SHAPES)
def test_losses_and_weights_are_those_of_one_device(
    shape: str, optimizer: Callable[[nn.Module], torch.optim.Optimizer], replicas: Make
) -> None:
    network: Any = model()
    replica = replicas(deepcopy(network), SHAPES[shape], parts=5)
    expected = one_device(network, optimizer(network))
    found = train(replica, optimizer(replica.model))
    assert found == pytest.approx(expected, rel=0, abs=1e-10)
    check_as_one_device(network, replica)


@pytest.mark.parametrize("synchronize", [False, True])
@pytest.mark.parametrize("shape", ["3-1", "1-3"])
def test_gradients_that_accumulate_are_counted_once(
    shape: str, synchronize: bool, replicas: Make
) -> None:
    network: Any = model()
    replica = replicas(deepcopy(network), SHAPES[shape], parts=5)
    expected = one_device(network, sgd(network), every=2)
    found = train(replica, sgd(replica.model), every=2, synchronize=synchronize)
    assert found == pytest.approx(expected, rel=0, abs=1e-10)
    check_as_one_device(network, replica)


def normalised(momentum: float | None = 0.3) -> Model:
    """With batch normalisation in every part, and one of them used twice."""
    torch.manual_seed(0)
    twice = nn.BatchNorm1d(3)
    return Model(
        nn.Sequential(
            nn.Linear(3, 3),
            nn.BatchNorm1d(3, momentum=momentum),
            nn.Tanh(),
            nn.Linear(3, 3),
            twice,
            nn.Tanh(),
            twice,
            nn.Linear(3, 3),
            nn.BatchNorm1d(3),
        )
    ).double()


@pytest.mark.parametrize(
    ("shape", "ends", "momentum"),
    [("2-1", (2, 3), 0.3), ("2-1", (2, 3), None), ("1-2", (1, 3), 0.3), ("1-3", (1, 3), None)],
)
def test_running_statistics_are_those_of_one_device(
    shape: str, ends: tuple[int, ...], momentum: float | None, replicas: Make
) -> None:
    network = normalised(momentum)
    replica = replicas(deepcopy(network), SHAPES[shape], parts=4, ends=ends)
    found = train(replica, sgd(replica.model), sizes=(12, 12, 12, 9))
    network.net(first_batches(1)[0])  # as the capture does
    expected = one_device(network, sgd(network), parts=4, sizes=(12, 12, 12, 9))
    assert found == pytest.approx(expected, rel=0, abs=1e-10)
    check_as_one_device(network, replica)
    owned = owners(replica)  # not only what the driver was given at the end
    assert all(
        int(value) == uses * (1 + 4 + 4 + 4 + 3)
        for name, uses in (("net.1.num_batches_tracked", 1), ("net.4.num_batches_tracked", 2))
        for value in owned[name]
    )


def test_each_evaluation_reads_the_statistics_of_now(ranks: Any) -> None:
    """The driver's copy of the last stage too, whose statistics are written on workers."""
    driven = Driven(ranks, normalised().net, workers=2, devices=(1, (2, 0)))
    networks = driven.module.net, driven.reference
    for value in batches((12, 12)):
        for network in networks:
            network.train()
        found = driven.module.net(value)
        parts = [driven.reference(part) for part in value.chunk(2)]
        torch.testing.assert_close(found, torch.cat(parts), **CLOSE)
        for network in networks:
            network.eval()
        with torch.no_grad():
            torch.testing.assert_close(networks[0](value), networks[1](value), **CLOSE)


class Counting(nn.Module):
    """Writes a buffer that is no running statistic."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, value: Tensor) -> Tensor:
        self.seen += value.detach().sum()
        return value * 1.0


def test_a_stage_that_changes_another_buffer_is_refused_by_its_name(replicas: Make) -> None:
    network = Model(nn.Sequential(nn.Linear(3, 3), Counting(), nn.Linear(3, 3))).double()
    with pytest.raises(NetworkError, match=r"stage 0 .*has 2 copies, and changes '1.seen'"):
        replicas(network, SHAPES["2-1"], ends=(1, 2))


class Tied(nn.Module):
    """Uses a weight at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last.weight = self.first.weight

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(value).tanh())
        return result


def test_a_shared_weight_of_a_stage_with_copies_is_refused_by_its_name(replicas: Make) -> None:
    with pytest.raises(NetworkError, match=r"stage 0 has 2 copies, and shares .*'first.weight'"):
        replicas(Model(Tied()).double(), SHAPES["2-1"])


def clip(one: Any, optimizer: torch.optim.Optimizer, model: Any) -> None:
    one(optimizer, 0.05)


def read_and_scale(one: Any, optimizer: torch.optim.Optimizer, model: Any) -> None:
    gradient = model.net[0].weight.grad
    gradient.mul_(1.0 + gradient.norm().detach())


def replace_gradient(one: Any, optimizer: torch.optim.Optimizer, model: Any) -> None:
    model.net[0].weight.grad = torch.full_like(model.net[0].weight, 0.3)
    model.net[0].bias.grad = None


def change_weight(one: Any, optimizer: torch.optim.Optimizer, model: Any) -> None:
    with torch.no_grad():
        model.net[0].weight.mul_(0.9)


CHANGES = [clip, read_and_scale, replace_gradient, change_weight]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("shape", ["2-1", "1-2"])
def test_what_is_done_to_gradients_and_weights_is_done_to_all_copies(
    shape: str, change: Callable[..., None], every: int, replicas: Make
) -> None:
    """Also in the middle of an accumulation, where each copy has a part of the gradient."""
    network: Any = model()
    replica = replicas(deepcopy(network), SHAPES[shape], parts=5)
    mine, theirs = sgd(replica.model), sgd(network)
    driver = replica.driver
    driver.optimizers.connect([mine])

    def clip_one_device(optimizer: torch.optim.Optimizer, norm: float) -> None:
        nn.utils.clip_grad_norm_(network.parameters(), norm)

    for step, value in enumerate(batches(SIZES)):
        steps = (step + 1) % every == 0
        parts = torch.cat([network.net(part) for part in value.chunk(5)])
        penalty = network.net[0].weight.square().sum()
        (loss_of(network, parts) + 0.1 * penalty).backward()
        driver.begin_step(step)
        driver.gradients.synchronize = steps
        found = loss_of(replica.model, replica(value))
        penalty = layers(replica)[0].weight.square().sum()
        (found + 0.1 * penalty).backward()
        driver.gradients.after_backward()
        if change is not clip or steps:
            change(clip_one_device, theirs, network)
            change(driver.clipping.clip_norm, mine, replica.model)
        if steps:
            for optimizer in (mine, theirs):
                optimizer.step()
                optimizer.zero_grad()
    check_as_one_device(network, replica)


@pytest.mark.parametrize("shape", ["3-1", "1-3"])
def test_weights_that_are_loaded_and_evaluated_are_those_of_all_copies(
    shape: str, replicas: Make
) -> None:
    network: Any = model()
    replica = replicas(deepcopy(network), SHAPES[shape], parts=5)
    other = {name: value + 0.1 for name, value in network.state_dict().items()}
    network.load_state_dict(other)
    replica.model.load_state_dict(other)
    replica.driver.weights.scatter()
    [value, *_] = batches(SIZES)
    for module in (network, replica.model):
        module.eval()
    with torch.no_grad():
        torch.testing.assert_close(replica(value), network.net(value), **CLOSE)
    check_as_one_device(network, replica)


def test_what_is_frozen_in_a_forward_alone_gets_no_gradient_in_any_copy(replicas: Make) -> None:
    network: Any = model()
    replica = replicas(deepcopy(network), SHAPES["1-2"], parts=5)
    mine, theirs = sgd(replica.model), sgd(network)
    weights = [part[6].weight for part in (network.net, layers(replica))]
    replica.driver.optimizers.connect([mine])
    for step, value in enumerate(batches(SIZES)):
        replica.driver.begin_step(step)
        for weight in weights:
            weight.requires_grad_(step % 2 == 0)
        loss = loss_of(network, torch.cat([network.net(part) for part in value.chunk(5)]))
        found = loss_of(replica.model, replica(value))
        for weight in weights:
            weight.requires_grad_(True)
        loss.backward()
        found.backward()
        replica.driver.gradients.after_backward()
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    check_as_one_device(network, replica)


def test_an_evaluation_in_inference_mode_may_come_first(replicas: Make) -> None:
    network: Any = model()
    replica = replicas(deepcopy(network), SHAPES["1-2"], parts=5)
    [value, *_] = batches(SIZES)
    with torch.inference_mode():
        torch.testing.assert_close(replica(value), network.net(value), **CLOSE)
    assert train(replica, sgd(replica.model)) == pytest.approx(
        one_device(network, sgd(network)), rel=0, abs=1e-10
    )


def test_states_of_optimizers_are_those_of_one_device(replicas: Make) -> None:
    network: Any = model()
    replica = replicas(deepcopy(network), SHAPES["3-1"], parts=5)
    mine, theirs = adam(replica.model), adam(network)
    train(replica, mine)
    one_device(network, theirs)
    found = replica.driver.optimizers.state(0)
    for name, parameter in network.net.named_parameters():
        if f"net.{name}" in found:
            for key, value in theirs.state[parameter].items():
                torch.testing.assert_close(found[f"net.{name}"][key], value, **CLOSE)
    assert {f"net.{k}.weight" for k in (0, 2)} <= found.keys()


@pytest.mark.parametrize(("shape", "rank"), [("2-1", 2), ("1-2", 2), ("1-2", 0)])
def test_an_error_in_a_copy_is_raised_and_training_goes_on(
    shape: str, rank: int, replicas: Make
) -> None:
    """The other copies keep their appointments, and nothing is left on a link."""
    network: Any = model()
    replica = replicas(deepcopy(network), SHAPES[shape], parts=5)
    [value, *_] = batches(SIZES)
    engine = (replica.workers[rank]._networks[0] if rank else replica.network).engine
    stage: Any = engine.owned[0].specializations[0]
    call: list[None] = []

    def fails() -> None:
        call.append(None)
        if len(call) == 2:
            raise ValueError("on purpose")

    run, stage.run_with = stage.run_with, lambda *given: (fails(), run(*given))[1]
    with pytest.raises(ValueError, match="on purpose"):
        replica(value)
    stage.run_with = run
    for _ in range(2):
        torch.testing.assert_close(replica(value), network.net(value), **CLOSE)


def test_a_hook_on_a_weight_of_a_stage_with_copies_is_refused_by_its_name(replicas: Make) -> None:
    network: Any = model()
    network.net[0].weight.register_hook(lambda gradient: gradient)
    replica = replicas(network, SHAPES["2-1"])
    there: Any = None  # nobody asks it
    hooks = HeldHooks([replica.network], replica.driver.gradients.bring_to_owners, there)
    with pytest.raises(NetworkError, match=r"'0.weight' in network 'net' has a hook"), hooks():
        pass


def test_gradients_of_chosen_weights_are_refused(replicas: Make) -> None:
    replica = replicas(model(), SHAPES["2-1"])
    [value, *_] = batches(SIZES)
    loss = loss_of(replica.model, replica(value))
    weight = layers(replica)[0].weight
    with pytest.raises(NetworkError, match="are in parts, as one of its stages has copies"):
        replica.driver.user_backwards(
            lambda *_, **__: (), loss, None, False, False, (weight,), False, accumulate_grad=False
        )


def test_states_that_are_loaded_are_those_of_all_copies(replicas: Make) -> None:
    network: Any = model()
    theirs = adam(network)
    one_device(network, theirs)
    replica = replicas(deepcopy(network), SHAPES["2-1"], parts=5)
    mine = adam(replica.model)
    mine.load_state_dict(deepcopy(theirs.state_dict()))
    train(replica, mine)
    one_device(network, theirs)
    check_as_one_device(network, replica)


def test_copies_of_a_stage_refuse_sparse_gradients_in_the_first_forward(ranks: Any) -> None:
    network = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 3), nn.Linear(3, 3))
    driven = Driven(ranks, network, workers=2, devices=((1, 2), 0))
    with pytest.raises(NetworkError, match=r"'0\.weight' is sparse.* one replica without copies"):
        driven.module.net(torch.arange(4))
