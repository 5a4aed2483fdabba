"""What code of the user's changes beside a copy of a module is put back."""

from collections import defaultdict, deque
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from lightning_hybrid.driver.module_copy import hooks_of, owner_of, undone

SEEN: dict[str, Tensor] = {}
LOG: list[int] = []
COUNT = 0


def keep_globally(module: nn.Module, inputs: Any, output: Tensor) -> None:
    global COUNT
    COUNT += 1
    SEEN["out"] = output
    LOG.append(COUNT)


class Keeper:
    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.last: Tensor | None = None

    def keep(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.kept.append(output)
        self.last = output


class Counts(nn.Module):
    calls: ClassVar[int] = 0
    sizes: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        Counts.calls += 1
        self.sizes.append(len(x))
        return x + 1


class Root(nn.Module):
    """A hook in a closure keeps things in it, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Counts(), nn.BatchNorm1d(3))
        self.features: dict[str, Tensor] = {}
        self.by_name: defaultdict[str, list[int]] = defaultdict(list)
        self.last = deque([1], maxlen=2)
        self.plain = 0
        count, held = 0, [0]

        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            nonlocal count
            count += 1
            held.append(count)
            self.features["x"] = output
            self.by_name["a"].append(1)
            self.last.append(count)
            self.plain += 1
            self.counted = count

        self.state = lambda: (count, [*held])
        self.net.register_forward_hook(hook)


def test_modules_closures_globals_classes_and_owners_are_as_before() -> None:
    root, keeper = Root(), Keeper()
    hooks = [keep_globally, keeper.keep, partial(partial(keep_globally), output=None)]
    for hook in hooks[:2]:
        root.net[0].register_forward_hook(hook)
    assert owner_of(hooks[1]) is keeper
    assert owner_of(hooks[2]) is None
    assert {*hooks[:2]} < {*hooks_of(root)}
    features, buffers = root.features, [buffer.clone() for buffer in root.buffers()]
    with undone(root, root.net):
        root.net(torch.randn(4, 3))
        assert root.counted == COUNT == Counts.calls == 1
    assert root.features is features == {}
    assert dict(root.by_name) == {}
    assert [*root.last] == [1]
    assert root.plain == 0
    assert not hasattr(root, "counted")
    assert root.state() == (0, [0])
    assert (COUNT, SEEN, LOG) == (0, {}, [])
    assert (keeper.kept, keeper.last) == ([], None)
    assert (Counts.calls, Counts.sizes) == (0, [])
    assert all(map(torch.equal, root.buffers(), buffers))


def test_what_has_not_changed_is_not_written_to() -> None:
    root = Root().eval()
    versions = [buffer._version for buffer in root.buffers()]
    with undone(root, root.net):
        root.net(torch.randn(4, 3))
    assert [buffer._version for buffer in root.buffers()] == versions


def test_it_is_put_back_after_an_error() -> None:
    root = Root()
    with pytest.raises(ValueError, match="expected 2D"), undone(root, root.net):
        root.net(torch.ones(0))
    assert root.plain == Counts.calls == 0
    assert Counts.sizes == []


def test_what_a_forward_logs_is_dropped() -> None:
    root, kept = Root(), list[str]()
    root.log = lambda name: kept.append(name)  # type: ignore[assignment]
    kept.append("before")
    with undone(root, root.net):
        root.log("inside")  # type: ignore[operator]
    assert kept == ["before"]
