"""Calls are compared with what the network's own Python computes."""

import functools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from adopted import Driven
from driven import batches
from monai.data import MetaTensor
from torch import Tensor, nn

from lightning_hybrid.comm import ConnectionLost
from lightning_hybrid.driver import verification
from lightning_hybrid.driver.module_copy import ModuleCopy
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph.row_rules import RULES
from lightning_hybrid.planning.plan import Plan


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How the Python of networks has run beside their calls: on all samples, or on which."""
    made: list[str] = []
    own = ModuleCopy.call

    def call(self: ModuleCopy, *args: Any, **kwargs: Any) -> Any:
        rows = args[1] if len(args) > 1 else None
        made.append("all" if rows is None else rows.__name__)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(ModuleCopy, "call", call)
    return made


class Scaled(nn.Module):
    """Multiplies in the middle with what a subclass finds somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def factor(self) -> float:
        return 1.0

    def change(self) -> None:
        """Afterwards the factor is 3."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.factor()
        return self.second(hidden)


class KeyAppears(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.table: dict[str, float] = {}

    def factor(self) -> float:
        try:
            return self.table["factor"]
        except KeyError:
            return 1.0

    def change(self) -> None:
        self.table["factor"] = 3.0


class Environment(Scaled):
    def factor(self) -> float:
        return float(os.environ.get("FACTOR_OF_A_TEST", "1"))

    def change(self) -> None:
        os.environ["FACTOR_OF_A_TEST"] = "3"


class GetEnv(Environment):
    def factor(self) -> float:
        return float(os.getenv("FACTOR_OF_A_TEST", "1"))


class Meta(type):
    factor = 1.0


class Settings(metaclass=Meta):
    pass


class BehindAMetaclass(Scaled):
    def factor(self) -> float:
        return Settings.factor

    def change(self) -> None:
        Meta.factor = 3.0


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FACTOR_OF_A_TEST", "1")
    monkeypatch.delenv("FACTOR_OF_A_TEST")
    cached.cache_clear()
    READ[:] = [1.0]
    yield
    os.environ.pop("FACTOR_OF_A_TEST", None)
    Meta.factor = 1.0


@pytest.mark.parametrize("kind", [KeyAppears, Environment, GetEnv, BehindAMetaclass])
def test_a_value_that_has_changed_unseen_ends_the_run_at_the_next_check(
    ranks: Any, kind: type[Scaled]
) -> None:
    driven, network = Driven(ranks, kind(), verify="auto"), kind.__name__
    values = batches(5)
    for value in values[:2]:
        driven.assert_same(value)
    driven.module.net.change()
    driven.module.net(values[2])  # call 3 is none that is looked at
    with pytest.raises(NetworkError) as error:
        driven.module.net(values[3])
    message = str(error.value)
    assert f"'net' ({network}) does not compute in its stages" in message
    assert "in call 4 in training output of shape (4, 3) differs by up to" in message
    assert "network=" in message


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "error", [RuntimeError("Resource temporarily unavailable"), ConnectionLost("Lost rank 1", "1")]
)
def test_an_error_in_an_exchange_with_a_worker_is_no_finding_and_ends_the_run(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, first: bool, error: Exception
) -> None:
    """The worker waits in it: whatever this rank did next, both would wait for ever.

    In the first call of its kind, or in one that looks at code that has run before.
    """
    driven, (value,) = Driven(ranks, Scaled(), verify="auto"), batches(1)
    driven.assert_same(value)
    driven.module.train(not first)

    def fetches_a_weight(*_: Any) -> None:
        with driven.ranks.driver.commands.workers.joined():
            raise error

    monkeypatch.setattr(ModuleCopy, "call", fetches_a_weight)
    with pytest.raises(type(error)) as found:
        driven.module.net(value)
    assert found.value is error
    with pytest.raises(type(error)) as again:
        driven.module.net(value)
    assert again.value is error


READ = [1.0]


@functools.cache
def cached() -> float:
    return READ[0]


class Cached(Scaled):
    """What the cached function reads is another value later, and its result is kept."""

    def factor(self) -> float:
        return cached()


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_result_that_python_keeps_and_a_capture_does_not_is_seen(ranks: Any) -> None:
    driven = Driven(ranks, Cached(), verify=1)
    driven.module.net(batches(1)[0])
    READ[0] = 3.0
    with pytest.raises(NetworkError, match=r"in call 2 in training output .* differs by up to"):
        driven.module.net(batches(1)[0])


class Moves(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.order = OrderedDict(a=1.0, b=3.0)

    def factor(self) -> float:
        self.order.move_to_end(next(iter(self.order)))
        return next(iter(self.order.values()))


def test_an_order_that_stays_as_it_was_is_seen(ranks: Any) -> None:
    driven = Driven(ranks, Moves(), verify="auto")
    with pytest.raises(NetworkError, match=r"the order of self\.order is \"\['a', 'b'\]\""):
        driven.module.net(batches(1)[0])


class MeetsLater(Scaled):
    """Samples meet where a number is large."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * (1 + (x.abs().amax() > 50) * self.first.bias[0] ** 0)
        return self.second(torch.tanh(self.first(x)))


