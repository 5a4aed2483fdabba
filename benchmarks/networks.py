"""Networks that people use, cut in two: how well they split, and whether they compute the same.

Run: python benchmarks/networks.py [--write docs/networks.md] [NAME ...]

For each network, once in training and once in evaluation: it is captured, as one graph or else as a
chain of them, and its heaviest graph is cut in two where its counted load divides best; a batch of
another size than the captured one goes forward and backward through the network and through its two
stages, with the same random numbers. Between the stages gradients are handed on as between two
ranks. Compared are the outputs, the gradients of all parameters and of the input, and the buffers
(running statistics, codebooks) afterwards. What is not equal bit for bit in float32 is compared
again in float64, and the largest difference is shown, relative to the largest value; it must be
below 1e-10. A network counts as split if neither stage holds more than 75 % of the load.

The rows of `transformers` and PEFT need these libraries (pip install transformers peft); models are
made from configurations, nothing is downloaded. Small networks with habits of their own are those
of `tests/conformance/rows_zoo.py`, where they also train in processes of their own.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from monai.networks import nets
from rich.console import Console
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_hybrid._trees import rebuild, tensors_in
from lightning_hybrid.allocation import Problem, allocate
from lightning_hybrid.capture import Capture, NotCaptured
from lightning_hybrid.capture.watched_calls import own_forward
from lightning_hybrid.graph import (
    NetworkGraph,
    Stage,
    StageCode,
    cut,
    make_stages,
    network_partitions,
)
from lightning_hybrid.profiling import count
from lightning_hybrid.stage import check

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "conformance"))
import rows_zoo as zoo

LIMIT = 0.75
ROUNDING = 1e-10
OUTPUTS_ONLY = "outputs bit for bit; the network itself has no backward"
VOLUME = (1, 32, 32, 32)
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A network and a call of it.

    Attributes:
        make: builds the network.
        arguments: makes the arguments of a call for a batch size.
    """

    make: Callable[[], nn.Module]
    arguments: Callable[[int], Arguments]


def images(make: Callable[[], nn.Module], *size: int) -> Case:
    """A network of one image of ``size``, channels first."""
    shape = size or VOLUME
    return Case(make, lambda batch: ((torch.randn(batch, *shape),), {}))


def sequences(make: Callable[[], nn.Module], **more: Any) -> Case:
    """A network of tokens, the last of which are masked out."""

    def arguments(batch: int) -> Arguments:
        mask = torch.ones(batch, 12, dtype=torch.long)
        mask[:, 9:] = 0
        return (), {"input_ids": torch.randint(64, (batch, 12)), "attention_mask": mask, **more}

    return Case(make, arguments)


# ---------------------------------------------------------------- networks


class Encoder(nn.Module):
    """An encoder in the manner of `transformers`: masks, dictionaries, all hidden states."""

    def __init__(self, layers: int = 4, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, width), nn.Embedding(32, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True) for _ in range(layers)
        )
        self.pooler = nn.Linear(width, width)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, output_hidden_states: bool = False
    ) -> dict[str, Any]:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        x = self.dropout(self.norm(self.tokens(input_ids) + self.places(places)))
        hidden = [x]
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=attention_mask == 0)
            hidden.append(x)
        weights = attention_mask[..., None].to(x.dtype)
        pooled = torch.tanh(self.pooler((x * weights).sum(1) / weights.sum(1)))
        output = {"last_hidden_state": x, "pooler_output": pooled}
        return output | {"hidden_states": tuple(hidden)} if output_hidden_states else output


