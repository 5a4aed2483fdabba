"""Fine-tuning a T5 for summaries: the task guide of transformers, as a LightningModule."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration

OPTIONS: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 1}
PAD = 0


class Summarizer(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = T5Config(
            vocab_size=80,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=3,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=PAD,
            pad_token_id=PAD,
            eos_token_id=1,
        )
        self.model = T5ForConditionalGeneration(config)
        self.first: Tensor | None = None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Beside the loss, the logits of what is generated: also before the first step."""
        self.log("val_loss", self.model(**batch).loss)
        found = self.model.generate(
            batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=4,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.stack(found.logits).square().mean()
        if self.first is None:
            self.first = logits
        self.log_dict({"first_logits": self.first, "logits": logits})

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=1e-2)


def module() -> pl.LightningModule:
    return Summarizer()


def loaders() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(3, 80, (12, 9), generator=generator)
    for row, length in enumerate(torch.randint(5, 10, (12,), generator=generator).tolist()):
        words[row, length:] = PAD
    labels = words[:, :5].masked_fill(words[:, :5] == PAD, -100)
    rows = [
        {"input_ids": x, "attention_mask": (x != PAD).long(), "labels": y}
        for x, y in zip(words, labels)
    ]
    loader = DataLoader(rows, batch_size=4)  # type: ignore[arg-type]
    return loader, loader
