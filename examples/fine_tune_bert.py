"""A transformer of Hugging Face, with its own loss, in two stages.

Without ``--model`` it has random weights and needs no download.

python examples/fine_tune_bert.py [--model bert-base-uncased] [--devices 2] [--accelerator cpu]
"""

import argparse

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, BertConfig

from lightning_hybrid import HybridGabraStrategy


class Sentiment(pl.LightningModule):
    def __init__(self, model: str | None) -> None:
        super().__init__()
        if model is None:
            sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
            small = BertConfig(vocab_size=1000, intermediate_size=128, num_labels=2, **sizes)
            self.bert = AutoModelForSequenceClassification.from_config(small)
        else:
            self.bert = AutoModelForSequenceClassification.from_pretrained(model, num_labels=2)

    def training_step(self, batch, batch_idx):
        output = self.bert(**batch)  # labels among them: the loss is made inside of the network
        self.log("loss", output.loss, prog_bar=True)
        return output.loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-5)
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
        return [optimizer], [{"scheduler": warm_up, "interval": "step"}]


def sentences(count: int, length: int = 32) -> list[dict[str, torch.Tensor]]:
    """Made-up token ids; the label is whether the first is even. Use your tokenizer here."""
    words = torch.randint(5, 1000, (count, length))
    mask = (torch.arange(length) < torch.randint(length // 2, length + 1, (count, 1))).long()
    labels = words[:, 0] % 2
    names = ("input_ids", "attention_mask", "labels")
    return [dict(zip(names, each)) for each in zip(words * mask, mask, labels)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="cpu")
    options = parser.parse_args()

    pl.seed_everything(0)
    device = {"accelerator": options.accelerator, "devices": options.devices}
    strategy = HybridGabraStrategy(pipeline_parallel_size=options.devices)
    trainer = pl.Trainer(strategy=strategy, max_epochs=1, gradient_clip_val=1.0, **device)
    trainer.fit(Sentiment(options.model), DataLoader(sentences(64), batch_size=8))
