import nibabel as nib
import numpy as np
import pytest

from models.commands.groups import difference, main, read_maps, region_rows
from models.errors import UseError
from models.maps.native import volume
from models.regions import atlas_regions
from models.tables import read_table, write_table

SHAPE = (24, 29, 24)  # 8 mm around the middle of MNI152
AFFINE = np.diag([8.0, 8, 8, 1])
AFFINE[:3, 3] = -92, -130, -74


def maps(people: int, gain: float) -> tuple[np.ndarray, np.ndarray]:
    """Noise, and in every other person more of it around the left hippocampus."""
    rng = np.random.default_rng(0)
    values = np.abs(rng.standard_normal((people, *SHAPE))) * 0.2 + 0.1
    labels = np.arange(people) % 2 == 1
    left = atlas_regions_boxes()["left hippocampus"]
    values[np.ix_(labels, *(range(n) for n in SHAPE))] += gain * left
    values[:, :2] = 0  # air
    return values, labels


def atlas_regions_boxes() -> dict[str, np.ndarray]:
    from models.regions import _boxes

    return _boxes(SHAPE, AFFINE)


def test_a_difference_is_found_where_it_is_and_nowhere_else() -> None:
    values, labels = maps(24, gain=0.4)
    found = difference(values, labels, permutations=100)
    left = atlas_regions_boxes()["left hippocampus"]
    assert (found.p[left] < 0.05).mean() > 0.8
    assert (found.p[~left] < 0.05).mean() < 0.001
    assert found.t[left].min() > 0
    assert not found.tested[:2].any()


def test_without_a_difference_one_set_in_twenty_has_a_significant_voxel() -> None:
    """Family-wise: of 40 sets of nothing, 2 are expected, and 7 or more come once in 200 times."""
    rng = np.random.default_rng(1)
    labels = np.arange(16) % 2 == 1
    alarms = 0
    for _ in range(40):
        values = np.abs(rng.standard_normal((16, 6, 6, 6))) + 0.1
        alarms += bool((difference(values, labels, permutations=100).p < 0.05).any())
    assert alarms < 7


def test_regions_are_of_an_installed_atlas_or_of_boxes_and_say_where_the_peak_is() -> None:
    values, labels = maps(24, gain=0.4)
    found = difference(values, labels, permutations=100)
    name, regions = atlas_regions(SHAPE, AFFINE)
    rows = region_rows(found, AFFINE, ("others", "AD"))
    assert {row["region"] for row in rows} <= set(regions)
    assert rows[0]["p"] == min(row["p"] for row in rows) < 0.05
    assert float(rows[0]["peak_mm"].split()[0]) < 0  # left
    assert rows[0]["mean_AD"] > rows[0]["mean_others"]
    assert ("AAL2" in name) == ("Hippocampus_L" in regions)


@pytest.fixture
def explained(tmp_path):
    """What `explain` leaves of twelve people, one of them with two scans."""
    folder = tmp_path / "run" / "explain"
    (folder / "maps" / "hirescam").mkdir(parents=True)
    values, labels = maps(12, gain=0.4)
    rows = []
    for i, (one, label) in enumerate([*zip(values, labels), (values[0], labels[0])]):
        row = {"subject": f"999_S_{i % 12:04d}", "image_id": f"I{i}", "explained": bool(label)}
        rows.append(row | {"network": "trained", "method": "hirescam"})
        path = folder / "maps" / "hirescam" / f"{row['subject']}_I{i}.nii.gz"
        nib.save(volume(one, AFFINE), path)
    write_table([*rows, rows[0] | {"network": "untrained"}], folder / "explain.tsv")
    (folder / "explain.json").write_text('{"explained": "AD"}')
    return folder


@pytest.mark.conformance
def test_the_command_takes_one_scan_a_person_and_writes_table_maps_and_picture(explained, capsys):
    assert len(read_maps(explained, "hirescam")[0]) == 12
    main([str(explained.parent), "--permutations", "100"])
    assert "6 AD against 6 others" in capsys.readouterr().out
    table = read_table(explained / "groups_hirescam.tsv")
    assert float(table[0]["p"]) < 0.05
    for name in ("groups_hirescam.png", "groups_hirescam_t.nii.gz", "groups_hirescam_p.nii.gz"):
        assert (explained / name).stat().st_size > 500


def test_maps_that_cannot_be_compared_are_refused(explained) -> None:
    with pytest.raises(UseError, match="keep_maps"):
        read_maps(explained, "gradcam")
    moved = AFFINE.copy()
    moved[0, 3] += 8
    first = next((explained / "maps" / "hirescam").glob("*_I1.nii.gz"))
    nib.save(volume(np.ones(SHAPE), moved), first)
    with pytest.raises(UseError, match="2 grids"):
        read_maps(explained, "hirescam")
    with pytest.raises(UseError, match="There is no"):
        read_maps(explained.parent, "hirescam")
