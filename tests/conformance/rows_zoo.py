"""Networks that people train, small; those of other packages from random configurations."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from suite import ONE_OF_THREE, ONE_OF_TWO, TWO_OF_TWO, Layers, Row, Run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

EVERY = (ONE_OF_TWO, ONE_OF_THREE, TWO_OF_TWO)


class _Net(Row):
    """Its network is the row's own `Net`."""

    class Net(nn.Module):
        pass

    def build(self) -> None:
        self.net = self.Net()


def tokens(x: Tensor, kinds: int = 16) -> Tensor:
    """Features as words: (batch, features) to integers below ``kinds``."""
    return ((x + 2) * kinds / 4).long().clamp(0, kinds - 1)


# ---------------------------------------------------------------- transformers


class TrainsGPT2(Row):
    """GPT2 of transformers with labels: one matrix of words in the first and in the last layer, the
    loss is made within.
    """

    fast = True
    needs = "transformers"
    trains = False  # gradients of the shared matrix arise in two stages
    cuts: ClassVar = {
        2: ["net.transformer.h.1"],
        3: ["net.transformer.h.1", "net.transformer.h.2"],
    }

    def build(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_layer": 3, "n_embd": 16, "n_head": 2, "vocab_size": 16, "n_positions": 8}
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        self.net = GPT2LMHeadModel(GPT2Config(**sizes, **rates, **ends))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        words = tokens(x)
        return self.net(words, labels=words).loss


class TrainsGPT2WithoutLabels(TrainsGPT2):
    """GPT2 of transformers with a padding mask; the loss is in the user's code.

    The batch is split.
    """

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        words = tokens(x)
        mask = torch.arange(words.shape[1]) >= (y % 2)[:, None]
        logits = self.net(input_ids=words, attention_mask=mask.long()).logits
        return cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


class TrainsLoRA(TrainsGPT2):
    """LoRA by PEFT with default arguments: all weights but the adapters' are frozen."""

    needs = "peft"
    trains = True

    cuts: ClassVar = {
        2: ["net.base_model.model.transformer.h.1"],
        3: ["net.base_model.model.transformer.h.1", "net.base_model.model.transformer.h.2"],
    }

    def build(self) -> None:
        from peft import LoraConfig, get_peft_model

        super().build()
        self.net = get_peft_model(self.net, LoraConfig(fan_in_fan_out=True))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


class TrainsT5(Row):
    """T5 of transformers, with one tied matrix of words. Encoder, decoder and head use it."""

    needs = "transformers"
    trains = False
    cuts: ClassVar = {
        2: ["net.decoder.block.1"],
        3: ["net.encoder.block.1", "net.decoder.block.1"],
    }

    def build(self) -> None:
        from transformers import T5Config, T5ForConditionalGeneration

        sizes = {"vocab_size": 16, "d_model": 8, "d_kv": 4, "d_ff": 16}
        layers = {"num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
        config = T5Config(**sizes, **layers, decoder_start_token_id=0)
        self.net = T5ForConditionalGeneration(config)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        words = tokens(x)
        return self.net(input_ids=words, labels=words.flip(1)).loss


class TrainsWhisper(Row):
    """Whisper of transformers: convolutions, an encoder, a decoder."""

    needs = "transformers"
    trains = False
    cuts: ClassVar = {
        2: ["net.model.decoder.layers.1"],
        3: ["net.model.encoder.layers.1", "net.model.decoder.layers.1"],
    }

    def build(self) -> None:
        from transformers import WhisperConfig, WhisperForConditionalGeneration

        sizes = {"vocab_size": 20, "num_mel_bins": 4, "d_model": 8}
        layers = {
            f"{part}_{what}": value
            for part in ("encoder", "decoder")
            for what, value in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 16))
        }
        ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 19)
        positions = {"max_source_positions": 6, "max_target_positions": 8}
        config = WhisperConfig(
            **sizes, **layers, **ends, **positions, decoder_start_token_id=18, dropout=0.0
        )
        self.net = WhisperForConditionalGeneration(config)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        sounds = torch.stack([x.roll(i, 1) for i in range(4)], 1).repeat(1, 1, 2)
        return self.net(input_features=sounds, labels=tokens(x)).loss