class Torch(nn.Module):
    """``nn.TransformerEncoder`` between an embedding and a head."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=norm_first)
        self.embedding = nn.Embedding(64, 32)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(32, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.encoder(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0)
        return self.head(x[:, 0])


def dyn_unet(**options: Any) -> nn.Module:
    return nets.DynUNet(3, 1, 2, [3] * 4, [1, 2, 2, 2], [2] * 3, filters=[8, 16, 32, 64], **options)


def unet() -> nn.Module:
    return nets.UNet(3, 1, 2, channels=(8, 16, 32), strides=(2, 2), num_res_units=1, dropout=0.1)


def weight_normed() -> nn.Module:
    """Weight norm by parametrization, on every convolution."""
    network = unet()
    for module in network.modules():
        if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
            weight_norm(module)
    return network


def vqvae() -> nn.Module:
    """Its codebook is buffers, which change in each forward of training."""
    return nets.VQVAE(
        3, 1, 1, channels=(8, 16), num_res_layers=1, num_res_channels=(8, 16),
        downsample_parameters=((2, 4, 1, 1),) * 2, upsample_parameters=((2, 4, 1, 1, 0),) * 2,
        num_embeddings=16, embedding_dim=8,
    )  # fmt: skip


def vit() -> nn.Module:
    return nets.ViT(
        1, (32,) * 3, (8,) * 3, hidden_size=96, mlp_dim=192, num_layers=4, num_heads=4,
        classification=True, dropout_rate=0.1,
    )  # fmt: skip


def auto_encoder_kl() -> nn.Module:
    return nets.AutoencoderKL(
        3, 1, 1, num_res_blocks=(1, 1), channels=(8, 16), attention_levels=(False, False),
        latent_channels=4, norm_num_groups=4,
    )  # fmt: skip


def hugging_face(kind: str, **options: Any) -> nn.Module:
    """A model of `transformers` by the name of its class, from a configuration."""
    library = import_module("transformers")
    config = getattr(library, kind.replace("Model", "Config"))(**options)
    config.use_cache = False
    return getattr(library, kind)(config)


def bert(checkpointing: bool = False) -> nn.Module:
    network = hugging_face(
        "BertModel", vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=32,
    )  # fmt: skip
    if checkpointing:
        network.gradient_checkpointing_enable()
    return network


def hugging_face_vit() -> nn.Module:
    return hugging_face(
        "ViTModel", hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=64, image_size=32, patch_size=8,
    )  # fmt: skip


def gpt2() -> nn.Module:
    return hugging_face(
        "GPT2Model", vocab_size=64, n_positions=32, n_embd=32, n_layer=4, n_head=4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


MONAI = {
    "ResNet18": images(lambda: nets.resnet18(n_input_channels=1, num_classes=2)),
    "ResNet50": images(lambda: nets.resnet50(n_input_channels=1, num_classes=2)),
    "DenseNet121": images(lambda: nets.DenseNet121(3, 1, 2, dropout_prob=0.1)),
    "SEResNet50": images(lambda: nets.SEResNet50(spatial_dims=3, in_channels=1, num_classes=2)),
    "EfficientNet-B0": images(
        lambda: nets.EfficientNetBN(
            "efficientnet-b0", pretrained=False, spatial_dims=3, in_channels=1, num_classes=2
        )
    ),
    "UNet": images(unet),
    "UNet, weight norm": images(weight_normed),
    # odd sizes take another branch
    "BasicUNet": images(lambda: nets.BasicUNet(features=(8, 8, 16, 16, 32, 8)), 1, 33, 35, 37),
    "BasicUNetPlusPlus": images(
        lambda: nets.BasicUNetPlusPlus(3, 1, 2, features=(8, 8, 16, 16, 32, 8))
    ),
    "DynUNet": images(dyn_unet),
    "DynUNet, residual": images(lambda: dyn_unet(res_block=True)),
    "DynUNet, deep supervision": images(lambda: dyn_unet(deep_supervision=True, deep_supr_num=2)),
    "VNet": images(nets.VNet),
    "SegResNet": images(lambda: nets.SegResNet(init_filters=8)),
    "SegResNetDS": images(lambda: nets.SegResNetDS(init_filters=8)),
    "AttentionUnet": images(lambda: nets.AttentionUnet(3, 1, 2, (8, 16, 32), (2, 2), dropout=0.1)),
    "FlexibleUNet": images(
        lambda: nets.FlexibleUNet(1, 2, "efficientnet-b0", pretrained=False, spatial_dims=2),
        1, 64, 64,
    ),
    "HighResNet": images(lambda: nets.HighResNet(in_channels=1, out_channels=2), 1, 16, 16, 16),
    "ViT": images(vit),
    "UNETR": images(
        lambda: nets.UNETR(
            1, 2, (32,) * 3, feature_size=8, hidden_size=96, mlp_dim=192, num_heads=4
        )
    ),
    "SwinUNETR": images(lambda: nets.SwinUNETR(1, 2, feature_size=12), 1, 64, 64, 32),
    "SwinUNETR, checkpointing": images(
        lambda: nets.SwinUNETR(1, 2, feature_size=12, spatial_dims=2, use_checkpoint=True),
        1, 64, 64,
    ),
    "AutoEncoder": images(
        lambda: nets.AutoEncoder(3, 1, 1, channels=(8, 16, 32), strides=(2, 2, 2))
    ),
    "VarAutoEncoder": images(
        lambda: nets.VarAutoEncoder(3, VOLUME, 1, 16, channels=(8, 16, 32), strides=(2, 2, 2))
    ),
    "AutoencoderKL": images(auto_encoder_kl),
    "VQVAE": images(vqvae),
}  # fmt: skip
TORCH = {
    "nn.TransformerEncoder": sequences(lambda: Torch(norm_first=False)),
    "nn.TransformerEncoder, norm first": sequences(lambda: Torch(norm_first=True)),
    "encoder with dictionaries": sequences(Encoder, output_hidden_states=True),
}
TRANSFORMERS = {
    "BertModel": sequences(bert),
    "BertModel, checkpointing": sequences(lambda: bert(checkpointing=True)),
    "GPT2Model": sequences(gpt2),
    "ViTModel": images(hugging_face_vit, 3, 32, 32),
}


def of_words(row: type[zoo.Row], **more: Callable[[Tensor], Tensor]) -> Case:
    """The network of a row, and a call of it with words, and with more that is made of them."""

    def arguments(batch: int) -> Arguments:
        words = torch.randint(16, (batch, 6))
        return (), {"input_ids": words, **{name: make(words) for name, make in more.items()}}

    return Case(lambda: row().net, arguments)


def of_sounds(batch: int) -> Arguments:
    return (), {
        "input_features": torch.randn(batch, 4, 12),
        "labels": torch.randint(16, (batch, 6)),
    }


if find_spec("transformers"):
    TRANSFORMERS |= {
        "GPT2LMHeadModel, labels": of_words(zoo.TrainsGPT2, labels=torch.clone),
        "T5, labels": of_words(zoo.TrainsT5, labels=lambda words: words.flip(1)),
        "Whisper, labels": Case(lambda: zoo.TrainsWhisper().net, of_sounds),
    }
if find_spec("peft"):
    TRANSFORMERS["GPT2LMHeadModel, LoRA of PEFT, labels"] = of_words(
        zoo.TrainsLoRA, labels=torch.clone
    )


def of_features(make: Callable[[], nn.Module]) -> Case:
    return images(make, 6)


def boxes(batch: int) -> Arguments:
    """Features, and another number of boxes for each sample."""
    x = torch.randn(batch, 6)
    return (x, [{"boxes": row[: 1 + number % 2]} for number, row in enumerate(x)]), {}


def graph_of_rings(batch: int) -> zoo.Graph:
    """One ring of six nodes per sample."""
    start = torch.arange(batch)[:, None] * 6 + torch.arange(6)
    edges = torch.stack([start.flatten(), start.roll(1, 1).flatten()])
    return zoo.Graph(torch.randn(6 * batch, 1), edges, torch.arange(batch).repeat_interleave(6))


def graph_in_tensors(batch: int) -> Arguments:
    graph = graph_of_rings(batch)
    return (graph.nodes, graph.edges, graph.of, graph.count), {}


OTHERS = {
    "mixture of experts, tokens routed by value": of_features(zoo.MixesExperts.Net),
    "mixture of experts, all see all": of_features(zoo.MixesExpertsDensely.Net),
    "masked autoencoder, random masks": of_features(zoo.MasksAtRandom.Net),
    "detection head, loss within": Case(zoo.DetectsObjects.Net, boxes),
    "graph network, a graph object": Case(
        zoo.PassesMessages.Net, lambda batch: ((graph_of_rings(batch),), {})
    ),
    "graph network, tensors": Case(zoo.PassesMessagesInTensors.Net, graph_in_tensors),
    "two towers, each with each (CLIP)": Case(
        zoo.ComparesTwoTowers.Net,
        lambda batch: ((torch.randn(batch, 6), torch.randn(batch, 6)), {}),
    ),
    "student and frozen teacher": of_features(zoo.HasATeacherInside.Net),
    "normalising flow": of_features(zoo.Flows.Net),
    "vector quantisation": of_features(zoo.QuantisesVectors.Net),
    "output classes of its own": of_features(zoo.ReturnsItsOwnClasses.Net),
    "a buffer that grows": of_features(zoo.ResizesABuffer.Net),
    "sparse gradients": Case(
        zoo.HasSparseGradients.Net, lambda batch: ((torch.randint(16, (batch, 6)),), {})
    ),
}
NETWORKS = {
    "MONAI 1.6": MONAI,
    "torch 2.13": TORCH,
    **({"transformers 5 and PEFT": TRANSFORMERS} if find_spec("transformers") else {}),
    "habits of their own": OTHERS,
}


# ---------------------------------------------------------------- what is looked at


@dataclass(frozen=True)
class Row:
    """What was found of one network.

    Attributes:
        graphs: as which it is captured.
        layers: in its heaviest graph.
        cuts: places where that may be cut.
        shares: of the load, per stage; ``None``: there is no place to cut.
        crossing: tensors that cross the cut.
        training: how what the stages compute in training differs from the network.
        evaluation: likewise in evaluation.
        capture_s: seconds to capture it.
        reason: why it is not one graph.
    """

    graphs: int
    layers: int
    cuts: int
    shares: tuple[float, float] | None
    crossing: int
    training: str
    evaluation: str
    capture_s: float
    reason: str = ""

    @property
    def split(self) -> bool:
        """Whether there are two stages worth the name."""
        return self.shares is not None and max(self.shares) <= LIMIT

    @property
    def equal(self) -> bool:
        """Whether stages and network agree, up to rounding at most."""
        return not any("DIFFERS" in text for text in (self.training, self.evaluation))


@dataclass
class _Divided:
    """A graph of a network, and its two stages."""

    graph: NetworkGraph
    codes: list[StageCode]
    shares: tuple[float, float] | None
    stages: list[Stage]
    load: float
    borders: list[tuple[list[Any], list[Any]]] = field(default_factory=list)


class InTwo:
    """The calls of a network, captured, and computed by two stages as on ranks of their own.

    Between the stages of a network that is one graph values are detached, and `backward` hands
    gradients on. In a chain of graphs autograd does.

    Args:
        network: the module.
        whole: capture it as one graph or not at all.

    Attributes:
        first: the graphs of the first call.
        capture_s: seconds to capture them.
    """

    def __init__(self, network: nn.Module, *, whole: bool) -> None:
        self.first: list[_Divided] = []
        self.capture_s = 0.0
        self._network, self._whole = network, whole
        self._borders: list[tuple[list[Any], list[Any]]] = []
        self._capture = Capture(network, own_forward(network), self._run, whole=whole)
        self._divided: dict[NetworkGraph, _Divided] = {}
        self._since: float | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_first, self._since = not self._divided, time.perf_counter()
        result = self._capture(args, kwargs)
        if is_first:
            self.capture_s += time.perf_counter() - self._since
            self.first = list(self._divided.values())
        return result

    @property
    def heaviest(self) -> _Divided:
        """The graph that a run would cut."""
        return max(self.first, key=lambda divided: divided.load)

    def _run(self, graph: NetworkGraph, values: Sequence[Any]) -> list[Any]:
        if self._since is not None and not self.first:
            self.capture_s += time.perf_counter() - self._since
        outputs = self._computed(graph, values)
        self._since = time.perf_counter()
        return outputs

    def _computed(self, graph: NetworkGraph, values: Sequence[Any]) -> list[Any]:
        leaves = graph.bind(values)
        if graph not in self._divided:
            codes, shares, load = divide(graph)
            check(graph, codes, leaves)
            stages = make_stages(codes, self._network, graph.device)
            self._divided[graph] = _Divided(graph, codes, shares, stages, load)
        divided = self._divided[graph]
        numbers = graph.values_of_numbers(graph.sizes(leaves))
        divided.borders, current = [], list(leaves)
        for stage in divided.stages:
            if divided.borders and self._whole:
                current = [v.detach().requires_grad_(v.requires_grad) for v in current]
            results = stage(current, numbers)
            divided.borders.append((current, results))
            current = results
        self._borders = divided.borders
        found = dict(zip((*graph.tensor_outputs, *graph.scalar_outputs), current))
        found |= zip(graph.numbers, numbers)
        return [found[n] if isinstance(n, torch.fx.Node) else n for n in graph.outputs]

    def backward(self, outputs: Sequence[Tensor]) -> None:
        """Backward of a loss on the outputs, through all stages."""
        backward(outputs)
        if not self._whole:
            return
        for (_, sent), (received, _) in reversed(list(pairwise(self._borders))):
            pairs = [(s, r.grad) for s, r in zip(sent, received) if r.grad is not None]
            torch.autograd.backward(*zip(*[(s, g) for s, g in pairs if s.requires_grad]))


def examine(case: Case) -> Row:
    """Cut a network in two, and compare its stages with it.

    Raises:
        NotCaptured: not even a chain of graphs can be made of it.
    """
    reason = ""
    try:
        stages, training = cut_in_two(case, torch.float32, training=True)
    except NotCaptured as error:
        reason = _first_lines(error.reason)
        stages, training = cut_in_two(case, torch.float32, training=True, whole=False)
    whole = not reason
    _, evaluation = cut_in_two(case, torch.float32, training=False, whole=whole)
    if training:  # rounding, or more
        _, training = cut_in_two(case, torch.float64, training=True, whole=whole)
    if evaluation and evaluation != OUTPUTS_ONLY:
        _, evaluation = cut_in_two(case, torch.float64, training=False, whole=whole)
    heaviest = stages.heaviest
    return Row(
        len(stages.first),
        len(heaviest.graph.layers),
        len(network_partitions(heaviest.graph)) - 1,
        heaviest.shares,
        len(heaviest.borders[-1][0]) if len(heaviest.borders) > 1 else 0,
        training or "bit for bit",
        evaluation or "bit for bit",
        stages.capture_s,
        reason,
    )


def cut_in_two(
    case: Case, dtype: torch.dtype, *, training: bool, whole: bool = True
) -> tuple[InTwo, str]:
    """The network in two stages, and how they differ from it."""
    torch.manual_seed(0)
    network = case.make().to(dtype).train(training)
    first, second = (
        rebuild(case.arguments(batch), lambda v: v.to(dtype) if is_float(v) else v)
        for batch in (2, 3)
    )
    buffers = deepcopy(dict(network.named_buffers()))
    stages = InTwo(network, whole=whole)
    with torch.no_grad():
        stages(*first[0], **first[1])
    _put_back(network, buffers)
    return stages, compare(network, stages, second)


def _put_back(network: nn.Module, buffers: dict[str, Tensor]) -> None:
    """Let buffers that have another size by now be what they were."""
    for name, before in buffers.items():
        owner, _, key = name.rpartition(".")
        if network.get_buffer(name).shape != before.shape:
            network.get_submodule(owner)._buffers[key] = before


def _first_lines(reason: str) -> str:
    """What TorchDynamo cannot follow, and the user's line, which stands last or is named."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    caused = [text for text in lines if text.startswith("Caused by: ")]
    last = caused[0].removeprefix("Caused by: ").partition("  #")[0] if caused else lines[-1]
    return f"{lines[0].partition('  (')[0]}: `{last}`" if len(lines) > 1 else lines[0]


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def divide(
    graph: NetworkGraph,
) -> tuple[list[StageCode], tuple[float, float] | None, float]:
    """Two stages whose counted loads differ least, their shares of it, and the load."""
    partitions = network_partitions(graph)
    loads = count(graph, partitions).loads
    if len(partitions) < 2:
        return cut(graph, partitions, []), None, sum(loads)
    boundary = allocate(Problem(loads, [1.0, 1.0])).assignment.index(1)
    first = sum(loads[:boundary]) / sum(loads)
    return cut(graph, partitions, [boundary]), (first, 1 - first), sum(loads)


