"""Two LoRA adapters of one language model, as in the guide of PEFT, which take turns."""

from typing import Any

import lightning.pytorch as pl
import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

OPTIONS: dict[str, Any] = {"max_epochs": 1}
STRATEGY: dict[str, Any] = {}


class TakesTurns(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
        model = AutoModelForCausalLM.from_config(config)
        peft_config = LoraConfig(task_type=TaskType.CAUSAL_LM, target_modules="all-linear", r=4)
        self.model = get_peft_model(model, peft_config, adapter_name="english")
        self.model.add_adapter("german", peft_config)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.model.set_adapter(["english", "german"][batch_idx % 2])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("perplexity", self.model(**batch).loss.exp())

    def configure_optimizers(self) -> Any:
        trained = [p for name, p in self.model.named_parameters() if "lora_" in name]
        return torch.optim.AdamW(trained, lr=1e-2)


def module() -> pl.LightningModule:
    return TakesTurns()


def loaders() -> tuple[Any, Any]:
    words = torch.randint(2, 64, (16, 8), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row, "attention_mask": row > 0} for row in words]
    loader = DataLoader(rows, batch_size=4)
    return loader, loader
