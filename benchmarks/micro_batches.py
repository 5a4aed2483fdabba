"""Networks that people train, in micro-batches: which are split, by what, and whether equal.

Run: python benchmarks/micro_batches.py [--write docs/networks.md] [NAME ...]

Each network is called in training, in double precision and without dropout, once as it is and once
captured, in two micro-batches wherever its samples do not meet. Compared are all that it returns
and the gradients of all parameters; the largest difference is relative to the largest value. (Batch
normalisation is in evaluation mode, since its statistics are a micro-batch's by agreement.) Models
are small, and made from configurations: nothing is downloaded. What is not installed is left out.

The column says `proof` where the samples were followed through all operators; `proof, tail 0.1 %`
where samples meet at the end, in operations with this share of the load, which the driver computes
(`prologue`: at the beginning); and `whole` with the reason where a batch is not split.
"""

import argparse
import copy
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from lightning_hybrid._trees import rebuild, tensors_in
from lightning_hybrid.capture import NotCaptured

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
from capturing import InParts

BATCH, WORDS, LENGTH = 4, 97, 12
Case = tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]
ROUNDING = 1e-8

BERT = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 64,
}  # fmt: skip
LLAMA = {**BERT, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {
    "vocab_size": WORDS, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
VIT = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
MAE = {
    "decoder_hidden_size": 16, "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 4,
    "decoder_intermediate_size": 32,
}  # fmt: skip
T5 = {
    "vocab_size": WORDS, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 3, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
BART = {
    "vocab_size": WORDS, "d_model": 32, "encoder_layers": 3, "decoder_layers": 3,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "max_position_embeddings": 64, "pad_token_id": 1,
    "decoder_start_token_id": 2, "bos_token_id": 0, "eos_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip


def words(*, mask: bool = True, labels: str = "") -> dict[str, Any]:
    """Token ids, with a padding mask, and labels of the tokens or of the samples."""
    ids = torch.randint(3, WORDS, (BATCH, LENGTH))
    found: dict[str, Any] = {"input_ids": ids}
    if mask:
        found["attention_mask"] = torch.ones_like(ids)
        found["attention_mask"][::3, 9:] = 0
    if labels:
        found["labels"] = ids.clone() if labels == "tokens" else torch.randint(0, 2, (BATCH,))
    return found


def pictures(size: int = 32, **more: Any) -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 3, size, size), **more}


def hugging_face(kind: str, config: str, options: dict[str, Any]) -> nn.Module:
    library = importlib.import_module("transformers")
    model: nn.Module = getattr(library, kind)(getattr(library, config)(**options))
    return model


def of_words(kind: str, options: dict[str, Any], head: str, **inputs: Any) -> Case:
    make = partial(hugging_face, f"{kind}{head}", f"{kind}Config", options)
    return make, partial(words, **inputs)


def clip() -> nn.Module:
    text = {**BERT, "max_position_embeddings": 16, "projection_dim": 16, "num_hidden_layers": 3}
    vision = {**VIT, "projection_dim": 16, "num_hidden_layers": 3}
    return hugging_face(
        "CLIPModel",
        "CLIPConfig",
        {"text_config": text, "vision_config": vision, "projection_dim": 16},
    )


def segformer() -> nn.Module:
    options = {
        "hidden_sizes": [8, 16, 24, 32], "decoder_hidden_size": 16, "depths": [1, 1, 1, 1],
        "num_labels": 3,
    }  # fmt: skip
    return hugging_face("SegformerForSemanticSegmentation", "SegformerConfig", options)


CHOICE, LANGUAGE = "ForSequenceClassification", "ForCausalLM"
TRANSFORMERS: dict[str, Case] = {
    "BERT": of_words("Bert", BERT, CHOICE),
    "BERT, labels": of_words("Bert", BERT, CHOICE, labels="samples"),
    "BERT for masked words, labels": of_words("Bert", BERT, "ForMaskedLM", labels="tokens"),
    "RoBERTa": of_words("Roberta", {**BERT, "pad_token_id": 1}, CHOICE),
    "ELECTRA": of_words("Electra", {**BERT, "embedding_size": 32}, CHOICE),
    "DistilBERT": of_words(
        "DistilBert", {"vocab_size": WORDS, "dim": 32, "n_layers": 4, "n_heads": 4,
        "hidden_dim": 64}, CHOICE,
    ),
    "GPT-2": of_words("GPT2", GPT2, "LMHeadModel"),
    "GPT-2, labels": of_words("GPT2", GPT2, "LMHeadModel", labels="tokens"),
    "GPT-2 as a classifier, labels": of_words("GPT2", GPT2, CHOICE, labels="samples"),
    "Llama": of_words("Llama", LLAMA, LANGUAGE),
    "Llama, labels": of_words("Llama", LLAMA, LANGUAGE, labels="tokens"),
    "Mistral, labels": of_words("Mistral", LLAMA, LANGUAGE, labels="tokens"),
    "Qwen2, labels": of_words("Qwen2", LLAMA, LANGUAGE, labels="tokens"),
    "Gemma": of_words("Gemma", {**LLAMA, "head_dim": 8}, LANGUAGE),
    "T5, labels": of_words("T5", T5, "ForConditionalGeneration", labels="tokens"),
    "BART, labels": of_words("Bart", BART, "ForConditionalGeneration", labels="tokens"),
    "ViT, labels": (
        partial(hugging_face, "ViTForImageClassification", "ViTConfig", VIT),
        lambda: pictures(labels=torch.randint(0, 2, (BATCH,))),
    ),
    "MAE": (
        partial(hugging_face, "ViTMAEForPreTraining", "ViTMAEConfig", {**VIT, **MAE}), pictures
    ),
    "CLIP, its loss": (clip, lambda: {**words(), **pictures(), "return_loss": True}),
    "SegFormer, labels": (
        segformer, lambda: pictures(64, labels=torch.randint(0, 3, (BATCH, 64, 64)))
    ),
}  # fmt: skip


def of_timm(name: str, size: int = 64) -> Case:
    def make() -> nn.Module:
        model: nn.Module = importlib.import_module("timm").create_model(name, num_classes=5)
        return model

    return make, lambda: {"x": torch.randn(BATCH, 3, size, size)}


TIMM = {
    name: of_timm(name, size)
    for name, size in (
        ("resnet18", 64), ("resnet50", 64), ("efficientnet_b0", 64), ("mobilenetv3_small_100", 64),
        ("convnext_atto", 64), ("regnety_002", 64), ("vit_tiny_patch16_224", 224),
        ("deit_tiny_patch16_224", 224), ("swin_tiny_patch4_window7_224", 224),
        ("mixer_s32_224", 224), ("densenet121", 64), ("seresnet50", 64), ("nfnet_l0", 64),
        ("coatnet_pico_rw_224", 224),
    )
}  # fmt: skip


def of_torchvision(name: str) -> Case:
    def make() -> nn.Module:
        models = importlib.import_module("torchvision").models
        model: nn.Module = models.get_model(name, weights=None)
        return model

    return make, lambda: {"x": torch.randn(BATCH, 3, 64, 64)}


TORCHVISION = {
    name: of_torchvision(name) for name in ("resnet50", "mobilenet_v3_small", "shufflenet_v2_x0_5")
}


def of_segmentation(kind: str) -> Case:
    def make() -> nn.Module:
        library: Any = importlib.import_module("segmentation_models_pytorch")
        model: nn.Module = getattr(library, kind)("resnet18", encoder_weights=None, classes=2)
        return model

    return make, lambda: {"x": torch.randn(BATCH, 3, 64, 64)}


SEGMENTATION = {kind: of_segmentation(kind) for kind in ("Unet", "FPN", "DeepLabV3Plus")}


class Graphs(nn.Module):
    """Three layers of messages, and what each graph is.

    Args:
        kind: name of a layer of PyG.
        dense: each sample is a graph with a matrix of its edges; else all are one graph.
        pooled: one result a graph, and not one a node.
    """

    def __init__(self, kind: str, *, dense: bool = False, pooled: bool = False) -> None:
        super().__init__()
        library: Any = importlib.import_module("torch_geometric.nn")
        self.dense, self.pool = dense, library.global_mean_pool if pooled else None
        self.layers = nn.ModuleList(getattr(library, kind)(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, edges).relu()
        if self.dense:
            x = x.mean(1)
        elif self.pool is not None:
            x = self.pool(x, graph, BATCH)
        return self.head(x)


def one_graph(*, pooled: bool = False) -> dict[str, Any]:
    """Nodes and edges of all graphs, one after the other as PyG's loader puts them."""
    start = torch.arange(BATCH).repeat_interleave(4 * LENGTH) * LENGTH
    edges = torch.randint(LENGTH, (2, BATCH * 4 * LENGTH)) + start
    found = {"x": torch.randn(BATCH * LENGTH, 16), "edges": edges}
    return {**found, "graph": torch.arange(BATCH).repeat_interleave(LENGTH)} if pooled else found


def dense_graphs() -> dict[str, Any]:
    edges = torch.randint(2, (BATCH, LENGTH, LENGTH)).float()
    return {"x": torch.randn(BATCH, LENGTH, 16), "edges": edges}


GEOMETRIC: dict[str, Case] = {
    "GCN, one graph": (partial(Graphs, "GCNConv"), one_graph),
    "GAT, one graph": (partial(Graphs, "GATConv"), one_graph),
    "GraphSAGE, graphs in one, pooled": (
        partial(Graphs, "SAGEConv", pooled=True), partial(one_graph, pooled=True)
    ),
    "GCN, dense graphs": (partial(Graphs, "DenseGCNConv", dense=True), dense_graphs),
    "GraphSAGE, dense graphs": (partial(Graphs, "DenseSAGEConv", dense=True), dense_graphs),
}  # fmt: skip


class Translates(nn.Module):
    """Torch's encoder and decoder, with masks; ``first``: the batch comes first."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.first = first
        self.tokens = nn.Embedding(WORDS, 16)
        self.both = nn.Transformer(16, 2, 2, 2, 32, 0.0, batch_first=first)
        self.head = nn.Linear(16, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=h.dtype)
        h = h if self.first else h.transpose(0, 1)
        h = self.head(self.both(h, h, tgt_mask=mask))
        return h if self.first else h.transpose(0, 1)


def ids() -> dict[str, Any]:
    return {"x": torch.randint(WORDS, (BATCH, LENGTH))}


TORCH: dict[str, Case] = {
    "nn.Transformer, masks": (partial(Translates, first=True), ids),
    "nn.Transformer, time first inside, masks": (partial(Translates, first=False), ids),
}
LIBRARIES = {
    "torch": TORCH,
    "transformers": TRANSFORMERS,
    "timm": TIMM,
    "torchvision": TORCHVISION,
    "segmentation_models_pytorch": SEGMENTATION,
    "torch_geometric": GEOMETRIC,
}


def prepared(network: nn.Module) -> nn.Module:
    """In training and in double precision, without dropout and without statistics of batches."""
    network.double().train()
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
        for name, value in vars(module).items():
            drops = "drop" in name or (name == "p" and "Drop" in type(module).__name__)
            if isinstance(value, float) and drops:
                setattr(module, name, 0.0)
    return network


def outcome(network: nn.Module, call: Callable[..., Any], given: dict[str, Any]) -> list[Any]:
    """All that a call returns, and the gradients of a loss in which each entry has its weight."""
    torch.manual_seed(3)
    result = call(**given)
    outputs = [t for _, t in tensors_in(dict(result) if hasattr(result, "items") else result)]
    losses = [
        (t * torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype).view(t.shape)).sum()
        for t in outputs
        if t.requires_grad
    ]
    weights = [p for p in network.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(sum(losses[1:], losses[0]), weights, allow_unused=True)
    return [*(t.detach() for t in outputs), *gradients]


def difference(found: list[Any], expected: list[Any]) -> float:
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None and a.numel()]
    largest = max(float(b.double().abs().max()) for _, b in pairs)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs) / largest


def examined(case: Case) -> tuple[str, float | None]:
    """How a network takes batches, and how much it differs from the whole batch."""
    torch.manual_seed(0)
    make, inputs = case
    network = prepared(make())
    twin, parts = copy.deepcopy(network), InParts(network)
    given = rebuild(
        inputs(),
        lambda v: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v,
    )
    try:
        found = outcome(network, parts, given)
    except NotCaptured as error:
        return f"*not one graph*: {error.reason}", None
    how = f"whole: {parts.why_whole}" if parts.why_whole else parts.division
    return how, difference(found, outcome(twin, twin, given))


def lines(names: list[str]) -> Iterator[str]:
    total = split = 0
    for library, cases in LIBRARIES.items():
        if find_spec(library) is None:
            continue
        version = importlib.import_module(library).__version__.partition("+")[0]
        yield f"\n### {library} {version}\n\n{HEADER}"
        for name, case in cases.items():
            if names and name not in names:
                continue
            how, differs = examined(case)
            total += 1
            split += differs is not None and differs < ROUNDING and not how.startswith("whole")
            shown = "" if differs is None else f"{differs:.0e}"
            how = re.sub(r"[^ ('`]*site-packages/", "", how)
            yield f"| {name} | {how} | {shown} |"
            torch.compiler.reset()
    yield f"\n{split} of {total} networks are split, and equal to the whole batch."


HEADER = "| network | micro-batches | largest difference |\n| --- | --- | --- |"
MARK = "<!-- micro-batches -->\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="networks; default: all")
    parser.add_argument("--write", type=Path, help="put the tables into this file, at its mark")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console, texts = Console(width=200), []
    for line in lines(options.names):
        texts.append(line)
        console.print(line, markup=False, soft_wrap=True)
    if options.write:
        before, mark, rest = options.write.read_text().partition(MARK)
        after = rest.partition(MARK)[2]
        options.write.write_text(
            before + mark + "\n".join(texts).lstrip("\n") + "\n" + mark + after
        )


if __name__ == "__main__":
    main()