def test_samples_that_meet_though_a_wrong_rule_says_no_are_seen(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RULES, "amax", lambda *_: None)
    driven = Driven(ranks, MeetsLater(), verify="auto")
    one, two = batches(2)
    driven.module.net(one)
    assert driven.plans["net"].microbatches == 2
    two[3] = 100.0
    message = r"samples of a batch meet in call 2 .*num_microbatches=1\."
    with pytest.raises(NetworkError, match=message):
        driven.module.net(two)


class Ordinary(nn.Module):
    """Counts, and notes a feature. (Nothing draws: workers are threads with one generator.)"""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), norm(), nn.Tanh(), nn.Linear(3, 3))
        self.calls = 0
        self.feature: Tensor | None = None
        self.seen: list[int] = []

    def forward(self, x: Tensor, scales: dict[str, Tensor]) -> dict[str, Any]:
        self.calls += 1
        self.seen.append(self.calls)
        x = self.layers(x * scales["one"])
        self.feature = x * 2
        return {"logits": x, "more": [x.sin(), (x.cos(), None)]}


NORMALISED = functools.partial(nn.BatchNorm1d, 3)
STEPS = 3


def trained(ranks: Any, network: nn.Module, verify: Any) -> tuple[Driven, list[Tensor]]:
    """Losses and weights of a few steps, and an evaluation after each."""
    driven = Driven(ranks, deepcopy(network), verify=verify)
    module, driver = driven.module, driven.ranks.driver
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    driver.optimizers.connect([optimizer])
    seen = []
    for step, value in enumerate(batches(STEPS)):
        driver.begin_step(step)
        optimizer.zero_grad()
        found = module.net(value, {"one": value.cos()})
        loss = found["logits"].square().mean() + module.net.feature.mean() * module.scale
        driver.gradients.before_backward()
        loss.backward()
        driver.gradients.after_backward()
        optimizer.step()
        module.eval()
        with torch.no_grad():
            evaluated = module.net(value, {"one": torch.ones(4, 3, dtype=torch.float64)})
        module.train()
        seen += [loss.detach(), evaluated["logits"]]
    driven.ranks.end()
    return driven, [*seen, *(t.detach().clone() for t in module.state_dict().values())]


@pytest.mark.conformance
@pytest.mark.parametrize(
    ("norm", "ways"),
    [
        (nn.Identity, {"all"}),
        (NORMALISED, {"_first_part", "all"}),
    ],
)
def test_training_is_the_same_with_and_without_it(
    ranks: Any, runs: list[str], norm: Callable[[], nn.Module], ways: set[str]
) -> None:
    torch.manual_seed(0)
    network = Ordinary(norm)
    without, expected = trained(ranks, network, False)
    assert not runs
    driven, found = trained(ranks, network, 1)
    assert len(runs) >= 2 * STEPS  # each trains, and evaluates
    assert {*runs} == ways
    assert all(map(torch.equal, found, expected))
    assert driven.module.net.seen == without.module.net.seen
    assert not any("not verified" in line for line in driven.lines)


