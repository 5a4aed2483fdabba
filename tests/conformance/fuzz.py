"""Random networks with the habits of users' code, and what one device makes of them.

A seed, or Hypothesis, gives a :class:`Recipe`; a recipe gives a :class:`~suite.Row`; and
:func:`one_device` trains it in plain PyTorch, with neither a Trainer nor a strategy.
"""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from lightning.pytorch import seed_everything
from suite import SEED, Row
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

WIDTH = 6
EPOCH = (4, 5, 6, 4)
"""Sizes of an epoch's batches; each run has two epochs."""
STEPS = 2 * len(EPOCH)


# ---------------------------------------------------------------- blocks


class Block(nn.Module):
    """From (batch, WIDTH) to the same.

    Attributes:
        draws: whether it uses random numbers.
        normalises: whether it has batch statistics, so that its numbers are those of micro-batches.
        meets: whether samples meet in it otherwise, so that batches must not be split.
    """

    draws = normalises = meets = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.owner: Callable[[], Any] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Residual(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.gelu(self.layer(x))


class Gated(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(WIDTH, 3), nn.SiLU(), nn.Linear(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * torch.sigmoid(self.gate(x))


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        x[:, 1:3].mul_(0.5)
        x += 0.1
        x[:, 0] = 1.0
        return nn.functional.leaky_relu(x, 0.2, inplace=True)


class Powers(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(self.layer(x))
        return (x**2 + 2**x - x**-0.5) / 3


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.groups = nn.GroupNorm(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.groups(torch.tanh(self.layer(self.norm(x))))


class Convolved(Block):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.conv(x[:, None]).chunk(2, dim=1)
        return self.layer(torch.tanh(one).flatten(1) * other.squeeze(1).sigmoid())


class Recurrent(Block):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(2, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.cell(x.view(-1, 3, 2))[0].flatten(1))


class Attends(Block):
    def forward(self, x: Tensor) -> Tensor:
        q = self.layer(x).view(-1, 3, 2)
        return x + (q @ q.transpose(1, 2)).softmax(-1).matmul(q).flatten(1)


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Turned(Block):
    """In memory the numbers of one sample are far from each other."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)).t().contiguous().t()


class Apart(Block):
    """Its numbers lie in memory with others between them."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        return torch.stack((x, x.detach()), 2)[..., 0]


class Negated(Block):
    """Its numbers are to be negated when they are read."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x, torch.tanh(self.layer(x))).conj().imag


class LooksAtTheLayout(Block):
    """Computes by the order of numbers in memory."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_contiguous():
            return torch.tanh(self.layer(x))
        return torch.sigmoid(self.layer(x)) * (1 + x.stride(0) / 20)


class PartlyWithoutGradient(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = 1 / (1 + x.abs().amax(1, keepdim=True))
        return self.layer(x) * scale + x.detach().softmax(1)


class Drops(Block):
    draws = True

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.tanh(self.layer(x)), 0.3, self.training)


class DropsInACheckpoint(Drops):
    """Its second run has to draw what the first has drawn."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class AddsNoise(Block):
    draws = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        return x + 0.1 * torch.randn_like(x) if self.training else x


class Normalises(Block):
    normalises = True

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.layer(x)))


class Centers(Block):
    meets = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return torch.tanh(x - x.mean(0))


class UsesTheSize(Block):
    meets = True

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * (x.shape[0] / 4)


class ReadsTheStep(Block):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * (1 + self.owner().global_step / 10)


class BranchesOnTheEpoch(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return torch.tanh(x) if self.owner().current_epoch == 0 else torch.sigmoid(x)


class Counts(Block):
    """Its counter matters from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.layer(x)) * min(1.0, 0.4 + 0.1 * self.calls)


class ReadsSettings(Block):
    """A dictionary of numbers and an activation, which the user's step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.settings: dict[str, Any] = {"scale": 1.0, "activation": torch.tanh, "extra": [0.1]}

    def forward(self, x: Tensor) -> Tensor:
        x = self.settings["activation"](self.layer(x)) * self.settings["scale"]
        for value in self.settings["extra"]:
            x = x + value
        return x


class StoresPenalty(Block):
    """One number for each sample, which the loss uses."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        self.store(x)
        return x

    def store(self, x: Tensor) -> None:
        self.penalty = x.square().mean(1)


class StoresPenaltyOfTheBatch(StoresPenalty):
    """One number for the batch, which nothing after it uses: a tail."""

    def store(self, x: Tensor) -> None:
        self.penalty = x.square().mean() + x.abs().amax()


class AttendsByHeads(Block):
    """Tokens of a sample attend, the batch first, in two heads."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.layer(x).view(-1, 3, 2, 1).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(q, q, q)
        return x + mixed.transpose(1, 2).flatten(1)


class AttendsTimeFirst(Block):
    """The same by a layer that wants the tokens first."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        q = self.layer(x).view(-1, 3, 2).transpose(0, 1)
        return x + self.attention(q, q, q, need_weights=False)[0].transpose(0, 1).flatten(1)


class AttendsAmongSamples(AttendsTimeFirst):
    """The same with the batch first, so that each token sees that of the other samples."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.layer(x).view(-1, 3, 2)
        return x + self.attention(q, q, q)[0].flatten(1)


class Folded(Block):
    """The tokens of all samples as one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.token(self.layer(x).view(-1, 2))
        return torch.tanh(tokens.softmax(-1) + tokens).view(x.shape)


class RollsWhenFolded(Folded):
    """Each token gets something of the one before, which may be another sample's."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.token(self.layer(x).view(-1, 2))
        return torch.tanh(tokens + 0.5 * tokens.roll(1, 0)).view(x.shape)


def _sorted(x: Tensor) -> Tensor:
    return x + 0.1 * x[x[:, 0].argsort()]


STARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "mixed": lambda x: 0.7 * x + 0.3 * x.flip(0),
    "standardised": lambda x: (x - x.mean(0)) / (x.var(0) + 0.1).sqrt(),
    "sorted": _sorted,
    "one before": lambda x: x + nn.functional.pad(x, (0, 0, 1, 0))[:-1],
}
"""What a network does with its input first; samples meet in all but one."""

ENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda h: h,
    "centred": lambda h: h - h.mean(0),
    "contrasted": lambda h: h + (h @ h.T).softmax(1) @ h,
    "ranked": lambda h: h * (1 + 0.1 * h.argsort(0).argsort(0)),
    "folded": lambda h: (h.view(-1) + 0.1 * h.view(-1).roll(1)).view(h.shape),
}
"""What it does with its logits last."""

PLAIN = (Block, Residual, Gated, InPlace, Powers, Normed, Convolved, Recurrent, Attends)
OTHER_LAYOUTS = 2000
"""From this seed on blocks are drawn from `LAID_OUT`, too."""
MEETINGS = 3000
"""From this seed on samples meet at the start or the end, and blocks are drawn from `FOLDING`."""
FOLDING = (AttendsByHeads, AttendsTimeFirst, Folded)
AMONG_SAMPLES = (AttendsAmongSamples, RollsWhenFolded)
LAID_OUT = (Turned, Apart, Negated, LooksAtTheLayout, LooksAtTheLayout)
REGIONS = (Checkpointed, PartlyWithoutGradient)
PYTHON = (ReadsTheStep, BranchesOnTheEpoch, Counts, ReadsSettings, StoresPenalty)
RANDOM = (Drops, DropsInACheckpoint, AddsNoise)
OF_THE_BATCH = (Centers, UsesTheSize, StoresPenaltyOfTheBatch)


# ---------------------------------------------------------------- a network


@dataclass
class Recipe:
    """What a seed has decided.

    Attributes:
        kinds: of the blocks.
        order: in which blocks run; some run more than once.
        skips: position in the order: earlier position whose output is added before it.
        ties: blocks that share a weight.
        frozen: blocks whose bias is not trained.
        hooks: blocks that have a forward hook: what it does.
        whole: whether the LightningModule itself is the network.
        arguments: how it is called: tensor, dictionary, keyword (a number that changes).
        output: what it returns: tensor, tuple, dictionary.
        changes: whether the user changes settings and hooks in the middle of the run.
        adam: whether the optimizer is Adam.
        cuts: blocks where the later ones of three stages begin.
        start: what is done with the input, of `STARTS`.
        end: what is done with the logits, of `ENDS`.
        loss_inside: whether a loss is computed in the network.
    """

    kinds: list[type[Block]]
    order: list[int]
    skips: dict[int, int] = field(default_factory=dict)
    ties: tuple[int, int] | None = None
    frozen: list[int] = field(default_factory=list)
    hooks: dict[int, str] = field(default_factory=dict)
    whole: bool = False
    arguments: str = "tensor"
    output: str = "tensor"
    changes: bool = False
    adam: bool = False
    cuts: tuple[int, int] = (1, 2)
    start: str = ""
    end: str = ""
    loss_inside: bool = False

    @property
    def escapes(self) -> bool:
        """Whether a hook keeps what a checkpointed block has: Python that a second run repeats."""
        return any(
            issubclass(self.kinds[block], (Checkpointed, DropsInACheckpoint)) and what != "change"
            for block, what in self.hooks.items()
        )

    @property
    def parts(self) -> tuple[int, ...]:
        """Numbers of parts of a batch that are right; the first is preferred."""
        if any(kind.meets for kind in self.kinds):
            return (1,)
        per_part = any(kind.draws or kind.normalises for kind in self.kinds)
        return (2, 1) if per_part else (1,)


def recipe(seed: int) -> Recipe:
    """The network of a seed."""
    draw = random.Random(seed)
    return drawn(draw, layouts=seed >= OTHER_LAYOUTS, meetings=seed >= MEETINGS)


def drawn(draw: random.Random, *, layouts: bool, meetings: bool = False) -> Recipe:
    """A network of 4 to 7 blocks, of which some have habits.

    Args:
        draw: what decides.
        layouts: whether some blocks are of `LAID_OUT`.
        meetings: whether samples meet (and nothing else makes numbers differ from the whole
            batch's: no random layers, no batch normalisation).
    """
    count = draw.randint(4, 7)
    groups = _groups(draw, layouts=layouts, meetings=meetings)
    kinds = [draw.choice(draw.choice(groups)) for _ in range(count)]
    order = list(range(count))
    cuts = sorted(draw.sample(range(1, count), 2))
    if draw.random() < 0.3:
        again = draw.randrange(count)
        if not kinds[again].normalises:  # two stages cannot share running statistics
            order.insert(draw.randint(again + 1, count), again)
    found = Recipe(kinds, order, cuts=(cuts[0], cuts[1]))
    found.skips = {
        late: draw.randrange(late) for late in range(1, len(order)) if draw.random() < 0.25
    }
    if draw.random() < 0.25:
        one, other = draw.sample(range(count), 2)
        found.ties = one, other
    found.frozen = [b for b in range(count) if draw.random() < 0.1]
    kinds_of_hooks = ("use", "look", "change", "into")
    found.hooks = {b: draw.choice(kinds_of_hooks) for b in range(count) if draw.random() < 0.25}
    found.whole = draw.random() < 0.4
    found.arguments = draw.choice(("tensor", "tensor", "dictionary", "keyword"))
    found.output = draw.choice(("tensor", "tuple", "dictionary"))
    found.changes = draw.random() < 0.5
    # Adam divides by its size the gradient of a bias before batch norm, which is rounding only
    found.adam = draw.random() < 0.3 and not any(kind.normalises for kind in kinds)
    if meetings:
        found.start, found.end = draw.choice([*STARTS]), draw.choice([*ENDS])
        found.loss_inside = draw.random() < 0.5
    return found


def _groups(draw: random.Random, *, layouts: bool, meetings: bool) -> list[tuple[type[Block], ...]]:
    """Groups of blocks to draw from."""
    groups: list[tuple[type[Block], ...]] = [PLAIN, PLAIN, REGIONS, PYTHON, PYTHON]
    if layouts:
        groups += [LAID_OUT, LAID_OUT]
    if meetings:
        groups += [FOLDING] * 4
        if draw.random() < 0.15:
            groups.append(AMONG_SAMPLES)
    elif draw.random() < 0.3:
        groups.append(RANDOM)
    if not meetings and draw.random() < 0.3:
        groups.append((Normalises,))
    if draw.random() < 0.15:
        groups.append(OF_THE_BATCH)
    return groups


class Runs:
    """What the network and a LightningModule that is its own network have in common."""

    blocks: nn.ModuleList
    head: nn.Linear
    recipe: Recipe
    kept: dict[str, Tensor]

    def make(self, made: Recipe, owner: Callable[[], Any]) -> None:
        self.recipe, self.kept = made, {}
        self.blocks = nn.ModuleList(kind() for kind in made.kinds)
        self.head = nn.Linear(WIDTH, 3)
        if made.ties is not None:
            one, other = made.ties
            self.blocks[other].layer.weight = self.blocks[one].layer.weight
        for number, block in enumerate(self.blocks):
            block.owner = owner
            if number in made.frozen:
                block.layer.bias.requires_grad_(False)
            if number in made.hooks:
                self.hook(number, made.hooks[number])

    def hook(self, number: int, what: str) -> Any:
        block = self.blocks[number]
        if what == "change":
            return block.register_forward_hook(lambda module, inputs, output: output * 0.9)
        if what == "into":

            def keep_inputs(module: nn.Module, inputs: tuple[Tensor]) -> None:
                self.kept[f"use{number}"] = inputs[0]

            return block.layer.register_forward_pre_hook(keep_inputs)

        def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
            value = output if what == "use" else output.detach().clone()
            self.kept[f"{what}{number}"] = value

        return block.layer.register_forward_hook(keep)

    def run(self, x: Any, scale: float = 1.0) -> Any:
        if isinstance(x, dict):
            x, scale = x["x"], x["scale"]
        made: list[Tensor] = []
        x = STARTS[self.recipe.start](x * scale)
        for position, number in enumerate(self.recipe.order):
            if position in self.recipe.skips:
                x = x + made[self.recipe.skips[position]]
            x = self.blocks[number](x)
            made.append(x)
        logits, early = ENDS[self.recipe.end](self.head(x)), made[0]
        if self.recipe.loss_inside:
            early = early.square().mean() + logits.logsumexp(1).mean()
        if self.recipe.output == "tuple":
            return logits, early
        return {"logits": logits, "early": early} if self.recipe.output == "dictionary" else logits


class Net(nn.Module, Runs):
    def forward(self, x: Any, scale: float = 1.0) -> Any:
        return self.run(x, scale)


# ---------------------------------------------------------------- the user's module


class Fuzzed(Row, Runs):
    """The LightningModule around a recipe; `seed` chooses its data."""

    seed: ClassVar[int] = 0
    made: ClassVar[Recipe]
    options: ClassVar = {"max_steps": STEPS}
    microbatches = 2

    def build(self) -> None:
        owner = weakly(self)
        if self.made.whole:
            self.make(self.made, owner)
        else:
            self.net = Net()  # type: ignore[assignment]
            self.net.make(self.made, owner)

    @classmethod
    def parts(cls) -> tuple[int, ...]:  # type: ignore[override]
        return cls.made.parts

    @property
    def host(self) -> Any:
        """What has the blocks."""
        return self.net if "net" in self._modules else self

    def forward(self, x: Any, scale: float = 1.0) -> Any:
        return self.run(x, scale)

    def call(self, *arguments: Any, **named: Any) -> Any:
        """The network's call; the reference has another."""
        return self.host(*arguments, **named)

    def train_dataloader(self) -> Any:
        dataset = self.dataset(sum(EPOCH) * self.trainer.world_size, seed=100 + self.seed)
        parts = torch.arange(len(dataset)).split(list(EPOCH) * self.trainer.world_size)
        mine = parts[self.trainer.global_rank * len(EPOCH) :][: len(EPOCH)]
        return DataLoader(dataset, batch_sampler=[part.tolist() for part in mine])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        step = len(self.seen) // 2
        if self.host.recipe.changes:
            self.change(step)
        loss = self.loss(*batch)
        looked = {n: t.detach().clone() for n, t in self.host.kept.items()}
        self.seen += [loss.item(), looked]
        return loss

    def change(self, step: int) -> None:
        for block in self.host.blocks:
            if isinstance(block, ReadsSettings):
                block.settings["scale"] = 1 / (1 + step)
                if step == 3:
                    block.settings["activation"] = nn.functional.softsign
                if step == 5:
                    block.settings["extra"].append(0.2)
        if step == 2:
            self.handle = self.host.hook(0, "use")
        if step == 6:
            self.handle.remove()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        made, scale = self.host.recipe, 1 + 0.1 * (len(self.seen) // 2)
        self.host.kept.clear()
        if made.arguments == "dictionary":
            output = self.call({"x": x, "scale": scale})
        elif made.arguments == "keyword":
            output = self.call(x, scale=scale)
        else:
            output = self.call(x)
        if made.output == "tensor":
            loss = cross_entropy(output, y)
        else:
            logits, early = output.values() if made.output == "dictionary" else output
            loss = cross_entropy(logits, y) + 0.1 * early.square().mean()
        for name, value in self.host.kept.items():
            if name.startswith("use"):
                loss = loss + 0.05 * value.square().mean()
        penalties = [b.penalty for b in self.host.blocks if isinstance(b, StoresPenalty)]
        return loss + 0.1 * sum(p.mean() for p in penalties)

    def configure_optimizers(self) -> Any:
        if self.host.recipe.adam:
            return torch.optim.Adam(self.parameters(), lr=0.01)
        return super().configure_optimizers()


def weakly(module: Row) -> Callable[[], Any]:
    """A way back to the LightningModule that is no sub-module."""
    return lambda: module


def fuzzed(seed: int) -> type[Fuzzed]:
    """The row of a seed."""
    return row_of(recipe(seed), f"Seed{seed}", seed)


def row_of(made: Recipe, name: str, seed: int = 0) -> type[Fuzzed]:
    """The row of a recipe.

    Args:
        made: the recipe.
        name: of the row.
        seed: of its data.
    """
    prefix = "" if made.whole else "net."
    early, late = (f"{prefix}blocks.{block}" for block in made.cuts)
    refusal = ("checkpoint", "fuzz.py") if made.escapes else ()
    cuts = {2: [late], 3: [early, late]}
    own = {"seed": seed, "made": made, "cuts": cuts, "equal_or_refused": refusal}
    return type(name, (Fuzzed,), own)


# ---------------------------------------------------------------- one device


def one_device(row: type[Fuzzed], replicas: int, parts: Sequence[int]) -> list[Fuzzed]:
    """Train in plain PyTorch; each call of the network is one call per part of the batch.

    Args:
        row: the module.
        replicas: how many.
        parts: of each step.

    Returns:
        The modules of all replicas, with what they have seen and their last weights.
    """
    seed_everything(SEED, verbose=False)
    first = row()
    copies = [first]
    for _ in range(1, replicas):
        seed_everything(SEED, verbose=False)
        copies.append(row())
    trainers = [SimpleNamespace(world_size=replicas, global_rank=r) for r in range(replicas)]
    for module, trainer in zip(copies, trainers):
        module._trainer = trainer
        module.call = in_parts(module, trainer.global_rank, parts)
    optimizers = [module.configure_optimizers() for module in copies]
    batches = [list(module.train_dataloader()) for module in copies]
    for step in range(STEPS):
        for module, trainer, mine in zip(copies, trainers, batches):
            trainer.global_step, trainer.current_epoch = step, step // len(EPOCH)
            module.zero_grad()
            module.training_step(mine[step % len(EPOCH)], step % len(EPOCH)).backward()
        _average([list(module.parameters()) for module in copies])
        for optimizer in optimizers:
            optimizer.step()
    return copies


def in_parts(module: Fuzzed, replica: int, parts: Sequence[int]) -> Callable[..., Any]:
    """The network's call, in parts; what it keeps is put together, and counted once."""
    from lightning_hybrid.stage.random_numbers import microbatch_seed, seed_number_of

    def call(x: Any, scale: float = 1.0) -> Any:
        host, outputs, kept, stores = module.host, [], [], []
        blocks = [b for b in host.blocks if isinstance(b, Counts)]
        stored = [b for b in host.blocks if isinstance(b, StoresPenalty)]
        counts = [b.calls for b in blocks]
        for block in stored:
            block.store = partial(setattr, block, "stored")  # what the penalty is made of
        tensor = x["x"] if isinstance(x, dict) else x
        count = parts[module.trainer.global_step]
        for index, part in enumerate(tensor.chunk(count)):
            for block, calls in zip(blocks, counts):
                block.calls = calls
            draw = seed_number_of(module.trainer.global_step, 0)
            with _generators(microbatch_seed(SEED, replica, draw, index)):
                argument = {**x, "x": part} if isinstance(x, dict) else part
                outputs.append(host(argument, scale=scale))
            kept.append(dict(host.kept))
            stores.append([b.stored for b in stored])
        host.kept.update(_join(kept))
        for block, values in zip(stored, zip(*stores)):
            del block.store
            block.store(torch.cat(values))
        return _join(outputs)

    return call


def _join(values: list[Any]) -> Any:
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, dict):
        return {name: torch.cat([v[name] for v in values]) for name in first}
    if isinstance(first, tuple):
        return tuple(torch.cat(part) for part in zip(*values))
    return torch.cat(values)


@contextmanager
def _generators(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _average(replicas: list[list[nn.Parameter]]) -> None:
    for same in zip(*replicas):
        if same[0].grad is not None:
            mean = torch.stack([p.grad for p in same if p.grad is not None]).mean(0)
            for parameter in same:
                parameter.grad = copy.deepcopy(mean)
