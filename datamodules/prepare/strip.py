"""The brain alone, by a tool that is installed. None is part of this project.

================  =======================  ======================================================
tool              what it is run as        where it comes from
================  =======================  ======================================================
``deepbet``       ``deepbet-cli``          pip, its weights in the wheel (Fisch et al. 2024)
``hd-bet``        ``hd-bet``               pip; downloads weights at its first run (Isensee 2019)
``synthstrip``    ``mri_synthstrip``       FreeSurfer, with weights (Hoopes et al. 2022)
================  =======================  ======================================================
"""

# mypy: allow-untyped-calls
# (most of nibabel carries no annotations)
from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import nibabel as nib
import numpy as np
from scipy import ndimage

from ..errors import DataError
from ..nifti import BadFile
from ..synth.grids import Array

# {scan}, {brain} and {mask} are files in a temporary folder
_COMMANDS = {
    "deepbet": "deepbet-cli -i {scan} -o {brain} -m {mask} --no_gpu",
    "hd-bet": "hd-bet -i {scan} -o {brain} -device cpu --disable_tta --save_bet_mask",
    "synthstrip": "mri_synthstrip -i {scan} -m {mask}",
}
TOOLS = tuple(_COMMANDS)
_INSTALL = {
    "deepbet": "pip install deepbet",
    "hd-bet": "pip install hd-bet, and have it download its weights once",
    "synthstrip": "install FreeSurfer, and have mri_synthstrip in the PATH",
}
_LITRES = (0.7, 2.2)  # of a brain
_LINES = 3  # of what a tool said before it failed


def require(tool: str) -> None:
    """Raise unless a tool is there.

    Raises:
        DataError: ``NO_TOOL``.
    """
    command = _COMMANDS[tool].split()[0]
    if shutil.which(command) is None:
        raise DataError(
            "NO_TOOL",
            f"--strip {tool} runs `{command}`, which is not in the PATH",
            action=f"{_INSTALL[tool]}, or use another tool: {', '.join(TOOLS)}, or none",
        )


def brain_mask(tool: str, values: Array, affine: Array) -> Array:
    """Where the brain is, by a tool: boolean (X, Y, Z), one piece without holes.

    Args:
        tool: of ``TOOLS``.
        values: (X, Y, Z), the bias field corrected.
        affine: (4, 4) voxels to RAS millimetres.

    Raises:
        BadFile: ``STRIP``: the tool failed, or what it found is no brain.
    """
    with TemporaryDirectory() as folder:
        # names that hd-bet would give: it takes no name for its mask
        scan, brain, mask = (Path(folder, f"{name}.nii.gz") for name in ("scan", "brain", "mask"))
        nib.Nifti1Image(values.astype(np.float32), affine).to_filename(scan)
        command = [
            part.format(scan=scan, brain=brain, mask=mask) for part in _COMMANDS[tool].split()
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        written = mask if mask.is_file() else Path(folder, "brain_bet.nii.gz")
        if done.returncode or not written.is_file():
            said = " | ".join((done.stderr or done.stdout).strip().splitlines()[-_LINES:])
            raise BadFile("STRIP", f"{tool} failed: {said}", "try another tool, or --strip none")
        found = np.asarray(nib.Nifti1Image.from_filename(written).dataobj) > 0.5
    labels, count = ndimage.label(found)
    if count > 1:
        found = labels == 1 + np.argmax(ndimage.sum_labels(found, labels, range(1, count + 1)))
    found = np.asarray(ndimage.binary_fill_holes(found))
    litres = float(found.sum() * abs(np.linalg.det(affine[:3, :3]))) * 1e-6
    if not _LITRES[0] <= litres <= _LITRES[1]:
        detail = f"{tool} found a brain of {litres:.2f} l"
        raise BadFile("STRIP", detail, "look at the scan; try another tool, or --strip none")
    return found
