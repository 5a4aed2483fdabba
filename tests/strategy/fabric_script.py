"""Loops of users of Fabric, one after the other: ``python fabric_script.py FOLDER``.

FOLDER holds ``config.json``: the names of the loops, replicas and stages, maybe an accelerator, and
whether models wait on the CPU; without stages Fabric trains by itself, on one device or by ``ddp``.
Of each loop that a driver has seen to its end it leaves ``<name>.<replica>.pt``, with all tensors
on the CPU.
"""

import json
import sys
import threading
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import HybridGabraFabricStrategy
from lightning_hybrid.errors import HybridError
from lightning_hybrid.run import building

Record = dict[str, Any]
LOOPS: dict[str, Callable[..., Any]] = {}


def loop(function: Callable[..., Any]) -> Callable[..., Any]:
    LOOPS[function.__name__] = function
    return function


class Convolutions(nn.Module):
    """With a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm: nn.Module = nn.GroupNorm(2, 4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Linear(4 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).tanh()
        x = self.second(x).tanh() + x
        logits: Tensor = self.last(x.flatten(1))
        return logits


class WithItsLoss(Convolutions):
    """Returns the loss."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return functional.cross_entropy(super().forward(x), y)


class Statistics(Convolutions):
    """With running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)


class Saturating(nn.Module):
    """An infinite input of a gate gives an infinite gradient to its weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.linspace(-1, 1, 4))
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))
        self.last = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """In float64 whatever the inputs are."""
        x = self.layers((self.first * x.double()).tanh())
        return x + (self.last * y.double()).tanh()


class Tokens(nn.Module):
    """A small transformer, with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.layers(self.embed(x)))
        return logits


class Steps(LightningModule):
    """A LightningModule, whose steps the loop calls."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Convolutions()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return functional.cross_entropy(self.net(x), y)

    def smoothed(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """No step that Lightning knows, so that the loop marks it."""
        x, y = batch
        return functional.cross_entropy(self.net(x), y, label_smoothing=0.1)


def make(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return kind().double()


def images(size: int = 4, batches: int = 6) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size * batches, 1, 4, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (size * batches,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=size)


def texts(size: int = 4, batches: int = 6) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 11, (size * batches, 5), generator=generator)
    return DataLoader(TensorDataset(x), batch_size=size)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def evaluate(model: nn.Module, loader: Any) -> list[float]:
    model.eval()
    with torch.no_grad():
        losses = [functional.cross_entropy(model(x), y).item() for x, y in loader]
    model.train()
    return losses


@loop
def clips_by_norm_and_evaluates(fabric: Fabric) -> Record:
    """SGD with momentum; evaluations before, between and after epochs, by running statistics."""
    loader = fabric.setup_dataloaders(images())
    net = make(Statistics)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1, 0.9))
    seen: Record = {"evaluated": [evaluate(model, loader)], "losses": [], "norms": []}
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            norm = fabric.clip_gradients(model, optimizer, max_norm=0.3)
            seen["norms"].append(float(norm or 0.0))
            optimizer.step()
            seen["losses"].append(loss.item())
        seen["evaluated"].append(evaluate(model, loader))
    return seen | {"weights": weights(model)}


@loop
def accumulates_under_a_scheduler(fabric: Fabric) -> Record:
    """Adam; three batches a step, clipped by value; the rate falls."""
    net = make(Tokens)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, scheduler = fabric.setup(net, optimizer, scheduler=scheduler)
    seen: Record = {"losses": [], "rates": []}
    for number, (x,) in enumerate(fabric.setup_dataloaders(texts(batches=9))):
        steps = number % 3 == 2
        with fabric.no_backward_sync(model, enabled=not steps):
            loss = functional.cross_entropy(model(x).flatten(0, 1), x.roll(1).flatten())
            fabric.backward(loss / 3)
        seen["losses"].append(loss.item())
        if steps:
            fabric.clip_gradients(model, optimizer, clip_val=0.01)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            scheduler.step()
            seen["rates"].append(optimizer.param_groups[0]["lr"])
    return seen | {"weights": weights(model)}


