"""One NIfTI file: read to its end, and no further than its header promises.

The header is read first. It tells how many bytes the volume takes, so that neither a gzip stream
that unpacks to gigabytes nor a series of a thousand volumes is ever held in memory.
"""

# mypy: allow-untyped-calls
# (most of nibabel carries no annotations)
from __future__ import annotations

import hashlib
import itertools
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import nibabel as nib
import numpy as np

_LARGEST_BYTES = 2 << 30  # of one volume, by its header; 512 x 512 x 512 doubles are half of it
_SLACK_BYTES = 1 << 20  # what may follow the volume: some writers pad their files
_START_BYTES = 1 << 16  # holds the header, packed or not
_FORMS_APART_MM = 1.0
_SMALLEST_MM, _LARGEST_MM = 0.05, 20.0  # of a voxel
_OTHER_UNITS = ("micron", "meter")
_GZIP = b"\x1f\x8b"
_READABLE_NAMES = {  # nibabel opens no others, `.Nii` among them
    ".nii.gz": (".nii.gz", ".nii.GZ", ".NII.gz", ".NII.GZ"),
    ".nii": (".nii", ".NII"),
}


class BadFile(Exception):
    """What makes a file bad: code, what was found, what to do."""

    def __init__(self, code: str, detail: str, action: str) -> None:
        super().__init__(code, detail, action)
        self.code, self.detail, self.action = code, detail, action


AGAIN = "download the file again"
_CONVERT = "convert again from DICOM"


@dataclass(frozen=True)
class Leniency:
    """What is repaired on loading instead of refused; counted as warnings.

    Attributes:
        nan: ``zero``: voxels that are NaN or infinite become 0; ``error``: the file is refused.
        assume: ``RAS``: a file without orientation lies in that order; empty: it is refused.
    """

    nan: Literal["error", "zero"] = "error"
    assume: Literal["", "RAS"] = ""


STRICT = Leniency()


def read_image(path: Path) -> tuple[Any, str]:
    """The nibabel image in a file, its gzip checksum verified, and the SHA-256 of the file.

    Raises:
        BadFile: it is no NIfTI volume, or not a whole one.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(_START_BYTES)
        kind, promised = _read_header(path, start)
        most = promised + _SLACK_BYTES
        data = start + file.read(max(0, most + 1 - len(start)))
    digest = hashlib.sha256(data).hexdigest()
    if data.startswith(_GZIP) and len(data) <= most:
        data = _unpack(data, most)
    if len(data) > most:
        detail = f"more than the {promised / 1e6:.1f} MB that the header promises"
        raise BadFile("OVERSIZED", detail, AGAIN)
    if len(data) < promised:
        raise BadFile("TRUNCATED", f"{len(data)} bytes where {promised} are promised", AGAIN)
    try:
        return kind.from_bytes(data), digest
    except (ValueError, OSError, nib.spatialimages.HeaderDataError) as error:
        raise BadFile("NOT_NIFTI", f"{error}", AGAIN) from None


def _unpack(data: bytes, most: int) -> bytes:
    """The content of a gzip file, ``most`` bytes and one more at the most."""
    parts: list[bytes] = []
    room = most + 1
    while data and room > 0:
        stream = zlib.decompressobj(wbits=31)
        try:
            parts.append(stream.decompress(data, room))
        except zlib.error as error:
            raise BadFile("CORRUPT_GZIP", f"{error}", AGAIN) from None
        room -= len(parts[-1])
        if not stream.eof and room > 0:
            detail = "Compressed file ended before the end-of-stream marker was reached"
            raise BadFile("CORRUPT_GZIP", detail, AGAIN)
        data = stream.unused_data.lstrip(b"\0")  # another member, or padding
    return b"".join(parts)


def _read_header(path: Path, start: bytes) -> tuple[Any, int]:
    """Image class and promised bytes, from the first bytes of the file."""
    if not start:
        raise BadFile("EMPTY", "0 bytes", AGAIN)
    gzipped = start.startswith(_GZIP)
    header = _start(start) if gzipped else start[:540]
    kind = _nifti_class(header)
    if path.suffix == ".img" and path.with_suffix(".hdr").is_file():
        detail = "half of an ANALYZE pair (.hdr/.img)"
        raise BadFile("NOT_NIFTI", detail, "`python -m datamodules prepare` converts OASIS-1's")
    if kind is None and gzipped and len(header) < 348:
        raise BadFile("CORRUPT_GZIP", "the gzip stream breaks off within the header", AGAIN)
    if kind is None:
        raise BadFile("NOT_NIFTI", *_what_it_is(header))
    ending = ".nii.gz" if gzipped else ".nii"
    if not path.name.endswith(_READABLE_NAMES[ending]):
        right = re.sub(r"(\.nii)?(\.gz)?$", ending, path.name, count=1, flags=re.IGNORECASE)
        what = "gzipped" if gzipped else "not gzipped"
        detail = f"the content is NIfTI, {what}, and the name does not end in {ending}"
        raise BadFile("WRONG_SUFFIX", detail, f"rename it to {right}")
    raw = kind.header_class(header[: kind.header_class.template_dtype.itemsize], check=False)
    zooms = raw["pixdim"][1:4]
    if not (np.isfinite(zooms).all() and (zooms > 0).all()):  # nibabel would make it 1 mm
        raise BadFile("BAD_PIXDIM", f"voxel size {zooms.tolist()} mm", _CONVERT)
    shape = tuple(int(n) for n in raw.get_data_shape())
    if len(volume_shape(shape)) != 3 or min(shape[:3]) < 2:
        raise BadFile("NOT_3D", f"shape {shape}", "give one 3-D volume per file")
    if is_map(raw):
        what = raw.get_intent()[0]
        raise BadFile("MAP", f"the header says: {what}, not intensities", "exclude the map")
    promised = int(raw.get_data_offset()) + math.prod(shape) * _voxel_bytes(raw)
    if promised > _LARGEST_BYTES:  # before anything of that size is asked for
        raise BadFile("TOO_LARGE", f"the header claims {promised / 2**30:.0f} GiB", AGAIN)
    return kind, promised


def is_map(header: Any) -> bool:
    """Whether a header says that the voxels are a statistic, an estimate or labels."""
    return 2 <= int(header["intent_code"]) <= 1003


def volume_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape without trailing ones: a series of one volume is a volume."""
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    return tuple(shape)


