from pathlib import Path

import matplotlib as mpl
import nibabel as nib
import numpy as np

from models.explain import Array, Scan, peak

SHOWN_FROM = 0.3
"""Part of the maximum below which a map is not drawn."""


def save_overlay(scan: Scan, path: Path, class_names: tuple[str, ...]) -> None:
    """Draw a map over its scan, cut through its hottest point; a truth becomes a contour."""
    mpl.use("Agg")  # no display needed
    from matplotlib import pyplot as plt
    from nilearn import plotting

    figure = plt.figure(figsize=(10, 4.2), facecolor="black")
    display = plotting.plot_anat(
        _nifti(_with_dark_air(scan.image), scan.affine),
        cut_coords=tuple(float(x) for x in peak(scan.heatmap, scan.affine)),
        draw_cross=False,
        black_bg=True,
        colorbar=False,
        figure=figure,
        axes=(0, 0, 1, 0.86),
    )
    if scan.heatmap.any():  # a map without evidence has nothing to draw
        heatmap = _nifti(scan.heatmap, scan.affine)
        display.add_overlay(
            heatmap,
            threshold=SHOWN_FROM,
            vmin=0,
            vmax=1,
            cmap="inferno",
            colorbar=True,
            transparency=0.6,
        )
    if scan.truth is not None and scan.truth.any():
        truth = _nifti(scan.truth, scan.affine)
        display.add_contours(truth, levels=[0.5], colors="lime", linewidths=1)
    figure.text(0.02, 0.92, _title(scan, class_names), color="white", fontsize=11)
    figure.savefig(path, dpi=110, facecolor="black")
    plt.close(figure)


def _title(scan: Scan, class_names: tuple[str, ...]) -> str:
    row = scan.row
    parts = [
        row.subject,
        f"is {class_names[row.label]}",
        f"P({class_names[1]}) = {row.probability:.2f}",
        f"Grad-CAM of {row.layer}, cells of {row.cell_mm} mm",
    ]
    if scan.truth is not None and scan.truth.any():
        parts.append("green: planted region")
    return "   |   ".join(parts)


def _with_dark_air(image: Array) -> Array:
    """Air, exactly 0 in prepared scans, lies in the middle of the greys of a standardised one."""
    return np.where(image == 0, image.min(), image)


def _nifti(volume: Array, affine: Array) -> nib.Nifti1Image:
    # nibabel has no types
    return nib.Nifti1Image(volume.astype(np.float32), affine)  # type: ignore[no-untyped-call]
