"""Explain held-out scans: maps by several methods, what they score, and whether to believe them.

Maps explain the last class of the task (AD, pMCI), or the number that is told: then they show what
raises it, and every scan is one of its kind. Every held-out scan of that class is scored, not
only those that are drawn, and so are the same scans in networks that know nothing: an untrained
one, and one that was trained on shuffled labels if there is one. A method whose maps look alike
there says nothing about what was learnt (Adebayo et al., Sanity Checks for Saliency Maps, NeurIPS
2018).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from torch import Tensor, nn

from models.explained_scan import ExplainedScan, Sample, peak_mm
from models.findings import OF_A_LAYER, TITLES, Case, Findings, Map, MethodName, Verdict
from models.localisation import by_region, similarity
from models.maps import (
    AttentionMap3D,
    GradCAM3D,
    GradCAMPlusPlus3D,
    HiResCAM3D,
    InputGradient3D,
    IntegratedGradients3D,
    Occlusion3D,
    SmoothGrad3D,
)
from models.maps.common import evaluation, named_layer
from models.maps.native import Array, head_mask, volume
from models.predictions import Scale, told

Explainer = Callable[[Tensor, int], Tensor]


def make_explainer(name: MethodName, network: nn.Module, layer: str) -> Explainer:
    """The method of that name for a network.

    Raises:
        ValueError: If there is no such method or layer, or the layer does not suit the method.
    """
    match name:
        case "gradcam":
            return GradCAM3D(network, layer)
        case "gradcam++":
            return GradCAMPlusPlus3D(network, layer)
        case "hirescam":
            return HiResCAM3D(network, layer)
        case "gradient":
            return InputGradient3D(network)
        case "smoothgrad":
            return SmoothGrad3D(network)
        case "integrated":
            return IntegratedGradients3D(network)
        case "occlusion":
            return Occlusion3D(network)
        case "attention":
            return AttentionMap3D(network, attention_of(network, layer))
    raise ValueError(f"There is no method {name!r}; choose of {', '.join(TITLES)}.")


def attention_of(network: nn.Module, layer: str) -> str:
    """The attention layer to look at: the named one, or the one that follows the named layer."""
    after = layer.split(".")[0].replace("layer", "attention")
    return after if after in dict(network.named_modules()) else layer


def choose_cases(
    labels: Sequence[int], scores: Sequence[float], count: int, explained: int = 1
) -> list[int]:
    """Scans to draw: ``count`` - 1 of the explained class about its median score, one other.

    The best cases would flatter the method, the first ones be luck.

    Args:
        labels: Label of each scan.
        scores: Its probability of the explained class.
        count: How many to choose.
        explained: The label of that class.

    Returns:
        Positions in ``labels``.
    """
    own = [i for i, label in enumerate(labels) if label == explained]
    others = [i for i, label in enumerate(labels) if label != explained]
    wanted = count - 1 if others and count > 1 else count
    return [*_about_median(own, scores, wanted), *_about_median(others, scores, count - wanted)]


def _about_median(chosen: list[int], scores: Sequence[float], count: int) -> list[int]:
    if not chosen or count < 1:
        return []
    middle = float(np.median([scores[i] for i in chosen]))
    return sorted(chosen, key=lambda i: (abs(scores[i] - middle), i))[:count]


def explain(
    networks: Mapping[str, nn.Module],
    batches: Callable[[], Iterable[Sample]],
    methods: Sequence[MethodName],
    layer: str,
    count: int,
    truth: Path | None = None,
    keep: Path | None = None,
    scale: Scale | None = None,
) -> Findings:
    """Explain the last class, or the number, for the scans of a data loader.

    Args:
        networks: "trained", and those that know nothing, all alike in form; each on one device.
        batches: Gives the batches, each time from the start: ``image`` (B, C, D, H, W), ``affine``
            (B, 4, 4), ``label``, ``subject`` and ``image_id``.
        methods: How to explain.
        layer: Layer of the network for the methods that need one.
        count: How many scans to keep for drawing.
        truth: Folder with one mask per scan, ``<image_id>.nii.gz``; scans without one are not
            scored. A folder ``effect`` beside it, with files of the same names, says how strong the
            change is in each voxel.
        keep: Folder for the trained network's map of every scan, ``METHOD/SUBJECT_IMAGE.nii.gz``
            on the grid of the prepared scan; None: only those of drawn scans are kept.
        scale: of the number that is told; None: classes are.
    """
    network = networks["trained"]
    labels, verdicts, classes = _verdicts(network, batches(), scale)
    scores = [v.probability if v.number is None else v.number for v in verdicts]
    drawn = set(choose_cases(labels, scores, count, classes - 1))
    study = _Study(networks, methods, layer, classes - 1, keep)
    device = next(network.parameters()).device
    number = 0
    for batch in batches():
        scans = [ExplainedScan(sample, truth, device) for sample in _samples(batch)]
        # all at once: on a CPU a single volume costs several times its share of a batch
        for scan, raw in zip(scans, study.raw_maps(scans)):
            study.add(scan, raw, verdicts[number], number in drawn)
            number += 1
    return study.findings()


@dataclass(frozen=True)
class _Raw:
    """What the methods put out for one scan, (D, H, W) each.

    Attributes:
        maps: by network and method.
        mirrored: by method, of the trained network for the mirrored scan, mirrored back; of the
            explained class only.
    """

    maps: dict[tuple[str, MethodName], Array]
    mirrored: dict[MethodName, Array]


class _Study:
    """Collects what the methods say of one scan after the other, in every network."""

    def __init__(
        self,
        networks: Mapping[str, nn.Module],
        methods: Sequence[MethodName],
        layer: str,
        explained: int,
        keep: Path | None,
    ) -> None:
        self._network, self._keep = networks["trained"], keep
        self._methods, self._layer, self._explained = methods, layer, explained
        self._explainers = {
            (name, method): make_explainer(method, network, layer)
            # the others are compared with the trained one
            for name, network in sorted(networks.items(), key=lambda item: item[0] != "trained")
            for method in methods
        }
        self._cells: dict[MethodName, Array] = {}
        self._rows: list[dict[str, Any]] = []
        self._cases: list[Case] = []
        self._maps: dict[tuple[int, MethodName], Array] = {}
        self._images: dict[int, Array] = {}
        self._planted: dict[int, Array] = {}
        self._counts: Counter[int] = Counter()
        self._affine: Array = np.eye(4)
        self._grids: set[bytes] = set()

    def raw_maps(self, scans: Sequence[ExplainedScan]) -> list[_Raw]:
        """Every map that is wanted of some scans of one size."""
        volumes = torch.cat([scan.volume for scan in scans])
        own = [i for i, scan in enumerate(scans) if scan.label == self._explained]
        found = [_Raw({}, {}) for _ in scans]
        for (network, method), explainer in self._explainers.items():
            # others have nothing planted to point at: only their mean map is of interest
            chosen = list(range(len(scans))) if network == "trained" else own
            for i, values in zip(chosen, self._mapped(explainer, volumes[chosen])):
                found[i].maps[network, method] = values
        for method in self._methods:
            mirrored = self._mapped(self._explainers["trained", method], volumes[own].flip(2))
            for i, values in zip(own, mirrored):
                found[i].mirrored[method] = np.flip(values, axis=0)
        return found

    def _mapped(self, explainer: Explainer, volumes: Tensor) -> Array:
        """Maps (n, D, H, W) of the explained class of volumes (n, C, D, H, W); n may be 0."""
        if not len(volumes):
            return np.empty((0, *volumes.shape[2:]))
        maps: Array = explainer(volumes, self._explained)[:, 0].cpu().numpy()
        return maps

    def add(self, scan: ExplainedScan, raw: _Raw, verdict: Verdict, drawn: bool) -> None:
        found: dict[tuple[str, MethodName], Map] = {}
        for (network, method), values in raw.maps.items():
            one = scan.map(values, method, self._explained, self._cell_mm(method, scan))
            found[network, method] = one
            row = _row(scan, verdict, self._explained, network, self._layer, one)
            row |= self._likeness(scan, network, one, found, raw)
            row |= {"like_effect": self._like_effect(scan, one), "drawn": drawn}
            self._rows.append(row)
        self._affine = scan.affine
        self._grids.add(scan.affine.tobytes())
        self._counts[scan.label] += 1
        self._images[scan.label] = self._images.get(scan.label, 0) + scan.image
        if scan.truth is not None:
            self._planted[scan.label] = self._planted.get(scan.label, 0) + scan.truth
        for method in self._methods:
            key, values = (scan.label, method), found["trained", method].values
            self._maps[key] = self._maps.get(key, 0) + values
            if self._keep is not None:
                path = self._keep / method / f"{scan.subject}_{scan.image_id}.nii.gz"
                path.parent.mkdir(parents=True, exist_ok=True)
                nib.save(volume(values, scan.affine), path)
        if drawn:
            maps = [found["trained", method] for method in self._methods]
            self._cases.append(scan.case(verdict, maps))

    def findings(self) -> Findings:
        means = {key: total / self._counts[key[0]] for key, total in self._maps.items()}
        images = {label: total / self._counts[label] for label, total in self._images.items()}
        planted = {label: total / self._counts[label] for label, total in self._planted.items()}
        regions = {
            method: by_region(mean, head_mask(images[label]), self._affine)
            for (label, method), mean in means.items()
            # on several grids a voxel is another place in each scan
            if label == self._explained and len(self._grids) == 1
        }
        cases = sorted(self._cases, key=lambda case: (-case.label, case.subject))
        return Findings(
            cases, self._rows, means, images, planted, regions, self._affine, self._counts
        )

    def _likeness(
        self,
        scan: ExplainedScan,
        network: str,
        one: Map,
        found: Mapping[tuple[str, MethodName], Map],
        raw: _Raw,
    ) -> dict[str, Any]:
        """How alike the map is to the trained network's, or to that of the mirrored scan."""
        if network != "trained":
            trained = found["trained", one.method].values
            alike = similarity(one.values, trained, scan.head)
            return {"like_trained": alike, "like_mirrored": ""}
        if one.method not in raw.mirrored:
            return {"like_trained": "", "like_mirrored": ""}
        alike = similarity(one.values, raw.mirrored[one.method], scan.head)
        return {"like_trained": "", "like_mirrored": alike}

    def _like_effect(self, scan: ExplainedScan, one: Map) -> float | str:
        """How alike the map is to the strength of the planted change, where that is known."""
        if one.score is None or scan.effect is None:
            return ""
        return similarity(one.values, scan.effect, scan.head)

    def _cell_mm(self, method: MethodName, scan: ExplainedScan) -> tuple[float, float, float]:
        if method not in self._cells:
            self._cells[method] = _cell(self._network, method, self._layer, scan.volume)
        x, y, z = (self._cells[method] * scan.voxel_mm).tolist()
        return x, y, z


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per network and method: the means over the scans of the explained class.

    ``scored`` counts the scans with a truth and a map; those whose map is empty are ``empty`` and
    count as a miss of the pointing game. ``right`` and ``right_times`` are the pointing game and
    the energy over chance of the correctly classified scans alone. ``places`` counts the different
    places of the peaks: one place for many scans is a difference of groups, and says nothing of
    the single scan.
    """
    own = [row for row in rows if row["explained"]]
    table = []
    for network, method in dict.fromkeys((row["network"], row["method"]) for row in own):
        some = [row for row in own if (row["network"], row["method"]) == (network, method)]
        scored = [row for row in some if row["energy"] != ""]
        missed = sum(row["empty"] for row in some)
        line = {name: some[0][name] for name in ("network", "method", "layer", "cell_mm")}
        places = {row["peak_mm"] for row in some if not row["empty"]}
        line |= {"scans": len(some), "empty": missed, "places": len(places)}
        if scored:
            hits, near = (sum(row[name] for row in scored) for name in ("peak_in", "peak_near"))
            line |= {
                "scored": len(scored),
                "peak_in": hits / (len(scored) + missed),
                "peak_near": near / (len(scored) + missed),
                "distance_mm": float(np.median([row["distance_mm"] for row in scored])),
                "times_chance": _mean(row["times_chance"] for row in scored),
                "precision": _mean(row["precision"] for row in scored),
                "chance": _mean(row["chance"] for row in scored),
            }
            if "correct" in scored[0]:
                right = [row for row in scored if row["correct"]]
                line["right"] = _mean(row["peak_in"] for row in right)
                line["right_times"] = _mean(row["times_chance"] for row in right)
            line["like_effect"] = _mean(row["like_effect"] for row in scored)
        for name in ("like_trained", "like_mirrored"):
            line[name] = _mean(row[name] for row in some)
        table.append(line)
    columns = dict.fromkeys(name for line in table for name in line)
    return [{name: line.get(name, "") for name in columns} for line in table]


def _mean(values: Iterable[Any]) -> float | str:
    """Of those that are known; empty if none is."""
    known = [value for value in values if value != ""]
    return float(np.mean(known)) if known else ""


def _row(
    scan: ExplainedScan, verdict: Verdict, explained: int, network: str, layer: str, one: Map
) -> dict[str, Any]:
    row: dict[str, Any] = {"subject": scan.subject, "image_id": scan.image_id}
    if verdict.number is None:
        row |= {"label": scan.label, "probability": verdict.probability}
        row |= {"explained": scan.label == explained, "correct": verdict.predicted == scan.label}
    else:
        row |= {"label": scan.number, "told": verdict.number, "explained": True}
    row |= {
        "network": network,
        "method": one.method,
        "layer": layer if one.method in OF_A_LAYER else "",
        "cell_mm": " x ".join(f"{side:.0f}" for side in one.cell_mm),
        "empty": one.empty,
        "peak_mm": ""
        if one.empty
        else " ".join(f"{x:.0f}" for x in peak_mm(one.values, scan.affine)),
    }
    names = ("peak_in", "peak_near", "distance_mm", "energy", "chance", "times_chance", "precision")
    return row | {name: getattr(one.score, name) if one.score else "" for name in names}


def _samples(batch: Sample) -> Iterator[Sample]:
    for i in range(len(batch["label"])):
        yield {name: values[i] for name, values in batch.items()}


@torch.no_grad()
def _verdicts(
    network: nn.Module, batches: Iterable[Sample], scale: Scale | None
) -> tuple[list[int], list[Verdict], int]:
    """Label and verdict on the last class, of each scan; and the number of classes.

    Where a number is told, all scans have label 0, and there is one class.
    """
    labels: list[int] = []
    verdicts: list[Verdict] = []
    classes = 0
    device = next(network.parameters()).device
    with evaluation(network):
        for batch in batches:
            found = told(network(batch["image"].to(device)), scale)
            classes = found.shape[1]
            if scale is not None:
                labels += [0] * len(found)
                verdicts += [Verdict(0, 1.0, number) for number in found[:, 0].tolist()]
                continue
            labels += batch["label"].tolist()
            chosen, last = found.argmax(dim=1).tolist(), found[:, -1].tolist()
            verdicts += [Verdict(*verdict) for verdict in zip(chosen, last)]
    return labels, verdicts, classes


def _cell(network: nn.Module, method: MethodName, layer: str, volume: Tensor) -> Array:
    """What a method can tell apart, in voxels along each axis."""
    if method in ("gradient", "smoothgrad", "integrated"):  # width of the smoothing, half-way up
        return np.full(3, max(2.355 * InputGradient3D(network).sigma, 1.0))
    if method == "occlusion":
        return np.full(3, float(Occlusion3D(network).size))
    name = attention_of(network, layer) if method == "attention" else layer
    cell: Array = np.array(volume.shape[2:]) / np.array(_feature_size(network, name, volume))
    return cell


@torch.no_grad()
def _feature_size(network: nn.Module, layer: str, volume: Tensor) -> torch.Size:
    seen: list[torch.Size] = []
    module = named_layer(network, layer)
    hook = module.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    try:
        with evaluation(network):
            network(volume)
    finally:
        hook.remove()
    return seen[0][2:]
