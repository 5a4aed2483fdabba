"""Networks of transformers as their users make them, small: from a config, or from a folder."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

STEPS, BATCH, LENGTH, WORDS = 3, 4, 12, 96
SHARD = "20KB"
"""Of a saved folder: each network has several."""
_SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES))


def _qwen3() -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_GROUPED))


def _mistral() -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**_GROUPED))


def _gemma2() -> Any:
    # (eager attention is what its documentation trains with)
    config = transformers.Gemma2Config(**_GROUPED, attn_implementation="eager")
    return transformers.Gemma2ForCausalLM(config)


def _mixtral() -> Any:
    config = transformers.MixtralConfig(**_GROUPED, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def _gpt2() -> Any:
    sizes = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **rates, **ends))


def _bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**_SIZES, **_NO_DROPOUT))


def _t5() -> Any:
    sizes = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64}
    layers = {"num_layers": 2, "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **layers))


def _vit() -> Any:
    sizes = {name: _SIZES[name] for name in list(_SIZES)[1:5]}
    images = {"image_size": 32, "patch_size": 8, "num_labels": 10}
    config = transformers.ViTConfig(**sizes, **images, **_NO_DROPOUT)
    return transformers.ViTForImageClassification(config)


def _whisper() -> Any:
    layers = {
        f"{part}_{what}": value
        for part in ("encoder", "decoder")
        for what, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
    }
    sizes = {"vocab_size": WORDS, "d_model": 32, "num_mel_bins": 8}
    positions = {"max_source_positions": 16, "max_target_positions": 32}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(**sizes, **layers, **positions, **tokens)
    return transformers.WhisperForConditionalGeneration(config)


MAKERS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "gemma2": _gemma2,
    "gpt2": _gpt2,
    "bert-mlm": _bert,
    "t5": _t5,
    "vit": _vit,
    "whisper": _whisper,
    "mixtral": _mixtral,
}
_AUTO = {
    "vit": transformers.AutoModelForImageClassification,
    "bert-mlm": transformers.AutoModelForMaskedLM,
    "t5": transformers.AutoModelForSeq2SeqLM,
    "whisper": transformers.AutoModelForSpeechSeq2Seq,
}


_DENSE = ["c_attn", "c_proj", "c_fc"]
_BESIDE: dict[str, Any] = {
    "tied-lora": {"target_modules": ["wte", *_DENSE]},
    "saved-head": {"target_modules": _DENSE, "modules_to_save": ["lm_head"]},
    "saved-table": {"target_modules": _DENSE, "modules_to_save": ["wte"]},
}
"""What PEFT is told of GPT-2, by variant."""


def save(model: str, folder: Path) -> None:
    """Save a network, whose weights are its initial ones, as several files."""
    torch.manual_seed(3)
    MAKERS[model]().save_pretrained(folder, max_shard_size=SHARD)


def network(model: str, folder: Path | None, variant: str) -> nn.Module:
    """A network that is to be trained.

    Args:
        model: which one.
        folder: what it is loaded from; ``None``: it is made from its config.
        variant: `plain`, `lora`, `checkpointing` or `lora+checkpointing`; `resized`: it gets more
            words; `checkpointing without marks`: see there; `tied-lora`: adapters on the embedding,
            which is tied to the head of some networks; `saved-head`: a head of its own beside
            adapters, and `saved-table` likewise.
    """
    torch.manual_seed(0)
    if folder is None:
        net = MAKERS[model]()
    else:
        auto = _AUTO.get(model, transformers.AutoModelForCausalLM)
        net = auto.from_pretrained(folder, dtype=torch.float64)
    if model == "mixtral":
        net.set_experts_implementation("batched_mm")  # (`grouped_mm` has no float64)
    if variant == "resized":
        net.resize_token_embeddings(WORDS + 8)
    if "checkpointing" in variant:
        net.gradient_checkpointing_enable()
    if variant == "checkpointing without marks":  # what a refusal of T5 advises
        for module in net.modules():
            if type(module).__name__ == "T5Attention":
                module.gradient_checkpointing = False
    if variant in ("lora", "lora+checkpointing"):
        from peft import LoraConfig, get_peft_model

        # (of Mixtral attention alone, as is usual, and not the parameters of experts)
        layers = [f"{each}_proj" for each in "qkvo"] if model == "mixtral" else "all-linear"
        net = get_peft_model(net, LoraConfig(r=4, target_modules=layers))
    if variant in _BESIDE:
        from peft import LoraConfig, get_peft_model

        net = get_peft_model(net, LoraConfig(r=4, **_BESIDE[variant]))
    return net.train()


def batches(model: str) -> Iterator[dict[str, Tensor]]:
    """What it is trained on."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        words = torch.randint(3, WORDS, (BATCH, LENGTH), generator=generator)
        if model == "vit":
            images = torch.randn(BATCH, 3, 32, 32, generator=generator)
            yield {"pixel_values": images, "labels": words[:, 0] % 10}
        elif model == "whisper":
            sound = torch.randn(BATCH, 8, 32, generator=generator)
            yield {"input_features": sound, "labels": words}
        else:
            yield {"input_ids": words, "labels": words}


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    """(Adam would make steps of rounding errors where a gradient is zero, as biases of keys.)"""
    return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1, momentum=0.9)
