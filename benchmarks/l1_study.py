"""The use case on the synthetic cohort of level L1, over several seeds.

For each seed: AD against NC by 3D-ResAttNet-18 and by MONAI's plain 3D
ResNet-18 with the same recipe and epochs; the printed and the modern recipe of `configs/`; the
same network on shuffled labels; progressive against stable MCI with and without the weights of
AD/NC. Localisation of the first, beside the network of shuffled labels and an untrained one.

At 4 mm, half width and ten epochs, about 17 minutes a seed on two slow threads; with --full at
2 mm, full width and 50 epochs, the printed recipe with its batches of 6: days on two cores, so for
a GPU, which is taken if there is one.

Each run leaves a file in --out, so that a stopped study goes on. Seeds change weights and order;
cohort and split stay.

    OMP_NUM_THREADS=2 python benchmarks/l1_study.py --seeds 1 2 3
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from lightning.pytorch.callbacks import EMAWeightAveraging
from monai.networks.nets import resnet18
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from _adni import cohort, explained, trained, untrained

from datamodules.synth import CohortSpec, generate
from models import ResAttNetClassifier
from models.environment import environment
from models.transfer import KEY, hashed

CONFIGS = Path(__file__).parents[1] / "configs"
SUBJECTS = (("AD", 165), ("NC", 165), ("sMCI", 90), ("pMCI", 90))
LAYERS = ("layer1", "layer2")


@dataclass(frozen=True)
class Size:
    """How large a study is."""

    resolution_mm: float
    shape: tuple[int, int, int]
    """Voxels of a volume (D, H, W)."""
    widths: tuple[int, int, int, int]
    epochs: int
    own_batches: bool
    """Whether each recipe has batches of its own size; else all have 12."""


SMALL = Size(4.0, (40, 52, 48), (32, 64, 128, 256), 10, own_batches=False)
FULL = Size(2.0, (91, 109, 91), (64, 128, 256, 512), 50, own_batches=True)


class PlainResNet(ResAttNetClassifier):
    """MONAI's 3D ResNet-18 of the same widths and stem, without attention."""

    def make_network(self) -> nn.Module:  # type: ignore[override]
        return resnet18(
            spatial_dims=3,
            n_input_channels=1,
            num_classes=len(self.class_names),
            conv1_t_size=3,
            conv1_t_stride=2,
            no_max_pool=not self.hparams["stem_pool"],
            widen_factor=self.hparams["widths"][0] / 64,
            bias_downsample=False,
        )


@dataclass(frozen=True)
class Run:
    """One row of the study."""

    recipe: str = "demo"
    """Of which file in configs/ the model's options are."""
    task: str = "ad_nc"
    make: Callable[..., ResAttNetClassifier] = ResAttNetClassifier
    shuffled: bool = False
    transfer: bool = False


RUNS: dict[str, Run] = {
    "resattnet18": Run(),
    "monai_resnet18": Run(make=PlainResNet),
    "shuffled_labels": Run(shuffled=True),
    "recipe_paper": Run(recipe="paper"),
    "recipe_modern": Run(recipe="modern"),
    "mci": Run(task="pmci_smci"),
    "mci_transfer": Run(task="pmci_smci", transfer=True),
}
"""The first one's weights are those that are explained, and that transfer starts from."""


def measure(name: str, root: Path, out: Path, seed: int, size: Size) -> dict[str, Any]:
    """Train and test one run, and keep its weights if others need them."""
    run = RUNS[name]
    settings = yaml.safe_load((CONFIGS / f"{run.recipe}.yaml").read_text())
    options = settings["model"] | {"task": run.task, "widths": size.widths}
    if run.transfer:
        options["transfer_from"] = str(weights(out, "resattnet18", seed))
    averaging = [
        EMAWeightAveraging(**one["init_args"])
        for one in settings["trainer"]["callbacks"]
        if "EMA" in one["class_path"]
    ]
    batches = {"batch_size": settings["data"]["batch_size"]} if size.own_batches else {}
    data = cohort(
        root,
        task=run.task,
        spatial_shape=size.shape,
        spacing_mm=size.resolution_mm,
        augment=settings["data"]["augment"],
        shuffle_labels=run.shuffled,
        # fewer people in this task, and harder to tell apart: more of them are held out
        **({"val_fraction": 0.1, "test_fraction": 0.25} if run.task == "pmci_smci" else {}),
        **batches,
    )
    model, result = trained(
        lambda: run.make(**options),
        data,
        seed,
        size.epochs,
        averaging,
    )
    seen = hashed(record.subject for record in data.scans("train"))
    torch.save({"state_dict": model.state_dict(), KEY: seen}, weights(out, name, seed))
    return result


