import nibabel as nib
import numpy as np
import pytest
import torch
from torch import nn

from models import ResAttNet3D
from models.explain import choose_cases, explain, make_explainer, summarise
from models.explanation import Writer
from models.findings import TITLES
from models.overlay import case_title, meaning
from models.tables import read_table

NAMES = ("NC", "AD")
AFFINE = torch.diag(torch.tensor([4.0, 4, 4, 1], dtype=torch.float64))
AFFINE[:3, 3] = -60


class Corner(nn.Module):
    """P(AD) grows with the brightness of one corner: `features` is the scan itself."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv3d(1, 1, 1, bias=False)
        nn.init.ones_(self.features.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        corner = self.features(x)[:, 0, :8, :8, :8].mean(dim=(1, 2, 3))
        return torch.stack([-corner, corner], dim=1)


def batches(labels: list[int]) -> list[dict]:
    images = torch.full((len(labels), 1, 16, 16, 16), 0.1)
    images[:, :, 0] = 0  # air
    for image, label in zip(images, labels):
        image[0, 2:6, 2:6, 2:6] += label
    batch = {
        "image": images,
        "label": torch.tensor(labels),
        "affine": AFFINE.expand(len(labels), 4, 4),
        "subject": [f"999_S_{i:04d}" for i in range(len(labels))],
        "image_id": [f"I{9_000_000 + i}" for i in range(len(labels))],
    }
    return [{k: v[i : i + 2] for k, v in batch.items()} for i in range(0, len(labels), 2)]


@pytest.fixture
def truth(tmp_path):
    """The bright corner, on a finer grid whose voxel borders meet those of the scans."""
    finer = np.diag([2.0, 2, 2, 1])
    finer[:3, 3] = -61
    mask = np.zeros((32, 32, 32), np.uint8)
    mask[4:12, 4:12, 4:12] = 1
    folder = tmp_path / "planted"
    folder.mkdir()
    for i in range(4):
        nib.save(nib.Nifti1Image(mask, finer), folder / f"I{9_000_000 + i}.nii.gz")
    return folder


def study(truth=None, methods=("gradcam", "gradient"), count=2, **others: nn.Module):
    torch.manual_seed(0)
    data = batches([1, 0, 1, 0])
    networks = {"trained": Corner()} | others
    return explain(networks, lambda: data, list(methods), "features", count, truth)


def test_cases_are_taken_about_the_median_and_one_of_another_class() -> None:
    labels, scores = [1, 1, 1, 1, 1, 0, 0, 0], [0.1, 0.9, 0.6, 0.7, 0.99, 0.0, 0.2, 0.5]
    assert choose_cases(labels, scores, 3) == [3, 2, 6]  # median of AD 0.7, of NC 0.2
    assert choose_cases(labels, scores, 1) == [3]
    assert len(choose_cases(labels, scores, 20)) == 6
    assert choose_cases([0, 0, 0], [0.1, 0.2, 0.9], 2) == [1]  # nobody of the explained class


def test_regions_are_of_scans_on_one_grid_only() -> None:
    assert study().regions
    data = batches([1, 0, 1, 0])
    data[1]["affine"] = data[1]["affine"] + 1
    torch.manual_seed(0)
    found = explain({"trained": Corner()}, lambda: data, ["gradcam"], "features", 2)
    assert found.means
    assert not found.regions


def test_every_scan_of_the_explained_class_is_scored_not_only_the_drawn_ones(truth) -> None:
    found = study(truth, count=2)
    scored = [row for row in found.rows if row["energy"] != ""]
    assert {row["image_id"] for row in scored} == {"I9000000", "I9000002"}
    assert sum(row["drawn"] for row in found.rows if row["method"] == "gradcam") == 2
    assert {label: share.sum() for label, share in found.planted.items()} == {1: 64, 0: 64}
    assert [case.label for case in found.cases] == [1, 0]


def test_a_map_on_the_planted_place_scores_full_against_a_truth_on_another_grid(truth) -> None:
    [line, _] = summarise(study(truth).rows)
    assert (line["network"], line["method"], line["scored"]) == ("trained", "gradcam", 2)
    assert line["peak_in"] == line["right"] == 1
    # 64 of the 15 * 16 * 16 voxels of the head, each 11 times as bright as the others
    assert line["chance"] == pytest.approx(64 / 3840)
    assert line["times_chance"] == pytest.approx(1.1 / (1.1 * 64 + 0.1 * 3776) * 3840)
    assert line["right_times"] == line["times_chance"]
    assert (line["layer"], line["cell_mm"], line["places"]) == ("features", "4 x 4 x 4", 1)
    assert line["like_effect"] == ""  # nobody says how strong the change is


def test_a_map_is_compared_with_the_strength_of_the_change_where_that_is_known(truth) -> None:
    effects = truth.parent / "effect"
    effects.mkdir()
    grid = nib.load(truth / "I9000000.nii.gz").affine
    for i, sign in ((0, 1), (2, -1)):
        effect = np.where(nib.load(truth / f"I900000{i}.nii.gz").get_fdata() > 0, sign, 0)
        effect = (effect - min(sign, 0)).astype(np.float32)
        nib.save(nib.Nifti1Image(effect, grid), effects / f"I900000{i}.nii.gz")
    rows = [r for r in study(truth, ["gradcam"]).rows if r["energy"] != ""]
    # the map is bright where the change is, and has one value elsewhere
    assert [r["like_effect"] for r in rows] == pytest.approx([1, -1], abs=1e-6)
    [line] = summarise(rows)
    assert line["like_effect"] == pytest.approx(0, abs=1e-6)


def test_the_wrongly_classified_count_in_all_columns_but_those_of_the_right_ones() -> None:
    row = dict.fromkeys(("network", "method", "layer", "cell_mm", "like_effect"), "")
    row |= dict.fromkeys(("like_trained", "like_mirrored"), "") | {"explained": True}
    row |= {"empty": False, "energy": 0.1, "chance": 0.1, "precision": 0.5, "peak_near": True}
    right = {"correct": True, "peak_in": True, "times_chance": 3.0, "peak_mm": "1 2 3"}
    wrong = {"correct": False, "peak_in": False, "times_chance": 1.0, "peak_mm": "4 5 6"}
    ends = {"distance_mm": 0.0}
    [line] = summarise([row | right | ends, row | wrong | ends])
    assert (line["peak_in"], line["right"], line["places"]) == (0.5, 1, 2)
    assert (line["times_chance"], line["right_times"]) == (2, 3)


def test_maps_do_not_depend_on_the_batch_a_scan_is_in(truth) -> None:
    alone = [{k: v[i : i + 1] for k, v in b.items()} for b in batches([1, 0, 1, 0]) for i in (0, 1)]
    both = [{"trained": Corner(), "untrained": Corner()} for _ in range(2)]
    one = explain(both[0], lambda: alone, ["gradcam"], "features", 2, truth)
    other = explain(both[1], lambda: batches([1, 0, 1, 0]), ["gradcam"], "features", 2, truth)
    assert one.rows == other.rows  # a batch without anybody of the explained class among them


def test_networks_that_know_nothing_are_scored_beside_it(truth) -> None:
    blind = Corner()
    blind.features.weight.data.zero_()
    table = {row["network"]: row for row in summarise(study(truth, ["gradcam"], blind=blind).rows)}
    assert table["blind"]["empty"] == 2
    assert table["blind"]["like_trained"] == 0
    assert table["trained"]["like_trained"] == ""


def test_the_map_of_the_mirrored_scan_is_compared() -> None:
    rows = [r for r in study(methods=["gradcam"]).rows if r["label"] == 1]
    assert all(row["like_mirrored"] == pytest.approx(1) for row in rows)


def test_of_three_classes_the_likeliest_is_what_the_network_says() -> None:
    class Thirds(nn.Module):
        """40 % for the last class, which is more than for any other."""

        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Conv3d(1, 1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            zero = 0 * self.features(x).mean(dim=(1, 2, 3, 4))
            return torch.stack([zero + np.log(p) for p in (0.3, 0.3, 0.4)], dim=1)

    found = explain({"trained": Thirds()}, lambda: batches([2, 0]), ["gradient"], "features", 2)
    assert [row["correct"] for row in found.rows] == [True, False]
    ill, healthy = found.cases
    assert "the network agrees" in meaning(ill, ("NC", "MCI", "AD"))
    assert "40% AD" in case_title(healthy, ("NC", "MCI", "AD"))


def test_without_truth_nothing_is_scored_but_everything_is_mapped() -> None:
    found = study()
    assert all(row["energy"] == "" for row in found.rows)
    assert "peak_in" not in summarise(found.rows)[0]
    assert set(found.means) == {(0, "gradcam"), (1, "gradcam"), (0, "gradient"), (1, "gradient")}


def test_a_group_mean_is_the_mean_of_the_maps_of_its_scans() -> None:
    data = batches([1, 0, 1, 0])
    data[1]["image"][0, 0, 3, 3, 3] += 5  # the second scan of AD has a spot of its own
    network = Corner()
    found = explain({"trained": network}, lambda: data, ["gradcam"], "features", 1)
    images = torch.cat([batch["image"] for batch in data])[:, 0].numpy()
    for label, own in ((1, [0, 2]), (0, [1, 3])):
        # the map of a network whose features are the scan is the scan over its maximum
        maps = [images[i] / images[i].max() for i in own]
        np.testing.assert_allclose(found.means[label, "gradcam"], np.mean(maps, axis=0), atol=1e-6)
        np.testing.assert_allclose(found.mean_images[label], images[own].mean(axis=0), atol=1e-6)
        assert found.counts[label] == 2


def test_cells_say_what_a_method_can_tell_apart() -> None:
    network = ResAttNet3D(widths=(8, 8, 8, 8))
    images = [{**b, "image": torch.rand(len(b["label"]), 1, 32, 32, 32)} for b in batches([1, 0])]
    found = explain({"trained": network}, lambda: images, ["gradcam", "attention"], "layer3", 1)
    assert {one.cell_mm for one in found.cases[0].maps} == {(64, 64, 64)}
    [occluded] = study(methods=["occlusion"], count=1).cases[0].maps
    assert occluded.cell_mm == (24, 24, 24)


@pytest.mark.parametrize("name", TITLES)
def test_every_method_can_be_made(name) -> None:
    make_explainer(name, ResAttNet3D(widths=(8, 8, 8, 8)), "layer3")


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(ValueError, match="no method 'lime'; choose of gradcam"):
        make_explainer("lime", nn.Identity(), "layer3")


@pytest.mark.conformance
def test_pictures_tables_and_maps_are_written_even_of_an_empty_map(truth, tmp_path) -> None:
    scan = tmp_path / "scan.nii.gz"
    nib.save(nib.Nifti1Image(np.zeros((20, 20, 20), np.int16), np.diag([3.0, 3, 3, 1])), scan)
    found = study(truth, count=2)
    found.cases[1].maps[0].values[:] = 0
    Writer(tmp_path / "out", NAMES, "features", {"I9000000": str(scan)}).write(found)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    case = "999_S_0000_I9000000"
    assert names >= {
        f"{case}_gradcam_features.png",
        f"{case}_gradcam_features.nii.gz",
        f"{case}_gradient.png",
        f"{case}.html",
        "mean_AD_gradcam.png",
        "mean_NC_gradient.png",
        "explain.json",
    }
    there = nib.load(tmp_path / "out" / f"{case}_gradcam_features.nii.gz")
    assert there.shape == (20, 20, 20)
    assert 'src="http' not in (tmp_path / "out" / f"{case}.html").read_text()
    rows = read_table(tmp_path / "out" / "localisation.tsv")
    assert [row["method"] for row in rows] == ["gradcam", "gradient"]
    assert {row["region"] for row in read_table(tmp_path / "out" / "regions.tsv")} >= {"elsewhere"}
