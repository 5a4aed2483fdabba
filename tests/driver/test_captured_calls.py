"""What becomes of a call that can be captured, and of one that cannot."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adopted import Driven
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode

from lightning_hybrid.capture import NotCaptured
from lightning_hybrid.capture.watched_calls import watch
from lightning_hybrid.driver import captured_calls
from lightning_hybrid.driver.captured_calls import CapturedCalls
from lightning_hybrid.driver.progress import StartProgress
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph import CannotFollow
from lightning_hybrid.remote.hollow_network import Hollow
from lightning_hybrid.remote.proxy import RemoteKind
from lightning_hybrid.stage import Synchronised

X = torch.ones(2, 3)
REMOTE = {RemoteKind.PARAMETER: {"net.weight", "network.weight"}}


class Calls:
    """Calls of a network named ``net``, of which other ranks own weights."""

    def __init__(self, capture: Callable[..., Any], *, whole: bool = True) -> None:
        self.notes: list[str] = []
        self.at_hand: list[str] = []
        remote = SimpleNamespace(
            suspended=nullcontext,
            unreadable=nullcontext,
            names=lambda *kinds: {name for kind in kinds for name in REMOTE[kind]},
            adopt_replaced=lambda: None,
            at_hand=self.fetch,
        )
        driver: Any = SimpleNamespace(
            remote=remote,
            have_here=lambda module, whole: None,
            calls=SimpleNamespace(one_stream=lambda: self.noted("one stream")),
        )
        self.module = nn.Linear(3, 3)
        self.found: Any = SimpleNamespace(
            name="net",
            module=self.module,
            forward=self.module.forward,
            whole=whole,
            reason="it prints",
            shown="'net' (Linear)",
            driven=True,
            hollow=Hollow(self.module, X.device),
            read_between=set(),
            capture=capture,
        )
        announcements: Any = SimpleNamespace(
            say=lambda _, line: self.notes.append(line), doing=lambda *_: None
        )
        options: Any = SimpleNamespace(progress=StartProgress(None), verify=False)
        adoption: Any = SimpleNamespace(driver=driver, options=options, announcements=announcements)
        self.calls = CapturedCalls(self.module, adoption, self.adopt)

    def __call__(self) -> Any:
        return self.calls.call(self.found, (X,), {})

    def adopt(self, *_: Any) -> None:
        """It is not cut yet."""

    @contextmanager
    def noted(self, what: str) -> Iterator[None]:
        self.notes.append(what)
        yield

    @contextmanager
    def fetch(self, names: list[str]) -> Iterator[None]:
        self.at_hand = names
        yield
        self.notes.append("weights put back")


def cannot(*_: Any) -> Any:
    raise NotCaptured("a print in train.py:3")


def cannot_follow(*_: Any) -> Any:
    raise CannotFollow("it takes no tensor")


def packs(*_: Any) -> Any:
    raise NotCaptured("it packs what is padded", only_in_this_mode=True)


def test_a_call_that_is_captured_returns_what_its_graphs_compute() -> None:
    assert torch.equal(Calls(lambda args, _: args[0] + 1)(), X + 1)


def test_another_call_runs_on_the_driver_from_one_stream_and_says_why() -> None:
    calls = Calls(cannot)
    assert torch.equal(calls(), calls.module(X))
    line, stream = calls.notes
    assert "on the driver in some calls" in line
    assert "a print in train.py:3" in line
    assert stream == "one stream"
    assert not calls.at_hand  # what it learns goes to the owners


def test_where_nothing_is_learned_the_networks_weights_are_ordinary_tensors() -> None:
    calls = Calls(packs)
    with torch.no_grad():
        assert isinstance(calls(), Tensor)
    assert calls.at_hand == ["net.weight"]
    assert calls.notes[-1] == "weights put back"


def test_a_kind_of_call_that_proxies_would_change_is_refused_where_something_is_learned() -> None:
    with pytest.raises(NetworkError, match=r"'net' \(Linear\) cannot be called .*: it packs"):
        Calls(packs)()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_network_of_several_ranks_is_not_traced() -> None:
    calls = Calls(cannot)
    watch(calls.module, "net", lambda *_: calls())
    with pytest.raises(NetworkError, match=r"is traced.*Trace a copy.*deepcopy"):
        torch.jit.trace(calls.module, X)
    with pytest.raises(NetworkError, match=r"exported"):
        torch.export.export(calls.module, (X,))


def test_a_chain_of_which_a_part_has_run_does_not_run_again() -> None:
    calls = Calls(cannot, whole=False)
    with pytest.raises(NetworkError, match=r"(?s)cannot be captured:.*train.py:3.*network='...'"):
        calls()
    assert calls.notes == ["one stream"]


def test_a_graph_of_a_chain_that_comes_later_and_has_no_place_in_its_stages_is_refused() -> None:
    calls = Calls(cannot_follow, whole=False)
    with pytest.raises(NetworkError, match=r"(?s)several graphs.*it takes no tensor.*it prints"):
        calls()
    assert calls.notes == ["one stream"]


def test_an_evaluation_of_a_chain_that_has_no_place_in_its_stages_runs_on_the_driver() -> None:
    calls = Calls(cannot_follow, whole=False)
    with torch.no_grad():
        assert torch.equal(calls(), calls.module(X))
    stream, line, again = calls.notes[:3]
    assert stream == again == "one stream"
    assert "on the driver in some calls" in line


class Says(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        print("first")
        x = self.two(torch.tanh(self.one(x)))
        if self.training:
            print("between")
        return self.three(x)


def test_an_evaluation_of_which_python_has_run_does_not_run_again(
    ranks: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    net = Driven(ranks, Says()).module.net
    net(X.double()).sum().backward()
    capsys.readouterr()
    net.eval()
    with torch.no_grad(), pytest.raises(NetworkError, match=r"(?s)several graphs.*another way"):
        net(X.double())
    assert capsys.readouterr().out == "first\n"


def test_what_is_not_cut_yet_takes_its_batch_statistics_with_the_other_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compute_whole(*_: Any) -> list[Any]:
        return [_get_current_function_mode()]

    monkeypatch.setattr(captured_calls, "compute_whole", compute_whole)
    graph: Any = object()
    calls = Calls(lambda args, _: calls.calls.run(calls.found, graph, args))
    calls.found.calls, calls.found.network_of = {}, lambda _: None
    group: Any = None
    with Synchronised(group) as replicas:
        assert calls() == [replicas]
    assert calls() == [None]
