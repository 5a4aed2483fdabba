import numpy as np
import pytest

from models.localisation import by_region, hottest, localise, similarity

VOXEL = np.array([4.0, 4, 4])
CELL = np.array([8.0, 8, 8])


@pytest.fixture
def head() -> np.ndarray:
    inside = np.zeros((20, 20, 20), bool)
    inside[2:18, 2:18, 2:18] = True
    return inside


@pytest.fixture
def mask(head) -> np.ndarray:
    planted = np.zeros_like(head)
    planted[4:8, 4:8, 4:8] = True
    return planted


def test_a_flat_map_scores_chance_and_air_earns_nothing(head, mask) -> None:
    for heatmap in (np.ones(head.shape), head.astype(float)):
        found = localise(heatmap, mask, head, VOXEL, CELL)
        assert found.energy == pytest.approx(found.chance) == pytest.approx(4**3 / 16**3)
        assert found.times_chance == pytest.approx(1)


def test_a_map_of_the_mask_itself_is_perfect(head, mask) -> None:
    found = localise(mask.astype(float), mask, head, VOXEL, CELL)
    assert (found.peak_in, found.distance_mm, found.energy, found.precision) == (True, 0, 1, 1)


@pytest.mark.parametrize(("voxels", "near"), [(2, True), (3, False)])
def test_a_peak_within_one_cell_is_near(head, mask, voxels, near) -> None:
    heatmap = np.zeros(head.shape)
    heatmap[7 + voxels, 5, 5] = 1
    found = localise(heatmap, mask, head, VOXEL, CELL)
    assert (found.peak_in, found.peak_near, found.distance_mm) == (False, near, 4 * voxels)
    assert found.energy == 0


def test_precision_counts_the_hottest_as_many_as_the_mask_has(head, mask) -> None:
    heatmap = np.where(mask, 0.5, 0)
    heatmap[12:14, 4:8, 4:8] = 1  # half as many voxels as the mask, and hotter
    assert localise(heatmap, mask, head, VOXEL, CELL).precision == 0.5
    heatmap = np.zeros(head.shape)
    heatmap[4, 4, 4] = 1
    assert localise(heatmap, head, head, VOXEL, CELL).precision == 1 / 16**3


def test_nothing_is_scored_where_there_is_nothing(head, mask) -> None:
    assert localise(np.zeros(head.shape), mask, head, VOXEL, CELL) is None
    assert localise(np.ones(head.shape), np.zeros_like(mask), head, VOXEL, CELL) is None


def test_only_the_hottest_voxels_of_the_head_are_kept(head) -> None:
    heatmap = np.random.default_rng(0).random(head.shape)
    heatmap[0] = 2  # air
    kept = hottest(heatmap, head, 0.1)
    assert (kept > 0).sum() == round(0.1 * head.sum())
    assert kept.max() == heatmap[head].max()
    assert not kept[0].any()
    assert not hottest(np.zeros(head.shape), head).any()


def test_boxes_hold_their_side_and_all_shares_sum_to_one() -> None:
    affine = np.diag([4.0, 4, 4, 1])
    affine[:3, 3] = (-78, -112, -72)
    head = np.ones((40, 46, 38), bool)
    heatmap = np.zeros(head.shape)
    left = np.round(np.linalg.inv(affine) @ (-25, -22, -15, 1)).astype(int)[:3]
    heatmap[tuple(left)] = 1
    shares = by_region(heatmap, head, affine)
    assert shares["left hippocampus"][0] == 1
    assert shares["right hippocampus"][0] == 0
    assert sum(share for _, share in shares.values()) == pytest.approx(1)


def test_similarity_is_one_with_itself_and_near_zero_with_noise(head) -> None:
    one, other = np.random.default_rng(0).random((2, *head.shape))
    assert similarity(one, one**3, head) == pytest.approx(1)
    assert abs(similarity(one, other, head)) < 0.05
    assert similarity(one, np.ones(head.shape), head) == 0
