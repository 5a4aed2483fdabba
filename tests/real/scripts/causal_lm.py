"""Causal language modeling: the task guide of transformers, as a LightningModule."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    LlamaConfig,
    PreTrainedTokenizerFast,
    get_linear_schedule_with_warmup,
)

OPTIONS: dict[str, Any] = {"max_epochs": 2, "gradient_clip_val": 1.0}


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{number}": number for number in range(90)} | {"<pad>": 90, "<unk>": 91}
    of_words = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    of_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=of_words, pad_token="<pad>", unk_token="<unk>")


class FineTune(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=92,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=90,
        )
        self.model = AutoModelForCausalLM.from_config(config)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs = self.model(**batch)
        self.log("train_loss", outputs.loss, prog_bar=True)
        return outputs.loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        outputs = self.model(**batch)
        self.log("perplexity", torch.exp(outputs.loss))

    def configure_optimizers(self) -> Any:
        no_decay = ["bias", "norm.weight"]
        groups = [
            {
                "params": [p for n, p in self.named_parameters() if not _any(no_decay, n)],
                "weight_decay": 0.01,
            },
            {
                "params": [p for n, p in self.named_parameters() if _any(no_decay, n)],
                "weight_decay": 0.0,
            },
        ]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        steps = self.trainer.estimated_stepping_batches
        scheduler = get_linear_schedule_with_warmup(optimizer, 2, steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def _any(endings: list[str], name: str) -> bool:
    return any(ending in name for ending in endings)


def module() -> pl.LightningModule:
    return FineTune()


def loaders() -> tuple[Any, Any]:
    words, rows = tokenizer(), []
    generator = torch.Generator().manual_seed(1)
    for _ in range(12):
        length = int(torch.randint(6, 12, (1,), generator=generator))
        numbers = torch.randint(0, 90, (length,), generator=generator).tolist()
        rows.append(words(" ".join(f"w{number}" for number in numbers)))
    collate = DataCollatorForLanguageModeling(tokenizer=words, mlm=False, pad_to_multiple_of=12)
    loader = DataLoader(rows, batch_size=4, collate_fn=collate)
    return loader, loader
