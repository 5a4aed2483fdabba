"""One forward, one backward inside of a call: gradients are those of fill-drain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import RLock
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from driven import let_go
from losses_inside import CLASSES, ROWS, STEPS, WIDTH, Cut, Net, Tied, batch, compare, whole
from torch import Tensor, nn

from lightning_hybrid.errors import NetworkError
from lightning_hybrid.stage.backward_pass import BackwardPass
from lightning_hybrid.stage.forward_pass import ForwardPass

slow = pytest.mark.conformance


class Dropping(nn.Module):
    """Dropout behind an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(x))


class Normed(nn.Module):
    """Batch normalisation over rows and steps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(x.transpose(1, 2)).transpose(1, 2))


Pair = tuple[Cut, Cut]


@pytest.fixture(autouse=True)
def _one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages compute one at a time: here they share torch's random generator."""
    lock = RLock()
    for kind in (ForwardPass, BackwardPass):

        def alone(*arguments: Any, run: Any = kind._run) -> Any:
            with lock:
                return run(*arguments)

        monkeypatch.setattr(kind, "_run", alone)


@pytest.fixture
def pair() -> Iterator[Callable[..., Pair]]:
    """Makes two replicas of a network: under 1F1B and under fill-drain."""
    made: list[Cut] = []

    def make(net: nn.Module, stages: int = 3, *, split: Sequence[int] = (), **options: Any) -> Pair:
        made.append(Cut(net, stages, "1f1b", split=split, **options))
        made.append(Cut(net, stages, "gpipe", **options))
        return made[-2], made[-1]

    yield make
    for replica in made:
        let_go(replica)


@pytest.mark.parametrize(("stages", "parts"), [(2, 4), (3, 4), (4, 8), (3, 2)])
def test_gradients_have_the_bits_of_fill_drain_and_stages_keep_few_micro_batches(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, stages: int, parts: int
) -> None:
    net, waiting = Net(), list[int]()
    back = BackwardPass.backward

    def noted(work: Any, microbatch: int) -> None:
        if isinstance(work.gradients, dict):
            waiting.append(len(work.gradients))
        back(work, microbatch)

    monkeypatch.setattr(BackwardPass, "backward", noted)
    one, other = pair(net, stages, parts=parts)
    found = []
    for replica in (one, other):
        replica.begin()
        out = replica(*batch())
        replica.backward(out["loss"])
        found.append(out["loss"].detach())
    assert one.why_not == ""
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    compare(one.gradients(), other.gradients(), 0)
    compare(one.gradients(), whole(net, batch()), 1e-9)
    assert max(waiting) == 1  # gradients of the outputs of one micro-batch
    assert one.alive == [min(stages - k, parts) for k in range(stages)]
    assert other.alive == [parts] * stages


@pytest.mark.parametrize(
    ("ranks", "rounds", "parts", "kept"),
    [(2, 2, 4, [5, 3]), (2, 3, 4, [7, 5]), (3, 2, 8, [9, 7, 5]), (3, 2, 2, [4, 4, 3])],
)
def test_loops_have_the_gradients_of_fill_drain_and_keep_few_forwards(
    pair: Callable[..., Pair], ranks: int, rounds: int, parts: int, kept: list[int]
) -> None:
    """Their order of micro-batches differs from stage to stage, and not within one."""
    net = Net()
    one, other = pair(net, ranks, parts=parts, rounds=rounds)
    for replica in (one, other):
        once(replica)
    assert one.why_not == ""
    compare(one.gradients(), other.gradients(), 0)
    compare(one.gradients(), whole(net, batch()), 1e-9)
    assert (one.alive, other.alive) == (kept, [parts * rounds] * ranks)


@pytest.mark.parametrize(("stages", "parts"), [(2, 4), (3, 4), (4, 8), (3, 1), (4, 2)])
def test_split_backwards_have_the_gradients_of_fill_drain(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, stages: int, parts: int
) -> None:
    net, late = Net(), list[int]()
    weight = BackwardPass.weight

    def noted(work: Any, microbatch: int) -> None:
        late.append(len(work._put_off))
        weight(work, microbatch)

    monkeypatch.setattr(BackwardPass, "weight", noted)
    one, other = pair(net, stages, parts=parts, split=range(1, stages))
    for replica in (one, other):
        once(replica)
    if parts > 1:  # (one is not begun inside of the call)
        assert max(late) == min(stages, parts)
        assert len(late) == (stages - 1) * parts
    compare(one.gradients(), other.gradients(), 0)
    compare(one.gradients(), whole(net, batch()), 1e-9)


Use = Callable[[Cut], None]


def once(replica: Cut) -> None:
    replica.begin()
    replica.backward(replica(*batch())["loss"])


def scaled(replica: Cut) -> None:
    """As a scaler does, whose scale is known when the network is called."""
    replica(*batch())
    replica.network.scaled = lambda number: number * 65536
    for number in range(2):
        replica.begin()
        replica.backward(replica(*batch(number))["loss"] * 65536)