def _voxel_bytes(header: Any) -> int:
    code = int(header["datatype"])
    try:
        dtype = header.get_data_dtype()
    except KeyError:
        raise BadFile("BAD_DTYPE", f"NIfTI has no data type {code}", AGAIN) from None
    if dtype.kind not in "iuf":
        raise BadFile("BAD_DTYPE", f"voxels of type {dtype}", "convert to numbers")
    return int(dtype.itemsize)


def _start(data: bytes) -> bytes:
    try:
        return zlib.decompressobj(wbits=31).decompress(data, 540)
    except zlib.error:
        return b""


def _nifti_class(header: bytes) -> Any:
    for order in ("little", "big"):
        size = int.from_bytes(header[:4], order)
        if size == 348 and header[344:347] == b"n+1":
            return nib.Nifti1Image
        if size == 540 and header[4:7] == b"n+2":
            return nib.Nifti2Image
    return None


def _what_it_is(header: bytes) -> tuple[str, str]:
    """What lies there in place of a NIfTI file, by its first bytes, and what to do."""
    sizes = {int.from_bytes(header[:4], order) for order in ("little", "big")}
    if header[128:132] == b"DICM":
        return (
            "a DICOM file",
            "convert it: `python -m datamodules prepare` runs dcm2niix",
        )
    if header[:4] == b"\0\0\0\1":
        return "a FreeSurfer volume (.mgz)", "convert it: mri_convert IN.mgz OUT.nii.gz"
    if 348 in sizes:
        pair = header[344:347] == b"ni1"
        what = "half of a NIfTI pair (.hdr/.img)" if pair else "the header of an Analyze file"
        return what, "convert it to one .nii file"
    if header.startswith(b"PK\3\4"):
        return "a zip archive", "unpack it"
    if header.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
        return "a web page", "log in to the portal and download the file again"
    return f"starts with {header[:24]!r}", AGAIN


