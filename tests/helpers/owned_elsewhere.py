"""A module whose tensors another rank owns, which here is an ordinary copy of the module."""

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from lightning_hybrid.remote.living_views import views_of
from lightning_hybrid.remote.proxies import Proxies
from lightning_hybrid.remote.proxy import RemoteKind


class Owner:
    """The rank that owns the tensors; counts what it is asked for."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters = dict(module.named_parameters())
        self.tensors = self.parameters | dict(module.named_buffers())
        self.given: list[list[str]] = []

    def give(self, kind: RemoteKind, names: list[str]) -> Mapping[str, Tensor]:
        self.given.append(names)
        if kind is RemoteKind.GRADIENT:
            return {n: self.parameters[n].grad.clone() for n in names}  # type: ignore[union-attr]
        return {n: self.tensors[n].detach().clone() for n in names}

    def bring(self, kind: RemoteKind, memory: Mapping[str, Tensor]) -> list[str]:
        for name, value in self.give(kind, [*memory]).items() if memory else ():
            memory[name].data.copy_(value)
        return [*memory]

    def take(self, kind: RemoteKind, values: Mapping[str, Tensor], *, add: bool = False) -> None:
        for name, value in values.items():
            if kind is not RemoteKind.GRADIENT:
                self.tensors[name].data.copy_(value)
            elif add and self.parameters[name].grad is not None:
                self.parameters[name].grad += value  # type: ignore[operator]
            else:
                self.parameters[name].grad = value.clone()

    def clear_gradients(self, names: list[str]) -> None:
        for name in names:
            self.parameters[name].grad = None

    def gradient_names(self) -> set[str]:
        return {name for name, p in self.parameters.items() if p.grad is not None}


class World:
    """A module on this rank whose tensors live in another one.

    Args:
        before: called with the module before that.
    """

    def __init__(self, before: Callable[[nn.Sequential], object] = lambda _: None) -> None:
        torch.manual_seed(0)
        self.here = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        before(self.here)
        self.there = copy.deepcopy(self.here)
        with torch.no_grad():
            for tensor in self.there.parameters():
                tensor += 1
        self.owner = Owner(self.there)
        self.remote = Proxies(self.owner, torch.device("cpu"))
        names = [n for n, _ in self.here.named_parameters()]
        names += [n for n, _ in self.here.named_buffers()]
        self.remote.add(self.here, names, views=views_of(self.here))

    def backward_there(self) -> None:
        self.there(torch.randn(5, 3)).square().sum().backward()
        self.remote.outdate(RemoteKind.GRADIENT, RemoteKind.BUFFER)

    def same(self) -> bool:
        self.remote.flush()
        mine, theirs = self.here.state_dict(), self.there.state_dict()
        return all(torch.equal(mine[name], theirs[name]) for name in theirs)