@pytest.mark.parametrize(("verify", "calls"), [("auto", [1, 2, 4, 8]), (3, [1, 4, 7]), (False, [])])
def test_which_calls_of_each_kind_are_looked_at(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, verify: Any, calls: list[int]
) -> None:
    looked: list[tuple[bool, int]] = []
    own = verification.Check.compare

    def compare(self: verification.Check, result: Any) -> None:
        looked.append((self.kind[1], self.number))
        own(self, result)

    monkeypatch.setattr(verification.Check, "compare", compare)
    driven = Driven(ranks, Scaled(), verify=verify)
    with torch.no_grad():
        driven.module.net(batches(1)[0])  # it is not cut yet
    looked.clear()
    for value in batches(8):
        driven.module.net(value)
        with torch.no_grad():
            driven.module.net(value)
    assert [number for grad, number in looked if grad] == calls
    assert [number for grad, number in looked if not grad] == calls


class Noisy(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.lock = iter([1.0])  # a generator can't be copied

    def factor(self) -> float:
        return 1.0


def test_a_module_that_cannot_be_copied_is_not_verified_and_says_so(ranks: Any) -> None:
    driven = Driven(ranks, Noisy(), verify="auto")
    driven.module.net.lock = (i for i in range(3))
    for value in batches(4):
        driven.assert_same(value)
    [line] = [line for line in driven.lines if "not verified" in line]
    assert "'net' (Noisy) is not verified in its calls in training: it cannot be copied" in line
    assert "generator" in line


@pytest.mark.parametrize(("verify", "looks"), [("auto", False), (1, True)])
def test_weights_that_have_no_memory_here_come_if_there_is_room_or_somebody_asks(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, runs: list[str], verify: Any, looks: bool
) -> None:
    monkeypatch.setattr(verification, "free_bytes", lambda: 100)
    driven = Driven(ranks, Scaled(), verify=verify)
    [value] = batches(1)
    driven.module.net(value)
    driven.ranks.driver.commands.workers.flush()
    driven.ranks.driver.remote.vacate()
    driven.module.net(value)
    assert bool(runs[1:]) is looks
    lines = [line for line in driven.lines if "not verified" in line]
    assert len(lines) == (not looks)
    assert looks or "which have no memory here, and 1e-07 GB are free" in lines[0]


class Failing(Scaled):
    """Its Python raises on a copy, which has lost what is no part of it."""

    def factor(self) -> float:
        if FORBIDDEN:
            raise ValueError("no more")
        return 1.0


FORBIDDEN: list[int] = []


def test_an_error_of_the_copy_is_a_difference_once_it_has_run(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = Driven(ranks, Failing(), verify=1)
    [value] = batches(1)
    driven.module.net(value)
    own = ModuleCopy.call

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        FORBIDDEN.append(1)
        try:
            return own(self, *args, **kwargs)
        finally:
            FORBIDDEN.clear()

    monkeypatch.setattr(ModuleCopy, "call", call)
    with pytest.raises(NetworkError, match="its Python raises ValueError: no more"):
        driven.module.net(value)
    driven = Driven(ranks, Failing(), verify=1)
    driven.module.net(value)
    driven.module.net(value)
    [line] = [line for line in driven.lines if "not verified" in line]
    assert "does not run on a copy of it (ValueError: no more)" in line


class Indexed(nn.Module):
    """Zeros, which its second stage gets after an error of the first, have no inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(4))
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for layer in self.layers:
            x = torch.linalg.inv(torch.diag_embed(layer(x))).sum(-1)
        return self.last(x)


def test_an_error_that_the_stages_raise_too_is_theirs(ranks: Any) -> None:
    driven = Driven(ranks, Indexed(), verify=1)
    driven.module.net(torch.arange(4))
    with pytest.raises(IndexError, match="out of range"):
        driven.module.net(torch.arange(4) + 1)


class Four(nn.Module):
    """So many layers that what is around the break is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(3, 3) for _ in range(3))
        self.table: dict[str, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(torch.tanh(self.one(x))) * self.table.get("factor", 1.0)
        if x.sum() > 1e9:
            x = x + 1
        print("between")
        return self.three(x)


def test_a_chain_of_graphs_is_compared_as_a_whole(
    ranks: Any, runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    driven = Driven(ranks, Four(), verify="auto")
    values = batches(4)
    for value in values[:3]:
        driven.module.net(value).sum().backward()
    assert runs == ["all", "all"]  # of the second and third call, when it is cut
    assert capsys.readouterr().out == "between\n" * 3
    assert not any("not verified" in line for line in driven.lines)


class WritesIntoItsInput(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(self.factor())
        return self.second(torch.tanh(self.first(x)))


class WritesMore(BehindAMetaclass, WritesIntoItsInput):
    def forward(self, x: Tensor) -> Tensor:
        x[:, 0].mul_(self.factor())
        return super(BehindAMetaclass, self).forward(x * 0)


def test_what_is_written_into_an_input_is_compared(ranks: Any, runs: list[str]) -> None:
    driven = Driven(ranks, WritesMore(), verify=1)
    [value] = batches(1)
    with torch.no_grad():
        driven.module.net(value.clone())  # it is not cut yet
    driven.module.net(value.clone())
    assert runs
    Meta.factor = 3.0
    with pytest.raises(NetworkError, match=r"arguments\[0\] of shape \(4, 3\) differs"):
        driven.module.net(value.clone())


def test_tensors_of_a_class_of_their_own_are_compared(ranks: Any, runs: list[str]) -> None:
    driven = Driven(ranks, Scaled(), verify=1)
    for value in batches(2):
        output = driven.module.net(MetaTensor(value))
        assert type(output) is MetaTensor
    assert runs == ["all", "all"]


def test_evaluations_are_compared(ranks: Any, runs: list[str]) -> None:
    driven = Driven(ranks, Ordinary(NORMALISED), verify=1)
    one = torch.ones(4, 3, dtype=torch.float64)
    driven.module.net(one, {"one": one})["logits"].sum().backward()
    driven.module.eval()
    runs.clear()
    with torch.no_grad():
        for value in batches(2):
            driven.module.net(value, {"one": one})
    assert runs == ["all", "all"]


def not_verified(driven: Driven) -> str:
    [value] = batches(1)
    for _ in range(3):
        driven.module.net(value).sum().backward()
    [line] = [line for line in driven.lines if "not verified" in line]
    return line


def test_a_network_that_is_whole_on_no_rank_is_not_verified(
    ranks: Any, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "is_materialized", lambda module: False)
    assert "made in configure_model" in not_verified(Driven(ranks, Scaled(), verify=1))
    assert not runs


def test_without_room_for_the_other_weights_a_network_is_not_verified(
    ranks: Any, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(self: ModuleCopy, *args: Any) -> Any:
        if len(runs) == 2:
            raise torch.OutOfMemoryError("no room on the GPU")
        return own(self, *args)

    own = ModuleCopy.call
    monkeypatch.setattr(ModuleCopy, "call", no_room)
    line = not_verified(Driven(ranks, Scaled(), verify=1))
    assert "does not run on a copy of it (OutOfMemoryError: no room on the GPU)" in line
    assert len(runs) == 2


class Delayed(Driven):
    def plan(self, *arguments: Any, **how: Any) -> Plan:
        return replace(super().plan(*arguments, **how), schedule="ddg", microbatches=1)


def test_stages_with_older_weights_are_not_verified(ranks: Any, runs: list[str]) -> None:
    line = not_verified(Delayed(ranks, Scaled(), verify=1))
    assert "in its calls in training: under schedule='ddg' stages compute with older" in line
    assert not runs
