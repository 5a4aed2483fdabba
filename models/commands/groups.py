"""``python -m models groups RUN``: where do the maps of two classes differ by more than chance?

A permutation test in every voxel (nilearn's `permuted_ols`), two-sided. Labels are permuted, and of
each permutation the largest t anywhere counts, so that p is the probability of any voxel at all
under no difference (family-wise). One scan a person: two of one person are not two.
"""

import argparse
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import nibabel as nib
import numpy as np

from models.errors import UseError
from models.explained_scan import peak_mm
from models.findings import TITLES, MethodName
from models.maps.native import Array, volume
from models.overlay import DISPLAY_MM
from models.regions import atlas_regions
from models.slices import ends_mm, places
from models.tables import read_table, write_table

_P = 0.05
_FEWEST = 5  # people of each class: fewer have too few permutations to say anything
_SHARE = 0.5  # of the maps that are not 0 in a voxel that is tested


@dataclass(frozen=True)
class Difference:
    """Maps of two groups compared, (D, H, W) each; 0 where nothing was tested.

    Attributes:
        t: two-sample t of the second group against the first.
        p: family-wise corrected p, 1 where nothing was tested.
        means: mean map of each group.
        tested: which voxels were.
    """

    t: Array
    p: Array
    means: tuple[Array, Array]
    tested: Array


def difference(maps: Array, labels: Array, permutations: int, seed: int = 0) -> Difference:
    """Compare maps (n, D, H, W) of people labelled False and True (n,).

    Args:
        maps: one for each person.
        labels: which group each is of.
        permutations: how many; p is no smaller than one over them.
        seed: of the permutations.
    """
    from nilearn.mass_univariate import permuted_ols  # slow to import

    tested = ((maps != 0).mean(axis=0) > _SHARE) & (maps.std(axis=0) > 0)
    found = permuted_ols(
        labels.astype(float)[:, None],
        np.ascontiguousarray(maps[:, tested], dtype=np.float64),
        n_perm=permutations,
        two_sided_test=True,
        random_state=seed,
        output_type="dict",
    )
    t, p = np.zeros(maps.shape[1:]), np.ones(maps.shape[1:])
    t[tested], p[tested] = found["t"][0], 10 ** -found["logp_max_t"][0]
    means = maps[~labels].mean(axis=0), maps[labels].mean(axis=0)
    return Difference(t, p, means, tested)


