"""Fine-tune a language model that fits on no device; each rank reads the weights of its own layers.

python examples/fine_tune_llm.py FOLDER [--devices 2] [--accelerator cpu] [--out adapters]
"""

import argparse

import lightning.pytorch as pl
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_hybrid import HybridGabraStrategy


class FineTune(pl.LightningModule):
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def configure_model(self):
        if hasattr(self, "model"):
            return
        base = AutoModelForCausalLM.from_pretrained(self.folder)
        base.gradient_checkpointing_enable()
        self.model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear")).train()

    def training_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        prompt, answer = batch[:, :8], batch[:, 8:12]
        said = self.model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)[:, 8:]
        self.log("right", (said == answer[:, : said.shape[1]]).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="as from_pretrained takes it")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--out", default="adapters")
    options = parser.parse_args()
    pl.seed_everything(0)
    texts = torch.arange(64)[:, None] % 7 + torch.arange(16) % 5 + 3  # use your tokenizer here
    device = {"accelerator": options.accelerator, "devices": options.devices}
    strategy = HybridGabraStrategy(pipeline_parallel_size=options.devices)
    trainer = pl.Trainer(strategy=strategy, precision="bf16-mixed", max_epochs=1, **device)
    module = FineTune(options.folder)
    trainer.fit(module, DataLoader(texts, 8, shuffle=True), DataLoader(texts[:8], 8))
    state = strategy.full_state_dict(ignore_frozen_params=True)  # of the adapters, on rank 0
    if trainer.is_global_zero:
        adapters = {name.removeprefix("model."): value for name, value in state.items()}
        module.model.save_pretrained(options.out, state_dict=adapters)