def compare(network: nn.Module, stages: InTwo, arguments: Arguments) -> str:
    """How stages differ from their network: outputs, gradients and buffers; empty: not a bit.

    Raises:
        StitchError: the outputs differ.
    """
    twin = deepcopy(network)
    (args, kwargs), twins = with_gradients(arguments)
    torch.manual_seed(1)
    outputs = [t for _, t in tensors_in(twin(*args, **kwargs))]
    try:
        backward(outputs)
    except RuntimeError:  # some change in place, in evaluation, what their backward needs
        return "DIFFERS: no backward" if network.training else OUTPUTS_ONLY
    expected = [outputs, gradients(twin, twins), list(twin.buffers())]
    (args, kwargs), leaves = with_gradients(arguments)
    torch.manual_seed(1)
    outputs = [t for _, t in tensors_in(stages(*args, **kwargs))]
    stages.backward(outputs)
    found = [outputs, gradients(network, leaves), list(network.buffers())]
    network.zero_grad()
    texts = (distance(a, b) for a, b in zip(found, expected, strict=True))
    names = ("outputs", "gradients", "buffers")
    different = [f"{name} {text}" for name, text in zip(names, texts) if text]
    return ", ".join(different)


def with_gradients(arguments: Arguments) -> tuple[Arguments, list[Tensor]]:
    """Copies of arguments whose gradients are wanted, and their tensors."""
    copies = rebuild(
        arguments,
        lambda v: v.clone().requires_grad_(is_float(v)) if isinstance(v, Tensor) else v,
    )
    return copies, [t for _, t in tensors_in(copies)]


