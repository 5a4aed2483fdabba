"""An unconditional diffusion model, as in the training tutorial of diffusers."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from torch.utils.data import DataLoader

OPTIONS: dict[str, Any] = {"max_epochs": 2, "gradient_clip_val": 1.0}


class Diffusion(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = UNet2DModel(
            sample_size=16,
            in_channels=3,
            out_channels=3,
            layers_per_block=1,
            block_out_channels=(8, 16),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=4,
            attention_head_dim=4,
        )
        self.noise_scheduler = DDPMScheduler(num_train_timesteps=100)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        clean_images = batch["images"]
        noise = torch.randn(clean_images.shape, device=self.device, dtype=clean_images.dtype)
        timesteps = torch.randint(
            0,
            self.noise_scheduler.config.num_train_timesteps,
            (clean_images.shape[0],),
            device=self.device,
            dtype=torch.int64,
        )
        noisy_images = self.noise_scheduler.add_noise(clean_images, noise, timesteps)
        noise_pred = self.model(noisy_images, timesteps, return_dict=False)[0]
        loss = F.mse_loss(noise_pred, noise)
        self.log_dict({"loss": loss, "lr": self.lr_schedulers().get_last_lr()[0]}, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pipeline = DDPMPipeline(unet=self.model, scheduler=self.noise_scheduler)
        pipeline.set_progress_bar_config(disable=True)
        images = pipeline(
            batch_size=2,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(0),
            output_type="np",
        ).images
        self.log("mean", float(images.mean()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)
        steps = self.trainer.estimated_stepping_batches
        scheduler = get_cosine_schedule_with_warmup(optimizer, 1, steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def module() -> pl.LightningModule:
    return Diffusion()


def loaders() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    rows = [{"images": torch.rand(3, 16, 16, generator=generator)} for _ in range(12)]
    loader = DataLoader(rows, batch_size=4)
    return loader, DataLoader(rows[:2], batch_size=2)