class TrainsBERT(Row):
    """BERT of transformers, if hooks come in its first call.

    It is a classifier with a pooler; dictionaries in, an output class out.
    """

    needs = "transformers"
    # version 5 installs hooks under a lock in the first call that asks for hidden states
    equal_or_refused = ("output_capturing.py",)
    cuts: ClassVar = {
        2: ["net.bert.encoder.layer.1"],
        3: ["net.bert.encoder.layer.1", "net.bert.pooler"],
    }

    def build(self) -> None:
        from transformers import BertConfig, BertForSequenceClassification

        sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16}
        layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 3}
        rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.net = BertForSequenceClassification(BertConfig(**sizes, **layers, **rates))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        inputs = {"input_ids": tokens(x), "attention_mask": torch.ones(x.shape, dtype=torch.long)}
        output = self.net(**inputs, output_hidden_states=True)
        return cross_entropy(output.logits, y) + 0.01 * output.hidden_states[1].square().mean()


# ---------------------------------------------------------------- routing, masks, boxes, graphs


class MixesExperts(_Net):
    """Sparse mixture of experts, where each token goes to two experts."""

    sampled = True
    equal_or_refused = ("rows_zoo.py",)
    cuts: ClassVar = {2: ["net.layers.1"]}

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(6, 4)
            self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            shares = self.router(x).softmax(-1)
            weights, chosen = shares.topk(2, dim=-1)
            result = x.clone()
            for number, expert in enumerate(self.experts):
                rows, which = torch.where(chosen == number)
                if len(rows):
                    made = torch.tanh(expert(x[rows])) * weights[rows, which, None]
                    result = result.index_add(0, rows, made)
            load = nn.functional.one_hot(chosen, 4).to(x.dtype).mean((0, 1))
            return result, 4 * (load * shares.mean(0)).sum()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(MixesExperts.Experts() for _ in range(2))
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            balance = x.new_zeros(())
            for layer in self.layers:
                x, term = layer(x)
                balance = balance + term
            return self.head(x), balance

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits, balance = self.net(x)
        return cross_entropy(logits, y) + 0.1 * balance