@loop
def accumulates_without_a_word(fabric: Fabric) -> Record:
    """Gradients of two batches are added up, each averaged when it comes."""
    loader = fabric.setup_dataloaders(images())
    net = make(Convolutions)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    losses = []
    for number, (x, y) in enumerate(loader):
        loss = functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        losses.append(loss.item())
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "weights": weights(model)}


@loop
def reads_gradients(fabric: Fabric) -> Record:
    """The loop looks at gradients and clips them itself, and writes to weights."""
    loader = fabric.setup_dataloaders(images())
    net = make(Convolutions)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 0.01))
    seen: Record = {"losses": [], "norms": [], "sums": []}
    for x, y in loader:
        loss = functional.cross_entropy(model(x), y)
        model.zero_grad()
        fabric.backward(loss)
        seen["sums"].append([p.grad.sum().item() for p in model.parameters() if p.grad is not None])
        seen["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), 0.2).item())
        optimizer.step()
        with torch.no_grad():
            net.first.weight.mul_(0.99)
        seen["losses"].append(loss.item())
    return seen | {"weights": weights(model)}


@loop
def calls_the_model_several_times(fabric: Fabric) -> Record:
    """Two calls before a backward."""
    loader = fabric.setup_dataloaders(images())
    net = make(Convolutions)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        one = functional.cross_entropy(model(x), y)
        other = functional.cross_entropy(model(x.flip(3)), y)
        fabric.backward(one + other)
        optimizer.step()
        losses += [one.item(), other.item()]
    return {"losses": losses, "weights": weights(model)}


@loop
def penalises_weights_before_the_call(fabric: Fabric) -> Record:
    """Before the call of the model, and once behind it; over two batches a step."""
    loader = fabric.setup_dataloaders(images())
    net = make(Convolutions)
    # (SGD would not tell: steps by two parts of a gradient are a step by their sum)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 0.01))
    losses = []
    for number, (x, y) in enumerate(loader):
        before = sum(weight.square().sum() for weight in model.parameters())
        loss = functional.cross_entropy(model(x), y)
        loss = loss + 0.1 * before
        if number == 4:
            loss = loss + 0.1 * net.first.weight.abs().sum()
        fabric.backward(loss)
        losses.append(loss.item())
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "weights": weights(model)}


@loop
def steps_with_a_closure(fabric: Fabric) -> Record:
    """Model and optimizer are set up one after the other."""
    loader = fabric.setup_dataloaders(images())
    model = fabric.setup_module(make(Convolutions))
    optimizer: Any = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), 0.1, 0.9))
    losses = []
    for x, y in loader:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            return loss

        losses.append(optimizer.step(closure).item())
    return {"losses": losses, "weights": weights(model)}


@loop
def calls_steps_of_a_lightning_module(fabric: Fabric) -> Record:
    loader = fabric.setup_dataloaders(images())
    net = make(Steps)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    model.mark_forward_method("smoothed")
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        loss = model.training_step(batch) + model.smoothed(batch)
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "weights": weights(model)}


@loop
def compiles_its_model(fabric: Fabric) -> Record:
    """With torch.compile, which Fabric takes off and puts on again around its own."""
    loader = fabric.setup_dataloaders(images())
    net = make(Convolutions)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    compiled: Any = torch.compile(net, backend="eager")
    model, optimizer = fabric.setup(compiled, optimizer)
    return {"losses": trained(fabric, model, optimizer, loader), "weights": weights(net)}


@loop
def steps_two_optimizers(fabric: Fabric) -> Record:
    """Of two parts of the model, one every second batch."""
    loader = fabric.setup_dataloaders(images())
    net = make(Convolutions)
    first = torch.optim.SGD([*net.first.parameters(), *net.norm.parameters()], 0.1)
    second = torch.optim.Adam([*net.second.parameters(), *net.last.parameters()], 0.01)
    model, first, second = fabric.setup(net, first, second)
    losses = []
    for number, (x, y) in enumerate(loader):
        loss = functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        for optimizer in (first, second)[number % 2 :]:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "weights": weights(model)}


