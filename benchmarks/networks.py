"""Networks that people use, cut in two: how well they split, and whether they compute the same.

Run: python benchmarks/networks.py [--write docs/networks.md] [NAME ...]

For each network, once in training and once in evaluation: it is captured and cut in two where
its counted load divides best; a batch of another size than the captured one goes forward and
backward through the network and through its two stages, with the same random numbers. Between the
stages gradients are handed on as between two ranks. Compared are the outputs, the gradients of all
parameters and of the input, and the buffers (running statistics, codebooks) afterwards. What is
not equal bit for bit in float32 is compared again in float64, and the largest difference is shown,
relative to the largest value; it must be below 1e-10. A network counts as split if neither stage
holds more than 75 % of the load.

The rows of `transformers` need that library (pip install transformers); they are made from a
configuration, nothing is downloaded.
"""

import argparse
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
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

from lightning_hybrid.allocation import allocate
from lightning_hybrid.network import (
    Capture,
    NetworkGraph,
    NotCaptured,
    Stage,
    StageCode,
    check,
    count,
    cut,
    make_stages,
    network_partitions,
)
from lightning_hybrid.network.find import own_forward
from lightning_hybrid.network.structure import rebuild, tensors_in

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
NETWORKS = {
    "MONAI 1.6": MONAI,
    "torch 2.13": TORCH,
    **({"transformers 5": TRANSFORMERS} if find_spec("transformers") else {}),
}


# ---------------------------------------------------------------- what is looked at


@dataclass(frozen=True)
class Row:
    """What was found of one network.

    Attributes:
        layers: in its graph.
        cuts: places where it may be cut.
        shares: of the load, per stage; ``None``: there is no place to cut.
        crossing: tensors that cross the cut.
        training: how what the stages compute in training differs from the network.
        evaluation: likewise in evaluation.
    """

    layers: int
    cuts: int
    shares: tuple[float, float] | None
    crossing: int
    training: str
    evaluation: str

    @property
    def split(self) -> bool:
        """Whether there are two stages worth the name."""
        return self.shares is not None and max(self.shares) <= LIMIT

    @property
    def equal(self) -> bool:
        """Whether stages and network agree, up to rounding at most."""
        return not any("DIFFERS" in text for text in (self.training, self.evaluation))


class InTwo:
    """The calls of a network, captured, and computed by two stages as on ranks of their own.

    Between the stages values are detached, and `backward` hands gradients on.

    Attributes:
        graph: of the first call.
        codes: its stages.
        shares: of the load, per stage.
    """

    def __init__(self, network: nn.Module) -> None:
        self.graph: NetworkGraph | None = None
        self.codes: list[StageCode] = []
        self.shares: tuple[float, float] | None = None
        self.borders: list[tuple[list[Any], list[Any]]] = []
        self._network = network
        self._capture = Capture(network, own_forward(network), self._run)
        self._divided: dict[NetworkGraph, list[Stage]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._capture(args, kwargs)

    def _run(self, graph: NetworkGraph, values: Sequence[Any]) -> list[Any]:
        leaves = graph.bind(values)
        if graph not in self._divided:
            codes, shares = divide(graph)
            check(graph, codes, leaves)
            self._divided[graph] = make_stages(codes, self._network, graph.device)
            if self.graph is None:
                self.graph, self.codes, self.shares = graph, codes, shares
        numbers = graph.values_of_numbers(graph.sizes(leaves))
        self.borders, current = [], list(leaves)
        for stage in self._divided[graph]:
            if self.borders:
                current = [v.detach().requires_grad_(v.requires_grad) for v in current]
            results = stage(current, numbers)
            self.borders.append((current, results))
            current = results
        found = dict(zip((*graph.tensor_outputs, *graph.scalar_outputs), current))
        found |= zip(graph.numbers, numbers)
        return [found[n] if isinstance(n, torch.fx.Node) else n for n in graph.outputs]

    def backward(self, outputs: Sequence[Tensor]) -> None:
        """Backward of a loss on the outputs, through all stages."""
        backward(outputs)
        for (_, sent), (received, _) in reversed(list(pairwise(self.borders))):
            pairs = [(s, r.grad) for s, r in zip(sent, received) if r.grad is not None]
            torch.autograd.backward(*zip(*[(s, g) for s, g in pairs if s.requires_grad]))


def examine(case: Case) -> Row:
    """Cut a network in two, and compare its stages with it."""
    stages, training = cut_in_two(case, torch.float32, training=True)
    _, evaluation = cut_in_two(case, torch.float32, training=False)
    if training:  # rounding, or more
        _, training = cut_in_two(case, torch.float64, training=True)
    if evaluation and evaluation != OUTPUTS_ONLY:
        _, evaluation = cut_in_two(case, torch.float64, training=False)
    graph = stages.graph
    assert graph is not None
    return Row(
        len(graph.layers),
        len(network_partitions(graph)) - 1,
        stages.shares,
        len(stages.borders[-1][0]),
        training or "bit for bit",
        evaluation or "bit for bit",
    )


def cut_in_two(case: Case, dtype: torch.dtype, *, training: bool) -> tuple[InTwo, str]:
    """The network in two stages, and how they differ from it."""
    torch.manual_seed(0)
    network = case.make().to(dtype).train(training)
    first, second = (
        rebuild(case.arguments(batch), lambda v: v.to(dtype) if is_float(v) else v)
        for batch in (2, 3)
    )
    stages = InTwo(network)
    with torch.no_grad():
        stages(*first[0], **first[1])
    return stages, compare(network, stages, second)


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def divide(graph: NetworkGraph) -> tuple[list[StageCode], tuple[float, float] | None]:
    """Two stages whose counted loads differ least, and their shares of it."""
    partitions = network_partitions(graph)
    if len(partitions) < 2:
        return cut(graph, partitions, []), None
    loads = count(graph, partitions).loads
    devices = allocate(loads, [1.0, 1.0], method="exact").assignment
    boundary = next(i for i, device in enumerate(devices) if device != devices[0])
    first = sum(loads[:boundary]) / sum(loads)
    return cut(graph, partitions, [boundary]), (first, 1 - first)


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
    return [p.grad for p in network.parameters()] + [leaf.grad for leaf in leaves]


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
    "| network | layers | cuts | load of the two stages | tensors across | "
    "training | evaluation |\n| --- | --- | --- | --- | --- | --- | --- |"
)


def line(name: str, row: Row) -> str:
    shares = "*not split*"
    if row.split and row.shares is not None:
        shares = " / ".join(f"{share:.1%}" for share in row.shares)
    cells = (name, row.layers, row.cuts, shares, row.crossing)
    cells += (row.training, row.evaluation)
    return f"| {' | '.join(map(str, cells))} |"


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
                texts.append(f"| {name} | *not one graph*: {error.reason.splitlines()[0]} |")
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
