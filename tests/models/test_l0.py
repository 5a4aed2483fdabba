"""A cohort with a bright and clear sign in one place: whatever cannot point here is broken."""

from copy import deepcopy

import nibabel as nib
import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import nn

from datamodules import ADNIDataModule
from datamodules.synth import CohortSpec, generate
from models import GradCAM3D, ResAttNetClassifier
from models.explain import explain, summarise
from models.maps.native import masked

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning"),
]

SHAPE, SPACING = (32, 40, 36), 5.0
LAYER = "layer1"


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    folder = tmp_path_factory.mktemp("l0")
    spec = CohortSpec(subjects=(("AD", 30), ("NC", 30)), resolution_mm=5.0, difficulty="L0")
    generate(str(folder / "adni"), spec, workers=1)
    return folder


def trained(cohort, seed: int) -> tuple[ResAttNetClassifier, ADNIDataModule]:
    seed_everything(seed, verbose=False)
    data = ADNIDataModule(
        cohort / "adni",
        batch_size=8,
        spatial_shape=SHAPE,
        spacing_mm=SPACING,
        val_fraction=0.1,
        test_fraction=0.3,
        augment=False,
        cache_dir=cohort / "cache",
    )
    # with 8 channels in its layer Grad-CAM, whose weights are means over the volume, points in two
    # of five networks only; with 16 in all, though with one of them beside the box
    # (docs/measurements.md)
    model = ResAttNetClassifier(
        widths=[16, 16, 16, 16], stem_pool=False, learning_rate=0.02, lr_schedule="cosine"
    )
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )
    trainer.fit(model, datamodule=data)
    data.setup("test")
    return model, data


def test_maps_point_at_the_planted_box_in_four_of_five_seeds(cohort) -> None:
    inside, near = [], []
    for seed in range(5):
        model, data = trained(cohort, seed)
        truth = cohort / "adni" / "truth" / "planted"
        networks = {"trained": model.network}
        methods = ["gradcam", "gradcam++"]
        found = explain(networks, data.test_dataloader, methods, LAYER, 1, truth)
        lines = {line["method"]: line for line in summarise(found.rows)}
        near.append(lines["gradcam"]["peak_near"])
        inside.append(lines["gradcam++"]["peak_in"])
    assert sum(hit >= 0.9 for hit in near) >= 4, near
    assert sum(hit >= 0.9 for hit in inside) >= 4, inside


def test_a_mirrored_scan_gives_the_mirrored_map(cohort) -> None:
    model, data = trained(cohort, 0)
    volume = next(batch["image"] for batch in data.test_dataloader())[:1]
    volume = nn.functional.pad(volume, (0, 0, 0, 0, 0, 1))  # strides keep the middle of odd sizes
    mirrored = deepcopy(model.network)
    for module in mirrored.modules():
        if isinstance(module, nn.Conv3d):
            module.weight.data = module.weight.flip(2)
    there = GradCAM3D(mirrored, LAYER)(volume.flip(2), 1).flip(2)
    torch.testing.assert_close(there, GradCAM3D(model.network, LAYER)(volume, 1), rtol=0, atol=1e-3)
    assert there.max() > 0


@pytest.mark.parametrize("axes", ["LAS", "LPI"])
def test_files_of_every_orientation_light_the_same_side(cohort, tmp_path, axes) -> None:
    model, data = trained(cohort, 0)
    record = next(record for record in data.scans("test") if record.label == 1)
    image = nib.load(record.path)
    there = nib.orientations.axcodes2ornt(tuple(axes))
    turn = nib.orientations.ornt_transform(nib.io_orientation(image.affine), there)
    nib.save(image.as_reoriented(turn), tmp_path / "turned.nii.gz")
    maps = []
    for path in (record.path, str(tmp_path / "turned.nii.gz")):
        item = {"image": path}
        for step in data.dataset("test").transform.transforms:
            item = step(item)
        volume = torch.as_tensor(item["image"])[None]
        heatmap = GradCAM3D(model.network, LAYER)(volume, 1)[0, 0].numpy()
        maps.append(masked(heatmap, volume[0, 0].numpy()))
    np.testing.assert_allclose(maps[1], maps[0], atol=1e-3)
    left = np.unravel_index(maps[0].argmax(), SHAPE)[0] < SHAPE[0] / 2
    assert left  # the box is planted on the left, which is the low end of the first axis in RAS
