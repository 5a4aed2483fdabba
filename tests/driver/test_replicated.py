"""What a driver averages besides its stages: all that no network owns."""

from types import SimpleNamespace
from typing import Any

import torch
from driven import Model
from torch import nn

from lightning_hybrid._torch.modules import outline
from lightning_hybrid.driver.weights import Replicated

ELSEWHERE: Any = torch.float64  # stands for an accelerator: what goes there shows it


class Group:
    """Two drivers of which this is one."""

    def size(self) -> int:
        return 2


def replicated(module: nn.Module, device: torch.device = ELSEWHERE) -> Replicated:
    return Replicated(module, outline(module), Group(), device)


def averaging_group(closed: list[str]) -> Any:
    return SimpleNamespace(close=lambda: closed.append("closed"))


def hooked(own: Replicated, module: nn.Module) -> set[str]:
    """Names of the parameters whose gradients are averaged as they come."""
    own.rest.arm()
    return {n for n, p in module.named_parameters() if p._post_accumulate_grad_hooks}  # type: ignore[attr-defined]


def moved(module: nn.Module) -> set[str]:
    return {name for name, tensor in module.state_dict().items() if tensor.dtype is ELSEWHERE}


def module() -> Model:
    made = Model(nn.Linear(2, 2))
    made.register_buffer("mean", torch.zeros(2))
    return made


def test_until_a_network_is_cut_everything_waits_on_the_cpu() -> None:
    made = module()
    waiting = replicated(made)
    assert moved(made) == set()
    waiting.add(averaging_group([]), ["net.weight", "net.bias"])
    assert moved(made) == {"scale", "mean"}


def test_what_no_network_owns_is_averaged_by_the_driver() -> None:
    made = module()
    own = replicated(made, torch.device("cpu"))
    assert hooked(own, made) == {"scale", "net.weight", "net.bias"}
    own.add(averaging_group([]), ["net.weight"])
    assert hooked(own, made) == {"scale", "net.bias"}


def test_without_a_network_all_is_the_drivers_own() -> None:
    made = module()
    replicated(made).note_no_cut()
    assert moved(made) == made.state_dict().keys()


def test_in_the_end_no_hooks_are_left() -> None:
    made, closed = module(), list[str]()
    own = replicated(made, torch.device("cpu"))
    own.add(averaging_group(closed), ["net.weight"])
    assert hooked(own, made)
    own.close()
    assert not any(p._post_accumulate_grad_hooks for p in made.parameters())  # type: ignore[attr-defined]
    assert closed == ["closed"]