def backward(outputs: Sequence[Tensor]) -> None:
    """A loss in which every output has its own weights."""
    losses = []
    for number, value in enumerate(outputs):
        if value.requires_grad:
            weights = torch.linspace(-1, 1 + number, value.numel(), dtype=value.dtype)
            losses.append((value * weights.view_as(value)).sum() / value.numel())
    sum(losses).backward()


def gradients(network: nn.Module, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    found = [p.grad for p in network.parameters()] + [leaf.grad for leaf in leaves]
    return [g.to_dense() if g is not None and g.is_sparse else g for g in found]


def distance(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> str:
    """The largest difference relative to the largest value; empty if all bits are equal."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        if (one is None) != (other is None):
            return "DIFFERS: one is missing"
        if one is None or other is None or torch.equal(one, other):
            continue
        one, other = one.detach().double(), other.detach().double()
        scale = max(float(other.abs().max()), 1e-12)
        worst = max(worst, float((one - other).abs().max()) / scale)
    return f"{'DIFFERS: ' if worst > ROUNDING else ''}{worst:.0e}" if worst else ""


# ---------------------------------------------------------------- the table


HEADER = (
    "| network | graphs | layers | cuts | load of the two stages | tensors across | capture | "
    "training | evaluation | why not one graph |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def line(name: str, row: Row) -> str:
    shares = "*not split*"
    if row.shares is not None:
        shares = " / ".join(f"{share:.1%}" for share in row.shares)
        shares = shares if row.split else f"*not split*: {shares}"
    cells = (name, row.graphs, row.layers, row.cuts, shares, row.crossing)
    cells += (f"{row.capture_s:.1f} s", row.training, row.evaluation, row.reason)
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="networks; default: all")
    parser.add_argument("--write", type=Path, help="put the tables into this file, after its mark")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console, texts, bad, total = Console(width=200), [], [], 0
    for library, cases in NETWORKS.items():
        texts += ["", f"### {library}", "", HEADER]
        for name, case in cases.items():
            if options.names and name not in options.names:
                continue
            total += 1
            try:
                row = examine(case)
            except NotCaptured as error:
                texts.append(f"| {name} | *none*: {_first_lines(error.reason)} |")
                bad.append(name)
            else:
                texts.append(line(name, row))
                bad += [] if row.equal and row.split else [name]
            console.print(texts[-1], markup=False, soft_wrap=True)
    texts += ["", f"{total - len(bad)} of {total} networks are split in two and compute the same."]
    console.print(texts[-1])
    if options.write:
        before, mark, _ = options.write.read_text().partition("<!-- table -->\n")
        options.write.write_text(before + mark + "\n".join(texts).lstrip("\n") + "\n")


if __name__ == "__main__":
    main()