@loop
def goes_backward_by_itself(fabric: Fabric) -> Record:
    """Past Fabric: through another module, and where each replica keeps its own gradients."""
    loader = fabric.setup_dataloaders(images())
    net = make(Convolutions)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    losses = trained(fabric, model, optimizer, loader)
    other = nn.Linear(1, 1)
    other(torch.ones(1, 1)).sum().backward()
    x = torch.ones(4, 1, 4, 4, dtype=torch.float64, device=fabric.device)
    with fabric.no_backward_sync(model):
        net(x).sum().backward()
    net(x * (2 + fabric.global_rank)).sum().backward()
    gradients = {name: given.grad.clone() for name, given in net.named_parameters()}
    optimizer.step()
    losses += trained(fabric, model, optimizer, loader)
    return {"losses": losses, "weights": weights(model), "gradients": gradients}


@loop
def speaks_to_other_ranks(fabric: Fabric) -> Record:
    net = make(Convolutions)
    told = fabric.broadcast([17, fabric.global_rank])
    of_last = fabric.broadcast(fabric.global_rank, src=fabric.world_size - 1)
    fabric.barrier()
    model = fabric.setup(net)
    fabric.barrier("behind the setup")
    mine = torch.tensor([1.0, 2.0], device=fabric.device) * (1 + fabric.global_rank)
    return {
        "told": [*told, of_last],
        "told later": fabric.broadcast(fabric.global_rank),
        "mean": fabric.all_reduce(mine.clone()),
        "sum": fabric.all_reduce(mine.clone(), reduce_op="sum"),
        "all": fabric.all_gather(mine),
        "world": (fabric.world_size, fabric.global_rank, fabric.is_global_zero),
        "weights": weights(model),
    }


def trained(fabric: Fabric, model: Any, optimizer: Any, loader: Any) -> list[float]:
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


@loop
def returns_its_loss(fabric: Fabric) -> Record:
    """The network does; gradients are accumulated over two batches."""
    loader = fabric.setup_dataloaders(images())
    net = make(WithItsLoss)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 0.01))
    losses = []
    for number, (x, y) in enumerate(loader):
        with fabric.no_backward_sync(model, enabled=number % 2 == 0):
            loss = model(x, y)
            fabric.backward(loss / 2)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "weights": weights(model)}


@loop
def saves_and_loads(fabric: Fabric) -> Record:
    """A checkpoint after an epoch, to which it comes back after another one."""
    loader = fabric.setup_dataloaders(images())
    net = make(Convolutions)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 0.01))
    losses = trained(fabric, model, optimizer, loader)
    state = {"model": model, "optimizer": optimizer, "epoch": 1}
    fabric.save("saved.ckpt", state)
    states = deepcopy(optimizer.state_dict())
    losses += trained(fabric, model, optimizer, loader)
    state["epoch"] = 2
    assert fabric.load("saved.ckpt", state) == {}
    assert state["epoch"] == 1
    losses += trained(fabric, model, optimizer, loader)
    copy = {name: value.clone() for name, value in model.state_dict().items()}
    losses += trained(fabric, model, optimizer, loader)
    model.load_state_dict(copy)
    losses += trained(fabric, model, optimizer, loader)
    return {"losses": losses, "states": states, "weights": weights(model)}


@loop
def goes_on_from_a_checkpoint(fabric: Fabric) -> Record:
    """From ``from.ckpt``."""
    loader = fabric.setup_dataloaders(images())
    net = make(Convolutions)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 0.5))
    fabric.load("from.ckpt", {"model": model, "optimizer": optimizer})
    losses = trained(fabric, model, optimizer, loader)
    return {"losses": losses, "weights": weights(model)}


