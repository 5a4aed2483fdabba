"""LoRA as in the quick tour of PEFT, for a translation model, with its adapters saved."""

from typing import Any

import lightning.pytorch as pl
import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForSeq2SeqLM, T5Config

OPTIONS: dict[str, Any] = {"max_epochs": 1, "accumulate_grad_batches": 2}
STRATEGY = {"rng": "device"}  # it drops out


class Adapts(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = T5Config(
            vocab_size=64,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
        model = AutoModelForSeq2SeqLM.from_config(config)
        peft_config = LoraConfig(
            task_type=TaskType.SEQ_2_SEQ_LM,
            inference_mode=False,
            r=8,
            lora_alpha=32,
            lora_dropout=0.1,
        )
        self.model = get_peft_model(model, peft_config)
        self.model.print_trainable_parameters()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        words = self.model.generate(input_ids=batch["input_ids"], max_new_tokens=3)
        self.log("exact", (words[:, 1:] == batch["labels"][:, :3]).double().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2)


def module() -> pl.LightningModule:
    return Adapts()


def loaders() -> tuple[Any, Any]:
    words = torch.randint(2, 64, (16, 8), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row.flip(0), "attention_mask": row > 0} for row in words]
    loader = DataLoader(rows, batch_size=4)
    return loader, loader
