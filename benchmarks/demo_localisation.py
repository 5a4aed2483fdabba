"""Which stem and layer the demo should explain: accuracy and localisation over several seeds.

Trains each network below on the demo's cohort and settings, on one device, with several seeds (of
weights and order; the split stays), and scores every method and layer over all held-out AD scans,
beside an untrained network. Each run's result is kept in --out; a stopped benchmark goes on.

    python -m datamodules synth demo/adni --subjects 330 --resolution 4
    python benchmarks/demo_localisation.py --root demo/adni
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from _adni import cohort, explained, trained, untrained

from models import ResAttNetClassifier

NETWORKS: dict[str, dict[str, Any]] = {
    "quarter width, no pooling": {"widths": [16, 32, 64, 128], "stem_pool": False},
    "half width": {"widths": [32, 64, 128, 256]},
    "full width": {},
    "half width, no pooling": {"widths": [32, 64, 128, 256], "stem_pool": False},
}
LAYERS = ("layer1", "layer2", "layer3")


def measure(root: Path, options: dict[str, Any], seed: int, epochs: int) -> dict[str, Any]:
    """Train and explain once."""
    data = cohort(root)
    model, result = trained(
        lambda: ResAttNetClassifier(
            optimizer="sgd", learning_rate=0.01, lr_schedule="cosine", **options
        ),
        data,
        seed,
        epochs,
    )
    networks = {"trained": model.network, "untrained": untrained(model)}
    return result | {"rows": explained(networks, data, LAYERS)}


def show(found: dict[str, list[dict[str, Any]]]) -> None:
    for name, runs in found.items():
        accuracies = " ".join(f"{run['metrics']['test/accuracy']:.3f}" for run in runs)
        print(f"\n{name}: test accuracy {accuracies}; energy / chance and peak inside per seed")
        for number, row in enumerate(runs[0]["rows"]):
            lines = [run["rows"][number] for run in runs]
            times = " ".join(f"{line['times_chance']:5.2f}" for line in lines)
            peaks = " ".join(f"{line['peak_in']:.2f}" for line in lines)
            mean = np.mean([line["times_chance"] for line in lines])
            head = f"{row['network']:10}{row['method']:11}{row['layer']:8}"
            print(f"  {head}{mean:6.2f} = mean of {times}   {peaks}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path("demo/adni"))
    parser.add_argument("--out", type=Path, default=Path("demo/localisation"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen.networks}
    for seed in chosen.seeds:
        for name in chosen.networks:
            path = chosen.out / f"{name.replace(' ', '_')}_{seed}_{chosen.epochs}.json"
            if not path.exists():
                result = measure(chosen.root, NETWORKS[name], seed, chosen.epochs)
                path.write_text(json.dumps(result, indent=1) + "\n")
            results[name].append(json.loads(path.read_text()))
            show({name: results[name]})