class MixesExpertsDensely(MixesExperts):
    """Dense mixture of experts: all experts see all tokens; the balance makes samples meet."""

    shapes = EVERY
    equal_or_refused = ()
    cuts: ClassVar = {2: ["net.layers.1"], 3: ["net.layers.1", "net.head"]}

    class Experts(MixesExperts.Experts):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            shares = self.router(x).softmax(-1)
            kept = torch.where(shares >= shares.topk(2).values[:, -1:], shares, 0.0)
            made = torch.stack([torch.tanh(expert(x)) for expert in self.experts], 1)
            result = x + (made * kept[..., None]).sum(1)
            return result, 4 * ((kept > 0).to(x.dtype).mean(0) * shares.mean(0)).sum()

    class Net(MixesExperts.Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(MixesExpertsDensely.Experts() for _ in range(2))


class MasksAtRandom(_Net):
    """A masked autoencoder: each sample keeps some patches, drawn in `forward`."""

    shares = True  # where the patches are, by encoder and decoder
    control = False  # random numbers
    cuts: ClassVar = {2: ["net.decoder"], 3: ["net.encoder", "net.decoder"]}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(1, 8)
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.decoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.missing = nn.Parameter(torch.zeros(1, 1, 8))
            self.places = nn.Parameter(torch.randn(1, 6, 8) / 4)
            self.head = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            patches = self.embed(x[..., None]) + self.places
            order = torch.rand(x.shape[0], 6, dtype=x.dtype).argsort(1)
            back = order.argsort(1)
            kept = order[:, :3, None].expand(-1, -1, 8)
            seen = self.encoder(patches.gather(1, kept))
            everything = torch.cat([seen, self.missing.expand(x.shape[0], 3, 8)], 1)
            everything = everything.gather(1, back[..., None].expand(-1, -1, 8)) + self.places
            mask = (back >= 3).to(x.dtype)
            return torch.stack([self.head(self.decoder(everything))[..., 0], mask], 1)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        made, mask = self.net(x).unbind(1)
        return ((made - x).square() * mask).sum() / mask.sum()


class DetectsObjects(_Net):
    """Object detection with anchors and any number of boxes. The loss is made within."""

    equal_or_refused = ("rows_zoo.py",)
    works = (ONE_OF_TWO, TWO_OF_TWO)
    cuts: ClassVar = {2: ["net.body.2"]}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
            self.score = nn.Linear(8, 5)
            self.offset = nn.Linear(8, 5)
            self.register_buffer("anchors", torch.linspace(-1, 1, 5))

        def forward(self, x: Tensor, targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
            x = self.body(x)
            scores, offsets = self.score(x), self.offset(x)
            right, places = torch.zeros_like(scores), []
            for index, target in enumerate(targets):
                if len(target["boxes"]) == 0:
                    continue
                distance = (target["boxes"][:, None] - self.anchors).abs()
                near = distance.min(0)
                matched = torch.nonzero(near.values < 0.3)[:, 0]
                right[index, matched] = 1.0
                wanted = target["boxes"][near.indices[matched]] - self.anchors[matched]
                places.append((offsets[index, matched] - wanted).square().sum())
            scores = nn.functional.binary_cross_entropy_with_logits(scores, right)
            return {"score": scores, "place": sum(places, scores.new_zeros(()))}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        targets = [{"boxes": row[: int(kind)]} for row, kind in zip(x, y)]
        return sum(self.net(x, targets).values())


@dataclass
class Graph:
    """Several graphs in one, as graph libraries batch them.

    Attributes:
        nodes: (nodes, features).
        edges: (2, edges): from, to.
        of: the graph of each node.
    """

    nodes: Tensor
    edges: Tensor
    of: Tensor

    @property
    def count(self) -> int:
        return int(self.of.max()) + 1


class PassesMessages(_Net):
    """A graph network over a batch of graphs as an object; no tensor has the batch's size until the
    pooling.
    """

    equal_or_refused = ("rows_zoo.py",)
    works = (ONE_OF_TWO, TWO_OF_TWO)
    cuts: ClassVar = {2: ["net.layers.1"]}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(1, 8)
            self.layers = nn.ModuleList(nn.Linear(16, 8) for _ in range(3))
            self.head = nn.Linear(8, 3)

        def forward(self, graph: Graph) -> Tensor:
            x = torch.tanh(self.embed(graph.nodes))
            source, target = graph.edges
            for layer in self.layers:
                messages = torch.zeros_like(x).index_add(0, target, x[source])
                x = torch.tanh(layer(torch.cat([x, messages], 1)))
            return self.head(x.new_zeros(graph.count, 8).index_add(0, graph.of, x))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        count, size = x.shape
        start = torch.arange(count)[:, None] * size + torch.arange(size)
        source, target = start.flatten(), start.roll(1, 1).flatten()
        edges = torch.cat([torch.stack([source, target]), torch.stack([target, source])], 1)
        of = torch.arange(count).repeat_interleave(size)
        return cross_entropy(self.net(Graph(x.reshape(-1, 1), edges, of)), y)


class PassesMessagesInTensors(PassesMessages):
    """A graph network; nodes and edges are plain arguments. The number of graphs is a number."""

    equal_or_refused = ()

    class Net(PassesMessages.Net):
        def forward(  # type: ignore[override]
            self, nodes: Tensor, edges: Tensor, of: Tensor, count: int
        ) -> Tensor:
            x = torch.tanh(self.embed(nodes))
            for layer in self.layers:
                messages = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
                x = torch.tanh(layer(torch.cat([x, messages], 1)))
            return self.head(x.new_zeros(count, 8).index_add(0, of, x))

    def build(self) -> None:
        self.inner = self.Net()

    cuts: ClassVar = {2: ["inner.layers.1"]}

    def net(self, graph: Graph) -> Tensor:
        return self.inner(graph.nodes, graph.edges, graph.of, graph.count)


# ---------------------------------------------------------------- several networks


class PrefersByReference(Row):
    """Preference optimisation with a frozen copy of the policy."""

    sampled = True
    cuts: ClassVar = {
        2: ["policy.second", "reference.second"],
        3: ["policy.second", "policy.third", "reference.second", "reference.third"],
    }

    def build(self) -> None:
        self.policy, self.reference = Layers(), Layers()
        self.reference.load_state_dict(self.policy.state_dict())
        self.reference.requires_grad_(False)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            before = self.reference(x).log_softmax(1)
        margin = (self.policy(x).log_softmax(1) - before).gather(1, y[:, None])
        return -nn.functional.logsigmoid(margin - 0.5).mean()


class SharesLayersBetweenNetworks(PrefersByReference):
    """Policy and value network have their first layer in common."""

    trains = False  # the shared layer gets gradients by both

    def build(self) -> None:
        self.policy, self.reference = Layers(), Layers()
        self.reference.first = self.policy.first

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        value = self.reference(x).square().sum(1)
        chance = self.policy(x).log_softmax(1).gather(1, y[:, None])[:, 0]
        advantage = 1 - value
        return (advantage.square() - chance * advantage.detach()).mean()


class FollowsItsStudent(PrefersByReference):
    """A teacher is the running mean of its student (BYOL, DINO)."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.reference(x.flip(1)).softmax(1)
        output = self.policy(x)
        return cross_entropy(output, y) + cross_entropy(output, target)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for mean, now in zip(self.reference.parameters(), self.policy.parameters()):
                mean.lerp_(now, 0.1)


class HasATeacherInside(_Net):
    """A frozen teacher is a part of the student's module."""

    cuts: ClassVar = {2: ["net.student.second"]}
    idle = True

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = Layers().requires_grad_(False)
            self.student = Layers()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                target = self.teacher(x)
            return self.student(x), target

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        output, target = self.net(x)
        return cross_entropy(output, y) + (output - target).square().mean()


class ComparesTwoTowers(_Net):
    """Images and texts, as in CLIP: every one is compared with every other, within the network."""

    cuts: ClassVar = {2: ["net.text.first"], 3: ["net.image.third", "net.text.first"]}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = Layers(), Layers()
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
            image = nn.functional.normalize(self.image(image), dim=1)
            text = nn.functional.normalize(self.text(text), dim=1)
            logits = self.scale.exp() * image @ text.T
            return logits, logits.T

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        right = torch.arange(len(x))
        return sum(cross_entropy(logits, right) for logits in self.net(x, x.flip(1)))


# ---------------------------------------------------------------- other kinds


class Flows(_Net):
    """A normalising flow: log-determinants are added up from layer to layer."""

    cuts: ClassVar = {2: ["net.steps.1"], 3: ["net.steps.1", "net.steps.2"]}

    class Step(nn.Module):
        def __init__(self, swap: bool) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6))
            self.swap = swap

        def forward(self, x: Tensor, volume: Tensor) -> tuple[Tensor, Tensor]:
            one, other = x.chunk(2, 1)
            if self.swap:
                one, other = other, one
            scale, shift = self.inner(one).chunk(2, 1)
            scale = torch.tanh(scale)
            return torch.cat([one, other * scale.exp() + shift], 1), volume + scale.sum(1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = nn.ModuleList(Flows.Step(bool(i % 2)) for i in range(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            volume = x.new_zeros(x.shape[0])
            for step in self.steps:
                x, volume = step(x, volume)
            return x, volume

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z, volume = self.net(x)
        normal = torch.distributions.Normal(0.0, 1.0)
        return -(normal.log_prob(z).sum(1) + volume).mean()


class QuantisesVectors(_Net):
    """A codebook that is learned by gradient; the commitment loss is a mean over the batch."""

    cuts: ClassVar = {2: ["net.after"], 3: ["net.between", "net.after"]}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(6, 4)
            self.between = nn.Linear(4, 4)
            self.codes = nn.Embedding(5, 4)
            self.after = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            x = self.between(torch.tanh(self.before(x)))
            code = self.codes(torch.cdist(x, self.codes.weight).argmin(1))
            commitment = (x - code.detach()).square().mean() + (x.detach() - code).square().mean()
            return {"logits": self.after(x + (code - x).detach()), "commitment": commitment}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        output = self.net(x)
        return cross_entropy(output["logits"], y) + 0.2 * output["commitment"]


class Scores(OrderedDict[str, Tensor]):
    """An output class like those of transformers: entries are attributes too."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


class Pair(NamedTuple):
    logits: Tensor
    hidden: Tensor


class Answer:
    """A plain class, with slots, and with values beside tensors."""

    __slots__ = ("hidden", "logits", "name", "scores")

    def __init__(self, logits: Tensor, hidden: Tensor, name: str) -> None:
        self.logits, self.hidden, self.name = logits, hidden, name
        self.scores = Scores(logits=logits)


class ReturnsItsOwnClasses(_Net):
    """Returns a dictionary with attributes, a named tuple, an object with slots."""

    class Net(Layers):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            hidden = torch.tanh(self.first(x))
            logits = self.third(torch.tanh(self.second(hidden)))
            return Pair(logits, hidden), Scores(top=logits.amax(1)), Answer(logits, hidden, "a")

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        pair, scores, answer = self.net(x)
        self.seen.append([type(pair) is Pair, type(scores) is Scores, answer.name])
        assert answer.scores.logits is answer.logits
        terms = pair.hidden.square().mean() + scores.top.mean() + answer.hidden.abs().mean()
        return cross_entropy(answer.logits, y) + 0.1 * terms


class CompilesItsNetwork(Row):
    """`torch.compile(net)`. Stages run uncompiled, as a line says; `compile_stages=True` compiles
    them.
    """

    sampled = True
    equal_or_refused = ("compile",)
    works = (ONE_OF_TWO, TWO_OF_TWO)
    cuts: ClassVar = {2: ["net._orig_mod.second"]}

    def build(self) -> None:
        self.net = torch.compile(Layers(), backend="eager")  # type: ignore[assignment]


class CompilesItsNetworkInPlace(Row):
    """`net.compile()`. Stages run uncompiled, as a line says; `compile_stages=True`
    compiles them.
    """

    equal_or_refused = ("compile",)
    works = EVERY

    def build(self) -> None:
        super().build()
        self.net.compile(backend="eager")


class CompilesALayer(Row):
    """`torch.compile` of a layer in each stage."""

    cuts: ClassVar = {2: ["net.second"]}

    def build(self) -> None:
        super().build()
        self.net.first = torch.compile(self.net.first, backend="eager")  # type: ignore
        self.net.third.compile(backend="eager")


class CompilesItsStep(Row):
    """`training_step` is compiled, with the network's call in it."""

    equal_or_refused = ("compile",)
    works = EVERY

    def build(self) -> None:
        super().build()
        self.compiled = torch.compile(self.plain, backend="eager")

    def plain(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.net(x), y)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.compiled(x, y)


class IsCompiledAsAWhole(Row):
    """The LightningModule is compiled by `module.compile()`."""

    equal_or_refused = ("compile",)
    works = EVERY

    def build(self) -> None:
        super().build()
        self.compile(backend="eager")


class WrapsInDataParallel(Row):
    """The network is in `nn.DataParallel`, left over from another script."""

    equal_or_refused = ("DataParallel",)
    works = (ONE_OF_TWO, TWO_OF_TWO)
    cuts: ClassVar = {2: ["net.module.second"]}

    def build(self) -> None:
        self.net = nn.DataParallel(Layers())  # type: ignore[assignment]


class ResizesABuffer(_Net):
    """A buffer grows in `forward`: a memory of the last samples."""

    sampled = True
    equal_or_refused = ("memory",)
    works = (ONE_OF_TWO, ONE_OF_THREE)
    shapes = (ONE_OF_TWO, ONE_OF_THREE)  # `ddp` cannot exchange buffers of other sizes

    class Net(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("memory", torch.zeros(0, 8), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.second(torch.tanh(self.first(x))))
            if len(self.memory):
                x = x + 0.1 * torch.softmax(x @ self.memory.T, 1) @ self.memory
            self.memory = torch.cat([self.memory, x.detach()])[-10:]
            return self.third(x)


class HasSparseGradients(_Net):
    """`nn.Embedding(sparse=True)`, stepped by SGD without momentum."""

    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    cuts: ClassVar = {2: ["net.second"], 3: ["net.second", "net.third"]}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Embedding(16, 8, sparse=True)
            self.second = nn.Linear(8, 8)
            self.third = nn.Linear(8, 3)

        def forward(self, words: Tensor) -> Tensor:
            return self.third(torch.tanh(self.second(self.first(words).mean(1))))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.net(tokens(x)), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class RefusedSparseGradientsOfReplicas(HasSparseGradients):
    """`nn.Embedding(sparse=True)` with several replicas: use `sparse=False`."""

    shapes = (TWO_OF_TWO,)
    refused = ("average dense gradients", "sparse=False")


class HasAFrozenSparseTable(HasSparseGradients):
    """`nn.Embedding(sparse=True)` that is frozen, with several replicas."""

    shapes = (TWO_OF_TWO,)
    cuts: ClassVar = {2: ["net.third"]}

    def __init__(self) -> None:
        super().__init__()
        self.net.first.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=0.01)


class RefusedReadOfASparseGradient(HasSparseGradients):
    """Reads the sparse gradient of an embedding that another rank owns: use `sparse=False`."""

    refused = ("is sparse", "sparse=False")

    def on_after_backward(self) -> None:
        self.seen.append(self.net.first.weight.grad.norm().item())


class HasSparseGradientsAndTwoOptimizers(HasSparseGradients):
    """`nn.Embedding(sparse=True)` with `SparseAdam`, and AdamW for the rest, by hand."""

    options: ClassVar = {"max_steps": 12}

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(*batch)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        self.seen.append(loss.item())

    def configure_optimizers(self) -> Any:
        rest = [*self.net.second.parameters(), *self.net.third.parameters()]
        table = torch.optim.SparseAdam(list(self.net.first.parameters()), lr=0.05)
        return [table, torch.optim.AdamW(rest, lr=0.01)]


# ---------------------------------------------------------------- nothing to train


class EvaluatesWithoutParameters(Row):
    """A LightningModule without parameters (baselines) in `validate`, `test` and `predict`.

    A fit is refused.
    """

    trains = False
    idle = True
    alone = True

    def build(self) -> None:
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.softmax(1) * self.calls

    def evaluation_dataloader(self) -> Any:
        return DataLoader(self.dataset(8, seed=3), batch_size=4)

    val_dataloader = test_dataloader = predict_dataloader = evaluation_dataloader

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("sum", self(batch[0]).sum(), batch_size=4)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    shapes = EVERY

    def exercise(self, run: Run) -> Any:
        trainer = run.trainer()
        return trainer.validate(self), trainer.test(self), trainer.predict(self)


class OptimizesNothing(Row):
    """`configure_optimizers` returns `None`: gradients pile up, no weight changes."""

    sampled = True

    def configure_optimizers(self) -> None:
        return None

    def on_train_end(self) -> None:
        self.seen.append([p.grad.clone() for p in self.parameters()])