def localise(root: Path, out: Path, seed: int, size: Size) -> dict[str, Any]:
    """Explain the first run beside both networks that know nothing."""
    settings = yaml.safe_load((CONFIGS / "demo.yaml").read_text())
    model = ResAttNetClassifier(**settings["model"] | {"widths": size.widths})
    networks: dict[str, nn.Module] = {"untrained": untrained(model)}
    for network, name in (("trained", "resattnet18"), ("shuffled", "shuffled_labels")):
        state = torch.load(weights(out, name, seed), weights_only=True)["state_dict"]
        model.load_state_dict(state)
        networks[network] = untrained(model)
        networks[network].load_state_dict(model.network.state_dict())
    data = cohort(root, spatial_shape=size.shape, spacing_mm=size.resolution_mm)
    return {"rows": explained(networks, data, LAYERS)}


def weights(out: Path, name: str, seed: int) -> Path:
    return out / f"{name}_{seed}.ckpt"


def kept(path: Path, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """What a file says, which is made first if it is not there."""
    if not path.exists():
        text = json.dumps(make(), indent=1) + "\n"
        part = path.with_suffix(".part")
        part.write_text(text)
        part.replace(path)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _with_interval(metrics: Mapping[str, float]) -> str:
    """Accuracy, and its interval where people are enough for one."""
    ends = [metrics.get(f"test/accuracy_{end}") for end in ("low", "high")]
    shown = "-".join(f"{end:.2f}" for end in ends if end is not None)
    return f"{metrics['test/accuracy']:.3f}" + (f" ({shown})" if shown else "")


def show_runs(results: Mapping[str, list[dict[str, Any]]]) -> None:
    print("\nrun; accuracy: mean and, per seed, the 95 % interval over subjects; AUROC; seconds")
    for name, runs in results.items():
        values = [run["metrics"] for run in runs]
        each = ", ".join(map(_with_interval, values))
        accuracy, auroc = (np.mean([v[f"test/{n}"] for v in values]) for n in ("accuracy", "auroc"))
        spent_s = np.mean([run["fit_s"] for run in runs])
        print(f"{name:16}{accuracy:.3f}: {each}; {auroc:.3f}; {spent_s:.0f} s")


def show_maps(found: list[list[dict[str, Any]]]) -> None:
    print("\nplanted region, mean over AD scans, per seed: peak inside; energy over chance")
    for lines in zip(*found):
        first = lines[0]
        peaks, times = (
            " ".join(f"{line[name]:.2f}" for line in lines) for name in ("peak_in", "times_chance")
        )
        print(f"{first['network']:11}{first['method']:11}{first['layer']:8}{peaks};   {times}")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo/l1_study"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--full", action="store_true", help="2 mm, full width, 50 epochs")
    chosen = parser.parse_args(arguments)
    size = FULL if chosen.full else SMALL
    root = chosen.out / "adni"
    generate(root, CohortSpec(subjects=SUBJECTS, resolution_mm=size.resolution_mm), workers=1)
    machine = environment()
    print(date.today(), size, machine.get("accelerators", f"{machine['threads']} threads"))
    runs: dict[str, list[dict[str, Any]]] = {}
    maps: list[list[dict[str, Any]]] = []
    for seed in chosen.seeds:
        for name in RUNS:
            path = chosen.out / f"{name}_{seed}.json"
            result = kept(path, lambda n=name, s=seed: measure(n, root, chosen.out, s, size))
            runs.setdefault(name, []).append(result)
        path = chosen.out / f"maps_{seed}.json"
        maps.append(kept(path, lambda s=seed: localise(root, chosen.out, s, size))["rows"])
        show_runs(runs)
        show_maps(maps)


if __name__ == "__main__":
    main(sys.argv[1:])