def check_geometry(image: Any, leniency: Leniency) -> tuple[Any, dict[str, str]]:
    """The affine (4, 4) from voxel index to RAS mm, and warnings about what the header says.

    Raises:
        BadFile: nobody knows where the voxels lie.
    """
    header, shape = image.header, volume_shape(image.shape)
    warnings = {}
    if shape != tuple(image.shape):
        warnings["ONE_VOLUME"] = f"a series of one volume: shape {image.shape}"
    if int(header["sform_code"]) == 0 and int(header["qform_code"]) == 0:
        if not leniency.assume:
            detail = "sform and qform codes are 0: nobody knows where left is"
            action = f"{_CONVERT}, or say that it is RAS: --data.assume / --assume RAS"
            raise BadFile("NO_ORIENTATION", detail, action)
        warnings["NO_ORIENTATION"] = "taken for RAS: sform and qform codes are 0"
    affine = affine_of(image)
    sizes = np.sqrt((affine[:3, :3] ** 2).sum(axis=0))
    flat = not np.isfinite(affine).all() or sizes.min() == 0
    if not flat:
        _check_units(header, sizes)
    if flat or abs(np.linalg.det(affine[:3, :3])) < 1e-6:
        raise BadFile("SINGULAR_AFFINE", f"affine {affine[:3].tolist()}", _CONVERT)
    _check_forms(header, shape)
    odd = _odd_measures(sizes, sizes * shape)
    return affine, warnings | ({"GEOMETRY": odd} if odd else {})


def _check_units(header: Any, sizes: Any) -> None:
    """Refuse voxels that are no millimetres: every reader takes them for such."""
    unit = header.get_xyzt_units()[0]
    if sizes.max() <= _LARGEST_MM and sizes.min() >= _SMALLEST_MM and unit not in _OTHER_UNITS:
        return
    voxels = " x ".join(f"{size:.3g}" for size in sizes)
    said = f", and the header says {unit}" if unit in _OTHER_UNITS else ""
    meant = (
        "micrometres"
        if unit == "micron" or sizes.min() > 100
        else "metres"
        if unit == "meter" or sizes.max() < _SMALLEST_MM
        else ""
    )
    raise BadFile(
        "BAD_UNITS",
        f"voxels of {voxels} mm{said}" + (f": these are {meant}" if meant else ""),
        f"{_CONVERT}, or bring affine and header to mm",
    )


def affine_of(image: Any) -> Any:
    """The affine (4, 4); without one RAS around the middle, where nibabel says LAS."""
    header = image.header
    if int(header["sform_code"]) or int(header["qform_code"]):
        return image.affine
    sizes = np.asarray(header.get_zooms()[:3], float)
    affine = np.diag([*sizes, 1.0])
    affine[:3, 3] = -sizes * (np.asarray(image.shape[:3]) - 1) / 2
    return affine


def _odd_measures(sizes: Any, extent: Any) -> str:
    """``what is unusual: the measures``, or nothing."""
    odd = {
        "voxels below 0.4 mm": sizes.min() < 0.4,
        "voxels above 4 mm": sizes.max() > 4.001,  # affines are stored in single precision
        "field of view below 100 mm": extent.min() < 100,
        "field of view above 450 mm": extent.max() > 450,
    }
    if not any(odd.values()):
        return ""
    voxels, view = (" x ".join(f"{size:.3g}" for size in sides) for sides in (sizes, extent))
    return f"{' and '.join(k for k in odd if odd[k])}: voxels {voxels} mm, field of view {view} mm"


def _check_forms(header: Any, shape: tuple[int, ...]) -> None:
    """Readers take the sform silently when the two disagree; one of them is wrong.

    All eight corners are compared: a rotation may leave axis codes and origin as they are.
    """
    if int(header["sform_code"]) == 0 or int(header["qform_code"]) == 0:
        return
    forms = header.get_sform(), header.get_qform()
    corners = np.array(list(itertools.product(*((0, n - 1) for n in shape))))
    places = [nib.affines.apply_affine(form, corners) for form in forms]
    apart = float(np.linalg.norm(places[0] - places[1], axis=1).max())
    if not apart <= _FORMS_APART_MM:  # NaN neither
        axes = ["".join(nib.aff2axcodes(form)) for form in forms]
        detail = f"sform {axes[0]}, qform {axes[1]}, corners up to {apart:.1f} mm apart"
        raise BadFile("FORM_CONFLICT", detail, "find out which is right, and write it to both")