def region_rows(found: Difference, affine: Array, names: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each region of an atlas, the smallest p first; regions not tested are left out."""
    rows = []
    for region, inside in atlas_regions(found.t.shape, affine)[1].items():
        own = inside & found.tested
        if not own.any():
            continue
        strongest = np.where(own, np.abs(found.t), -1)
        place = np.unravel_index(strongest.argmax(), strongest.shape)
        rows.append(
            {
                "region": region,
                "voxels": int(own.sum()),
                f"mean_{names[0]}": float(found.means[0][own].mean()),
                f"mean_{names[-1]}": float(found.means[1][own].mean()),
                "t": float(found.t[place]),
                "p": float(found.p[place]),
                "share_significant": float((found.p[own] < _P).mean()),
                "peak_mm": " ".join(f"{x:.0f}" for x in peak_mm(strongest, affine)),
            }
        )
    return sorted(rows, key=lambda row: (row["p"], -abs(row["t"])))


def read_maps(folder: Path, method: str) -> tuple[Array, Array, Array]:
    """Maps (n, D, H, W) of one scan a person, whether each is of the last class, their affine.

    Args:
        folder: what `explain` wrote.
        method: of explanation.

    Raises:
        UseError: the maps were not kept, lie on several grids, or are of too few people.
    """
    table = folder / "explain.tsv"
    if not table.is_file():
        raise UseError(f"There is no {table}; run `python -m models explain` first.")
    known = read_table(table)
    if any("told" in row for row in known):
        raise UseError(f"{folder} explains a number: there are no two classes to compare.")
    rows = [row for row in known if (row["network"], row["method"]) == ("trained", method)]
    people = {row["subject"]: row for row in reversed(rows)}  # the first scan of each
    paths = [folder / "maps" / method / f"{n}_{r['image_id']}.nii.gz" for n, r in people.items()]
    gone = [path for path in paths if not path.is_file()]
    if gone or not paths:
        where = gone[0] if gone else table
        raise UseError(
            f"There is no map of {method} for every scan ({where}): run `python -m models explain` "
            f"with --keep_maps true and {method} among --methods."
        )
    labels = np.array([row["explained"] == "True" for row in people.values()])
    if min(labels.sum(), (~labels).sum()) < _FEWEST:
        raise UseError(
            f"{labels.sum()} people of the explained class and {(~labels).sum()} others: fewer "
            f"than {_FEWEST} of each say nothing. Explain a larger held-out set."
        )
    images: list[Any] = [nib.load(path) for path in paths]
    grids = {(image.shape, image.affine.tobytes()) for image in images}
    if len(grids) > 1:
        raise UseError(
            f"The maps lie on {len(grids)} grids: voxels can be compared only where the scans are "
            "registered to one space (see `python -m datamodules prepare`)."
        )
    return np.stack([np.asarray(image.dataobj) for image in images]), labels, images[0].affine


def draw(found: Difference, affine: Array, path: Path, title: str) -> None:
    """Draw t over the template, in colour where p is below 0.05."""
    import matplotlib as mpl

    mpl.use("Agg")  # no display needed
    from matplotlib import pyplot as plt
    from nilearn import datasets, plotting

    warnings.filterwarnings("ignore", "empty mask")  # nothing differs: the title says so
    figure = plt.figure(figsize=(11, 6), facecolor="black")
    significant = np.where(found.p < _P, found.t, 0)
    shown = significant if significant.any() else found.t
    cut = peak_mm(np.abs(shown), affine)
    top = float(np.abs(found.t).max())
    template = datasets.load_mni152_template(resolution=int(DISPLAY_MM))
    brain = np.asarray(datasets.load_mni152_brain_mask(resolution=int(DISPLAY_MM)).dataobj)
    ends = ends_mm(brain > 0, template.affine)
    for row, axis in enumerate("xyz"):
        display = plotting.plot_stat_map(
            volume(significant, affine),
            bg_img=template,
            display_mode=axis,
            cut_coords=places(ends[row], float(cut[row])),
            vmax=top,
            symmetric_cbar=True,
            cmap="cold_hot",
            threshold=1e-6,
            draw_cross=False,
            black_bg=True,
            colorbar=row == 0,
            figure=figure,
            axes=(0, 0.64 - 0.32 * row, 0.96, 0.3),
        )
        if significant.any():
            display.add_contours(
                volume((found.p < _P).astype(float), affine),
                levels=[0.5],
                colors="lime",
                linewidths=0.7,
            )
    figure.text(0.954, 0.935, "t", color="white", fontsize=10, ha="center")
    figure.text(0.01, 0.985, title, color="white", fontsize=10, va="top")
    figure.savefig(path, dpi=100, facecolor="black")
    plt.close(figure)


def main(arguments: list[str]) -> None:
    """Compare the maps of two classes of a run."""
    parser = argparse.ArgumentParser(
        prog="python -m models groups", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("run", type=Path, help="folder of a run that was explained")
    parser.add_argument("--method", choices=get_args(MethodName), default="hirescam")
    parser.add_argument("--permutations", type=int, default=5000, help="default: 5000")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    folder = options.run / "explain"
    maps, labels, affine = read_maps(folder, options.method)
    found = difference(maps, labels, options.permutations, options.seed)
    explained = json.loads((folder / "explain.json").read_text())["explained"]
    names = ("others", explained)
    atlas, _ = atlas_regions(maps.shape[1:], affine)
    rows = region_rows(found, affine, names)
    stem = folder / f"groups_{options.method}"
    write_table(rows, stem.with_suffix(".tsv"))
    nib.save(volume(found.t, affine), Path(f"{stem}_t.nii.gz"))
    nib.save(volume(found.p, affine), Path(f"{stem}_p.nii.gz"))
    count = int((found.p < _P).sum())
    title = (
        f"{TITLES[options.method]}, evidence for {explained}: {labels.sum()} {explained} against "
        f"{(~labels).sum()} others, t where p < {_P} (family-wise, {options.permutations} "
        f"permutations): {count} of {int(found.tested.sum())} voxels"
    )
    draw(found, affine, stem.with_suffix(".png"), title)
    print(title)
    print(f"regions: {atlas}")
    for row in rows[:5]:
        print(
            f"  {row['region']}: t {row['t']:.1f}, p {row['p']:.4f}, at {row['peak_mm']} mm, "
            f"{row['share_significant']:.0%} of it"
        )
    print(f"written to {stem}.tsv, {stem}.png, {stem}_t.nii.gz, {stem}_p.nii.gz")