def accumulated(replica: Cut) -> None:
    for number in range(3):
        replica.begin()
        replica.backward(replica(*batch(number))["loss"] / 3)


def followed(replica: Cut) -> None:
    replica.begin()
    loss = replica(*batch())["loss"]
    replica.backward(loss.exp() + loss**2)


def two_calls(replica: Cut) -> None:
    replica.begin()
    one, other = (replica(*batch(number))["loss"] for number in range(2))
    replica.backward(one + 0.5 * other)


def kept_graph(replica: Cut) -> None:
    replica.begin()
    loss = replica(*batch())["loss"]
    replica.backward(loss, retain_graph=True)
    replica.backward(2 * loss)


def unused(replica: Cut) -> None:
    replica.begin()
    replica(*batch(1))
    replica.begin()
    replica.backward(replica(*batch())["loss"])


def no_target(replica: Cut) -> None:
    replica.begin()
    x, y = batch()
    replica.backward(replica(x, torch.full_like(y, -100))["loss"].nan_to_num() * 0)
    once(replica)


def changing_sizes(replica: Cut) -> None:
    for rows in (ROWS, 7, 5, ROWS):
        replica.begin()
        x, y = batch()
        replica.backward(replica(x[-rows:], y[-rows:])["loss"])


def logits_read(replica: Cut) -> None:
    for number in range(2):
        replica.begin()
        out = replica(*batch(number))
        hits = (out["logits"].argmax(-1) == batch(number)[1]).sum()
        replica.backward(out["loss"])
        replica.model.seen = [*getattr(replica.model, "seen", []), int(hits)]


def logits_with_gradient(replica: Cut) -> None:
    replica.begin()
    out = replica(*batch())
    replica.backward(out["loss"] + out["logits"].square().mean())


def evaluated_between(replica: Cut) -> None:
    replica.begin()
    loss = replica(*batch())["loss"]
    with torch.no_grad():
        replica.model.seen = replica(*batch(1))["logits"].sum().item()
    replica.backward(loss)


def frozen_later(replica: Cut) -> None:
    replica.begin()
    loss = replica(*batch())["loss"]
    replica.model.net.layers[4].weight.requires_grad_(False)
    replica.backward(loss)


USES = [
    *(once, scaled, accumulated, followed, two_calls, kept_graph, unused, no_target),
    *(changing_sizes, logits_read, logits_with_gradient, evaluated_between, frozen_later),
]


def frozen() -> nn.Module:
    net = Net()
    for parameter in net.layers[:3].parameters():
        parameter.requires_grad_(False)
    return net


class Checkpointed(Net):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        from torch.utils.checkpoint import checkpoint

        for part in self.layers[:-1]:
            x = checkpoint(part, x, use_reentrant=False)
        logits = self.layers[-1](x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), y.flatten()), "logits": logits}


NETS: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "dropout": lambda: Net(Dropping),
    "frozen": frozen,
    "checkpointed": lambda: Checkpointed(Dropping),
    "tied": lambda: Tied(0, 4),
}


CASES = [
    *(("plain", use) for use in USES),
    *(pytest.param("tied", use, marks=() if use is two_calls else slow) for use in USES),
    *(("dropout", use) for use in (once, logits_read)),
    *(pytest.param("dropout", use, marks=slow) for use in (two_calls, logits_with_gradient)),
    *(("frozen", once), ("checkpointed", once)),
]


REST = [("dropout", changing_sizes), ("checkpointed", once)]