@loop
def scales_its_loss(fabric: Fabric) -> Record:
    """With "16-mixed", clipped in every second batch; infinite in two batches, each in one stage
    of one replica.
    """
    torch.set_default_dtype(torch.float64)  # in which Fabric gives back what a model returns
    try:
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(2, 24, 4, generator=generator)
        x[4, 0] = y[13, 1] = torch.inf
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, y), batch_size=4))
        net = make(Saturating)
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1, 0.9))
        scaler = fabric.strategy.precision.scaler  # type: ignore[attr-defined]
        seen: Record = {"losses": [], "norms": [], "scales": [], "sums": []}
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = model(x, y).square().mean()
            fabric.backward(loss)
            if number % 2:
                norm: Any = fabric.clip_gradients(
                    model, optimizer, max_norm=0.1, error_if_nonfinite=False
                )
                seen["norms"].append(norm.item() if norm.isfinite() else -1.0)
            optimizer.step()
            seen["losses"].append(loss.item())
            seen["scales"].append(scaler.get_scale())
            seen["sums"].append(sum(value.sum().item() for value in model.state_dict().values()))
        return seen | {"weights": weights(model)}
    finally:
        torch.set_default_dtype(torch.float32)


@loop
def trains_in_half_precision(fabric: Fabric) -> Record:
    """With "16-mixed" by its name, of which Fabric makes bf16 on a CPU; clipped by norm."""
    net = make(Convolutions).float()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 0.01))
    seen: Record = {"losses": [], "norms": []}
    for x, y in fabric.setup_dataloaders(images()):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        seen["norms"].append(fabric.clip_gradients(model, optimizer, max_norm=0.3))
        optimizer.step()
        seen["losses"].append(loss.item())
    return seen | {"weights": weights(model)}


KEPT: list[Any] = []
"""A model, and the optimizer that was set up for it last."""
WHOLE = {"clips_by_norm_and_evaluates", "trains_in_half_precision"}
"""Loops of batch statistics, which are those of a micro-batch, or of sums that are rounded."""
PRECISIONS: dict[str, Any] = {"trains_in_half_precision": "16-mixed"}


@loop
def trains_what_the_script_keeps(fabric: Fabric) -> Record:
    """The loop is launched again and again, on one model of the script."""
    net = KEPT[0]
    KEPT[1:] = [torch.optim.SGD(net.parameters(), 0.1, 0.9)]
    model, optimizer = fabric.setup(*KEPT)
    losses = trained(fabric, model, optimizer, fabric.setup_dataloaders(images()))
    return {"losses": losses}


@loop
def is_refused(fabric: Fabric) -> Record:
    """What a user may try, and the words of each refusal."""
    assert fabric.all_reduce(torch.ones(1), reduce_op="sum") == fabric.world_size
    words: list[str] = []

    def attempt(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
        try:
            function(*arguments, **keywords)
        except HybridError as error:
            words.append(str(error))

    net = make(Convolutions)
    optimizer, other = (torch.optim.SGD(net.parameters(), 0.1) for _ in range(2))
    attempt(fabric.setup_optimizers, optimizer)
    attempt(fabric.setup, nn.LazyLinear(1))
    if fabric.world_size > 1:
        attempt(fabric.setup, nn.Sequential(nn.SyncBatchNorm(1)))
    by_hand = make(Steps)
    by_hand.automatic_optimization = False
    attempt(fabric.setup, by_hand)
    model, optimizer = fabric.setup(net, optimizer)
    attempt(fabric.setup, make(Tokens))
    attempt(fabric.setup_optimizers, other)
    attempt(fabric.clip_gradients, model, other, max_norm=1.0)
    attempt(fabric.backward, torch.ones(1, requires_grad=True))
    return {"words": words}


@loop
def sets_nothing_up(fabric: Fabric) -> Record:
    return {"heard": torch.tensor(fabric.broadcast(7))}


@loop
def fails_on_a_driver(fabric: Fabric) -> None:
    net = make(Convolutions)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    trained(fabric, model, optimizer, fabric.setup_dataloaders(images()))
    if fabric.global_rank == fabric.world_size - 1:
        raise ValueError("a user's mistake")
    trained(fabric, model, optimizer, fabric.setup_dataloaders(images()))


@loop
def fails_before_the_setup(fabric: Fabric) -> None:
    if fabric.global_rank == fabric.world_size - 1:
        raise ValueError("a user's mistake")
    fabric.setup(make(Convolutions))


@loop
def fails_in_a_stage(fabric: Fabric) -> None:
    """A token that is not in the table, which the first stage has."""
    net = make(Tokens)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    for number in range(4):
        x = torch.full((4, 5), 12 if number == 2 else number, device=fabric.device)
        fabric.backward(model(x).square().mean())
        optimizer.step()


FAILS = [name for name in LOOPS if name.startswith("fails")]


@loop
def trains_with_a_global_batch(fabric: Fabric) -> Record:
    """Replicas divide batches of 8; the loss is the mean over all of them."""
    net = make(Convolutions)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 0.01))
    loader = fabric.setup_dataloaders(images(8 // fabric.world_size, 4 * fabric.world_size))
    local = torch.tensor(trained(fabric, model, optimizer, loader), device=fabric.device)
    return {"losses": fabric.all_reduce(local), "weights": weights(model)}


@loop
def goes_backward_twice(fabric: Fabric) -> Record:
    """Two calls, then a backward of each: DDP would average the first one alone."""
    net = make(Convolutions)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 0.01))
    losses = []
    for x, y in fabric.setup_dataloaders(images(8 // fabric.world_size, 4 * fabric.world_size)):
        optimizer.zero_grad()
        one = functional.cross_entropy(model(x), y)
        other = functional.cross_entropy(model(x.flip(3)), y)
        fabric.backward(one, retain_graph=True)
        fabric.backward(other * 0.5)
        fabric.backward(one)
        optimizer.step()
        losses.append(one.item() + other.item())
    local = torch.tensor(losses, device=fabric.device)
    return {"losses": fabric.all_reduce(local), "weights": weights(model)}


def run(name: str, fabric: Fabric, times: int = 1) -> Any:
    """What a loop returns, and the model that the script has kept."""
    KEPT[:] = [make(Convolutions)]
    records = [fabric.launch(LOOPS[name]) for _ in range(times)]
    kept, *optimizers = KEPT
    states = [pair for optimizer in optimizers for pair in optimizer.state.items()]
    return {
        "seen": records,
        "kept": weights(kept),
        "threads": sum(t.name.startswith("hybrid") for t in threading.enumerate()),
        "states beside": all(s["momentum_buffer"].device == p.device for p, s in states),
    }


def plugins(name: str, accelerator: str) -> list[Any]:
    """The precision of a loop: of "16-mixed" Fabric makes bf16 on a CPU, but not of a plugin."""
    if name != "scales_its_loss":
        return []
    device = "cpu" if accelerator == "cpu" else "cuda"
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2)
    return [MixedPrecision("16-mixed", device, scaler)]


def main(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    replicas, stages = config["replicas"], config["stages"]
    accelerator = config.get("accelerator", "cpu")
    torch.set_num_threads(1)
    if config.get("waits"):  # for devices without room for a whole model
        building.with_room_for = lambda *_: torch.device("cpu")
    for name in config["loops"]:
        strategy: Any = "ddp" if replicas > 1 else "auto"
        if stages:
            split: dict[str, Any] = {"num_microbatches": 1} if name in WHOLE else {}
            strategy = HybridGabraFabricStrategy(
                data_parallel_size=replicas,
                pipeline_parallel_size=stages,
                **split,
                **config["options"],
            )
        devices = replicas * max(1, stages)
        fabric = Fabric(
            accelerator=accelerator,
            devices=devices,
            strategy=strategy,
            precision=PRECISIONS.get(name),
            plugins=plugins(name, accelerator),
        )
        found = run(name, fabric, times=2 if name == "trains_what_the_script_keeps" else 1)
        replica = strategy.coordinates.dp_rank if stages else fabric.global_rank
        found = apply_to_collection(found, Tensor, Tensor.cpu)
        torch.save(found, folder / f"{name}.{replica}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