@pytest.mark.parametrize("options", [{"rounds": 2}, {"split": [1]}], ids=["loop", "split"])
@pytest.mark.parametrize(
    ("kind", "use"),
    [
        *(("tied", two_calls), ("plain", frozen_later)),
        *(pytest.param("tied", use, marks=slow) for use in (logits_with_gradient, kept_graph)),
        *(pytest.param(*case, marks=slow) for case in REST),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_so_they_are_in_loops_and_with_split_backwards(
    pair: Callable[..., Pair], kind: str, use: Use, options: dict[str, Any]
) -> None:
    one, other = pair(NETS[kind](), 2, **options)
    for replica in (one, other):
        use(replica)
    assert one.why_not == ""
    compare(one.gradients(), other.gradients())


@pytest.mark.parametrize(("kind", "use"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_gradients_are_those_of_fill_drain(pair: Callable[..., Pair], kind: str, use: Use) -> None:
    one, other = pair(NETS[kind](), 2)
    for replica in (one, other):
        use(replica)
    assert one.why_not == ""
    assert getattr(one.model, "seen", 0) == getattr(other.model, "seen", 0)
    compare(one.gradients(), other.gradients())
    assert one.alive[0] <= (4 if use is logits_with_gradient else 2)


def logits_read_first(replica: Cut) -> None:
    """In the first call, with weights that have just come from other ranks."""
    replica.begin()
    out = replica(*batch())
    replica.model.seen = out["logits"].square().sum().item()
    replica.backward(out["loss"])


@pytest.mark.parametrize(
    "use",
    [
        once,
        frozen_later,
        *(pytest.param(use, marks=slow) for use in (two_calls, kept_graph, logits_read_first)),
    ],
)
@pytest.mark.parametrize(("one", "other"), [(0, 2), (1, 4), (2, 3)])
def test_the_gradient_of_a_weight_of_two_stages_is_one_sum(
    pair: Callable[..., Pair], use: Use, one: int, other: int
) -> None:
    """Lent by a worker to another one, or to the driver."""
    net = Tied(one, other)
    here, drained = pair(net, 3)
    for replica in (here, drained):
        use(replica)
    assert (here.why_not, here.alive[0]) == ("", 3)
    assert getattr(here.model, "seen", 0) == getattr(drained.model, "seen", 0)
    compare(here.gradients(), drained.gradients())
    if use is once:
        compare(here.gradients(), whole(net, batch()), 1e-9)


def test_the_expected_factor_leaves_the_bits_of_one_backward(pair: Callable[..., Pair]) -> None:
    one, other = pair(Net(), 2)
    for replica in (one, other):
        replica(*batch())
        replica.network.scaled = lambda number: number * 0.3
        replica.begin()
        replica.backward(replica(*batch())["loss"] * 0.3)
    compare(one.gradients(), other.gradients(), 0)


def test_running_statistics_are_those_of_batches_in_their_order(pair: Callable[..., Pair]) -> None:
    one, other = pair(Net(Normed), 3)
    for replica in (one, other):
        once(replica)
    compare(one.buffers(), other.buffers(), 0)
    compare(one.gradients(), other.gradients())
    out = one(*batch(1))
    before = {name: value.clone() for name, value in one.buffers().items()}
    assert out["logits"].isfinite().all()  # (computed again)
    compare(one.buffers(), before, 0)


def test_a_hook_on_a_weight_hears_one_gradient(pair: Callable[..., Pair]) -> None:
    net = Net()
    one, _ = pair(net, 2)
    heard: list[Tensor] = []
    one.model.net.layers[-1].bias.register_hook(lambda gradient: heard.append(gradient.clone()))
    once(one)
    [gradient] = heard
    torch.testing.assert_close(gradient, whole(net, batch())["layers.10.bias"])


def test_a_call_without_a_backward_leaves_no_gradient(pair: Callable[..., Pair]) -> None:
    one, _ = pair(Net(), 2)
    one.begin()
    one(*batch())
    one(*batch())
    assert all(gradient is None for gradient in one.gradients().values())
    assert [len(network.calls) for network in one.networks()] == [1, 1]


def test_logits_are_refused_by_name_when_weights_have_changed(pair: Callable[..., Pair]) -> None:
    one, _ = pair(Net(), 2)
    one.begin()
    out = one(*batch())
    assert out["logits"].shape == (ROWS, STEPS, CLASSES)
    one.backward(out["loss"])
    with torch.no_grad():
        one.model.net.layers[-1].bias.add_(1)
    with pytest.raises(NetworkError, match="network 'net' has returned beside its loss is read"):
        out["logits"].sum()


def test_second_backwards_and_gradients_of_gradients_are_refused(pair: Callable[..., Pair]) -> None:
    one, _ = pair(Net(), 2)
    one.begin()
    loss = one(*batch())["loss"]
    with pytest.raises(NetworkError, match="create_graph=True"):
        loss.backward(create_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_inputs_that_want_gradients_get_them_after_all_forwards(pair: Callable[..., Pair]) -> None:
    found = []
    for replica in pair(Net(), 2):
        for number in range(2):
            x, y = batch(number)
            replica.begin()
            replica.backward(replica(x.requires_grad_(), y)["loss"])
            found.append(x.grad)
        assert replica.alive == [4, 4]
        told = replica.network.placement.schedule == "1f1b"
        assert replica.lines == ["an input of it, or a weight of its loss, wants a gradient"] * told
    torch.testing.assert_close(found[:2], found[2:], rtol=0, atol=0)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("kind", "stage"), [(ForwardPass, 1), (BackwardPass, 0), (BackwardPass, 2)]
)
def test_an_error_in_a_stage_is_raised_by_the_call_and_may_be_caught(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, kind: Any, stage: int, first: bool
) -> None:
    one, other = pair(Net(), 3)
    for replica in () if first else (one, other):
        once(replica)
    run = kind._run

    def failing(work: Any, microbatch: int, values: Any) -> Any:
        if work.call.key.inside and (work.own.number, microbatch) == (stage, 1):
            raise ArithmeticError("no such number")
        return run(work, microbatch, values)

    one.begin()
    with monkeypatch.context() as patched:
        patched.setattr(kind, "_run", failing)
        with pytest.raises(ArithmeticError, match="no such number"):
            one(*batch())
    other.begin()
    for replica in (one, other):
        once(replica)
    compare(one.gradients(), other.gradients())
