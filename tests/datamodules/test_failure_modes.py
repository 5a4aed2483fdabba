"""Whatever happens to a download: what is wrong, where, and what to do next are in the message.

Each row damages a copy of a sound cohort in one way, runs the check as ``fit`` does, and looks at
the data again afterwards: nothing is ever written there.
"""

from __future__ import annotations

import gzip
import re
import resource
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from test_adni_datamodule import make, prepared, state_of

from datamodules.cache import ScanDataset
from datamodules.checks import check_file
from datamodules.cli import main
from datamodules.errors import DataError, FolderError, ProblemsError
from datamodules.labels import TASKS
from datamodules.records import count_line
from datamodules.splits import SPLITS
from datamodules.survey import survey
from datamodules.synth import CohortSpec, generate
from datamodules.voxels import missing_part

pytestmark = pytest.mark.usefixtures("undrawn")

Damage = Callable[[Path, Path], object]  # gets the scan and the folder


def volume(path: Path) -> nib.Nifti1Image:
    return nib.Nifti1Image.from_bytes(gzip.decompress(path.read_bytes()))


def store(path: Path, image: nib.Nifti1Image) -> None:
    path.write_bytes(gzip.compress(image.to_bytes()))


def replaced(make_values: Callable[[np.ndarray], np.ndarray]) -> Damage:
    def damage(scan: Path, root: Path) -> None:
        old = volume(scan)
        made = nib.Nifti1Image(make_values(np.asarray(old.dataobj)), old.affine)
        made.set_qform(old.affine, 1)
        store(scan, made)

    return damage


def header(**values: object) -> Damage:
    def damage(scan: Path, root: Path) -> None:
        data = gzip.decompress(scan.read_bytes())
        head = nib.Nifti1Header(data[:348], check=False)
        for name, value in values.items():
            head[name] = value
        scan.write_bytes(gzip.compress(head.binaryblock + data[348:]))

    return damage


def written(change: Callable[[bytes], bytes]) -> Damage:
    return lambda scan, root: scan.write_bytes(change(scan.read_bytes()))


def flipped_bit(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 16]) + data[len(data) // 2 + 1 :]


def with_value(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(values: np.ndarray) -> np.ndarray:
        values = values.astype(np.float32)
        values[3, 4, 5] = value
        return values

    return change


def coloured(values: np.ndarray) -> np.ndarray:
    return np.zeros(values.shape, [("R", "u1"), ("G", "u1"), ("B", "u1")])


def bomb(scan: Path, root: Path) -> None:
    """Half a gigabyte of zeros behind the volume, in two megabytes: one part of it 30 times."""
    content, zeros = gzip.decompress(scan.read_bytes()), bytes(1 << 24)
    packer = zlib.compressobj(1, wbits=-15)
    first = packer.compress(content) + packer.flush(zlib.Z_FULL_FLUSH)
    again = packer.compress(zeros) + packer.flush(zlib.Z_FULL_FLUSH)
    check = zlib.crc32(content)
    for _ in range(30):
        check = zlib.crc32(zeros, check)
    end = check.to_bytes(4, "little") + (len(content) + 30 * len(zeros)).to_bytes(4, "little")
    header = b"\x1f\x8b\x08" + bytes(6) + b"\xff"
    scan.write_bytes(header + first + 30 * again + packer.flush() + end)


def half_of(axis: int, upper: bool) -> Callable[[np.ndarray], np.ndarray]:
    def change(values: np.ndarray) -> np.ndarray:
        values, half = values.copy(), values.shape[axis] // 2
        np.moveaxis(values, axis, 0)[slice(half, None) if upper else slice(half)] = 0
        return values

    return change


def bright_columns(values: np.ndarray) -> np.ndarray:
    values = values.astype(np.float32)
    values[8:10, 8:10] = 40000  # more than one voxel in a thousand
    return values


def band(values: np.ndarray) -> np.ndarray:
    values = values.copy()
    values[:, :, 9:11] = 0
    return values


def broken_off(scan: Path, root: Path) -> None:
    """A copy that got its full length first and stopped at 60 %: the tail is zero."""
    data = gzip.decompress(scan.read_bytes())
    whole = data[: int(0.6 * len(data))].ljust(len(data), b"\0")
    scan.with_name(scan.name.removesuffix(".gz")).write_bytes(whole)
    scan.unlink()


def rotated_form(scan: Path, root: Path) -> None:
    """Ten degrees about the first voxel: axis codes and origin stay as they are."""
    image, turn = volume(scan), np.eye(4)
    c, s = np.cos(np.deg2rad(10)), np.sin(np.deg2rad(10))
    turn[:2, :2] = [[c, -s], [s, c]]
    affine = image.affine @ turn
    image.set_sform(affine, 1)
    store(scan, image)


def dicom_inside(scan: Path, root: Path) -> None:
    scan.write_bytes(gzip.compress(bytes(128) + b"DICM" + bytes(900)))


def freesurfer_inside(scan: Path, root: Path) -> None:
    values = np.asarray(volume(scan).dataobj).astype(np.float32)
    scan.write_bytes(gzip.compress(nib.MGHImage(values, np.eye(4)).to_bytes()))


def conflict(scan: Path, root: Path) -> None:
    image = volume(scan)
    image.set_sform(np.diag([-1, 1, 1, 1]) @ image.affine, 1)
    store(scan, image)


def unpacked(scan: Path, root: Path) -> None:
    scan.with_name(scan.name.removesuffix(".gz")).write_bytes(
        gzip.decompress(scan.read_bytes())[:9000]
    )
    scan.unlink()


def gzip_named_nii(scan: Path, root: Path) -> None:
    scan.rename(scan.with_name(scan.name.removesuffix(".gz")))


def other_scan(scan: Path, root: Path) -> Path:
    names = sorted((root / "ADNI").rglob("*_Br_*.nii.gz"))
    return next(p for p in names if p.parents[3] != scan.parents[3] and "Mask" not in p.name)


def table_edit(change: Callable[[str, str], str]) -> Damage:
    """The change gets the table and the image ID of the scan; no ADNIMERGE, so groups count."""

    def damage(scan: Path, root: Path) -> None:
        next(root.glob("ADNIMERGE*")).unlink()
        table = next(root.glob("SYNTHETIC*"))
        table.write_bytes(change(table.read_text(), scan.parent.name).encode())

    return damage


def regrouped(word: str) -> Callable[[str, str], str]:
    def change(text: str, image: str) -> str:
        return re.sub(rf'("{image}","[^"]+",)"[^"]*"', rf'\1"{word}"', text)

    return change


def other_class(text: str, image: str) -> str:
    row = next(line for line in text.splitlines() if f'"{image}"' in line)
    return text.replace(
        row, row.replace('"AD"', '"X"').replace('"CN"', '"AD"').replace('"X"', '"CN"')
    )


SCANS: dict[str, tuple[str, Damage]] = {
    "cut in half": ("CORRUPT_GZIP", written(lambda data: data[: len(data) // 2])),
    "trailer cut": ("CORRUPT_GZIP", written(lambda data: data[:-6])),
    "one bit flipped": ("CORRUPT_GZIP", written(flipped_bit)),
    "unpacked and cut": ("TRUNCATED", unpacked),
    "empty": ("EMPTY", written(lambda data: b"")),
    "login page": ("NOT_NIFTI", written(lambda data: b"<!DOCTYPE html><html>")),
    "plain, named gz": ("WRONG_SUFFIX", written(gzip.decompress)),
    "gzipped, named nii": ("WRONG_SUFFIX", gzip_named_nii),
    "dead link": ("NOT_FOUND", lambda scan, root: (scan.unlink(), scan.symlink_to("/nowhere"))),
    "four volumes": ("NOT_3D", replaced(lambda values: np.stack([values] * 4, -1))),
    "one slice": ("NOT_3D", replaced(lambda values: values[:, :, 0])),
    "NaN": ("NON_FINITE", replaced(with_value(np.nan))),
    "infinity": ("NON_FINITE", replaced(with_value(np.inf))),
    "constant": ("CONSTANT", replaced(np.ones_like)),
    "all zero": ("CONSTANT", replaced(np.zeros_like)),
    "a mask": ("BINARY_LOOKS_LIKE_MASK", replaced(lambda v: (v > 300).astype(np.uint8))),
    "RGB": ("BAD_DTYPE", replaced(coloured)),
    "complex": ("BAD_DTYPE", replaced(lambda values: values.astype(np.complex64))),
    "no affine": ("NO_ORIENTATION", header(sform_code=0, qform_code=0)),
    "zero affine rows": ("SINGULAR_AFFINE", header(srow_x=[0, 0, 0, 0], qform_code=0)),
    "no voxel size": ("BAD_PIXDIM", header(pixdim=[1, 0, 8, 8, 0, 0, 0, 0])),
    "sform against qform": ("FORM_CONFLICT", conflict),
    "one voxel of 1e30": ("OUT_OF_RANGE", replaced(with_value(1e30))),
    "one voxel of 100000": ("OUTLIER", replaced(with_value(1e5))),
    "beyond float32": ("OUT_OF_RANGE", replaced(lambda v: v.astype(float) * 1e300)),
    "bright columns": ("OVERFLOW", replaced(bright_columns)),
    "nearly constant": (
        "NEARLY_CONSTANT",
        replaced(lambda v: (1000 + 0.01 * v / v.max()).astype(np.float32)),
    ),
    "unknown data type": ("BAD_DTYPE", header(datatype=9999)),
    "NaN in the header": ("UNREADABLE", header(vox_offset=np.nan)),
    "gzip bomb": ("OVERSIZED", bomb),
    "turned about the origin": ("FORM_CONFLICT", rotated_form),
    "upper half zero": ("INCOMPLETE", replaced(half_of(2, True))),
    "lower half zero": ("INCOMPLETE", replaced(half_of(2, False))),
    "left half zero": ("INCOMPLETE", replaced(half_of(0, False))),
    "tail zero": ("INCOMPLETE", broken_off),
    "band of zeros": ("INCOMPLETE", replaced(band)),
    "DICOM": ("NOT_NIFTI", dicom_inside),
    "mgz": ("NOT_NIFTI", freesurfer_inside),
    "huge claim": ("TOO_LARGE", header(dim=[3, 30000, 30000, 30000, 1, 1, 1, 1])),
    "unknown group": ("UNKNOWN_LABEL", table_edit(regrouped("Patient"))),
    "group is a code": ("UNKNOWN_LABEL", table_edit(regrouped("3"))),
    "missing group": ("UNKNOWN_LABEL", table_edit(regrouped(""))),
    "two classes": ("LABEL_CONFLICT", table_edit(other_class)),
    "ID twice": (
        "DUPLICATE_ID",
        lambda scan, root: shutil.copy(scan, scan.with_name(f"again_{scan.name}")),
    ),
    "content twice": (
        "DUPLICATE_CONTENT",
        lambda scan, root: shutil.copy(scan, other_scan(scan, root)),
    ),
    "no row": (
        "NO_ROW",
        table_edit(lambda text, image: re.sub(rf'"{image}".*\n', "", text)),
    ),
    "no scan": ("NO_SCAN", lambda scan, root: scan.unlink()),
    "wrong folder": (
        "SUBJECT_MISMATCH",
        lambda scan, root: shutil.move(scan, other_scan(scan, root).parents[3] / scan.name),
    ),
    "no image ID": (
        "NO_IMAGE_ID",
        lambda scan, root: scan.rename(scan.parents[1] / "scan.nii.gz"),
    ),
}


def first_scan(root: Path) -> Path:
    """Of a subject with two visits in a class of the task."""
    table = next(root.glob("SYNTHETIC*")).read_text()
    for folder in sorted((root / "ADNI").iterdir()):
        found = sorted(path for path in folder.rglob("*.nii.gz") if "Mask" not in path.name)
        group = re.search(rf'"{folder.name}","(\w+)"', table)
        if len(found) == 2 and group and group[1] in ("AD", "CN"):
            return found[0]
    raise AssertionError("no such subject")


@pytest.mark.parametrize("name", SCANS)
def test_damage_is_named_with_its_place_and_the_next_step(download, tmp_path, name):
    code, damage = SCANS[name]
    scan = first_scan(download)
    image, subject = scan.parent.name, scan.parents[3].name
    damage(scan, download)
    before = state_of(download)
    with pytest.raises(ProblemsError) as caught:
        make(download, tmp_path / "cache").prepare_data()
    assert state_of(download) == before
    problem = next(p for p in caught.value.problems if p.code == code)
    text = str(caught.value)
    assert f"{code} " in text
    assert str(download) in problem.path
    assert f"-> {problem.action}" in text
    assert len(problem.action) > 8
    if code not in ("NO_IMAGE_ID", "SUBJECT_MISMATCH", "DUPLICATE_CONTENT"):
        assert problem.image_id == image
        assert problem.subject == subject
    assert "--data.on_bad skip" in text
    assert code in Path(caught.value.report).read_text()


@pytest.mark.parametrize("name", ["one bit flipped", "NaN", "no row", "content twice", "no scan"])
def test_going_on_without_bad_scans_counts_them_all(download, tmp_path, name):
    found = len(list((download / "ADNI").rglob("*.nii*")))
    code, damage = SCANS[name]
    damage(first_scan(download), download)
    skipping = prepared(download, tmp_path / "cache", on_bad="skip")
    gone = name == "no scan"
    assert len(skipping.records) == found - gone
    line = re.fullmatch(
        r"found (\d+) = used (\d+) \+ excluded (\d+) \+ bad (\d+)", count_line(skipping.records)
    )
    assert line is not None
    total, used, excluded, bad = map(int, line.groups())
    assert total == used + excluded + bad
    assert bad == {"content twice": 2, "no scan": 0}.get(name, 1)
    assert code in (skipping.state_dir / "problems.tsv").read_text()
    assert used == sum(bool(record.split) for record in skipping.records)


@pytest.mark.conformance
def test_six_damaged_scans_of_twelve_are_all_named(tmp_path):
    root = tmp_path / "twelve"
    generate(root, CohortSpec((("AD", 6), ("NC", 6)), resolution_mm=8.0))
    scans = sorted(p for p in (root / "ADNI").rglob("*.nii.gz") if "Mask" not in p.name)
    assert len(scans) == 12
    names = (
        "one voxel of 1e30",
        "unknown data type",
        "gzip bomb",
        "turned about the origin",
        "upper half zero",
        "tail zero",
    )
    expected = {}
    for scan, name in zip(scans[::2], names):
        code, damage = SCANS[name]
        expected[scan.parent.name] = code
        damage(scan, root)
    found = survey(root, TASKS["ad_nc"], tmp_path / "checks.json")
    assert {problem.image_id: problem.code for problem in found.problems} == expected
    assert count_line(found.records).endswith("bad 6")


def test_gzip_bomb_is_not_unpacked(download):
    scan = first_scan(download)
    bomb(scan, download)
    assert len(scan.read_bytes()) < 4e6
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert check_file(scan).code == "OVERSIZED"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB, of 500 MB


@pytest.mark.parametrize(("name", "what"), [("DICOM", "dcm2niix"), ("mgz", "mri_convert")])
def test_what_lies_in_place_of_a_scan_is_said(download, name, what):
    scan = first_scan(download)
    SCANS[name][1](scan, download)
    report = check_file(scan)
    assert name in report.detail
    assert what in report.action


@pytest.mark.parametrize("how", ["upper half zero", "left half zero", "tail zero"])
def test_a_missing_part_is_found_in_raw_heads_too(raw_heads, tmp_path, how):
    shutil.copytree(raw_heads / "ADNI", tmp_path / "raw")
    scans = [*(tmp_path / "raw").rglob("*.nii.gz")]
    assert scans
    for scan in scans:
        assert check_file(scan).code == ""
        SCANS[how][1](scan, tmp_path)
        left = scan if scan.exists() else scan.with_suffix("")
        assert check_file(left).code == "INCOMPLETE"


def test_a_neck_that_is_cut_and_padded_is_no_missing_part():
    rng = np.random.default_rng(0)
    x, y, z = np.meshgrid(*(np.arange(60) * 4.0 - 118 for _ in range(3)), indexing="ij")
    head = (x / 75) ** 2 + (y / 95) ** 2 + ((z - 30) / 80) ** 2 < 1
    neck = (np.hypot(x, y) < 70) & (z < 0)
    values = np.where(head | neck, 900.0, 0) + 20 * rng.random(head.shape)
    values[..., :10] = 0
    assert missing_part(values, np.full(3, 4.0), stripped=False) == ""
    values[..., :38] = 0
    assert "breaks off at the bottom" in missing_part(values, np.full(3, 4.0), stripped=False)


def test_source_of_the_labels_is_always_said_and_a_research_group_is_a_warning(download, capsys):
    out = ["--out", str(download.parent / "report")]
    assert main(["manifest", str(download), "--out", str(download.parent / "scans.tsv")]) == 0
    printed = capsys.readouterr().out
    assert "labels: ADNIMERGE_31Jan2026.csv:DX, at the visit" in printed
    assert "RESEARCH_GROUP" not in printed
    next(download.glob("ADNIMERGE*")).write_text("<html>log in</html>")
    assert main(["check", str(download), *out]) == 1
    assert "BAD_TABLE: a web page" in capsys.readouterr().err
    next(download.glob("ADNIMERGE*")).unlink()
    assert main(["check", str(download), *out]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"labels: SYNTHETIC\w+\.csv:Group", printed)
    assert re.search(r"warning: \d+ x RESEARCH_GROUP, the label is the research group", printed)
    assert "RESEARCH_GROUP" in (download.parent / "report" / "problems.tsv").read_text()


@pytest.mark.parametrize(
    ("names", "said", "step"),
    [
        ([f"ADNI_x_{n}_S1_I{{}}.dcm" for n in range(3)], "3 x .dcm instead", "dcm2niix"),
        (["T1.mgz"], "1 x .mgz instead", "mri_convert"),
        ([], "without a file", "download the rest"),
    ],
)
def test_a_row_without_a_scan_says_what_lies_there(download, names, said, step):
    scan = first_scan(download)
    scan.unlink()
    for name in names:
        (scan.parent / name.format(scan.parent.name[1:])).write_bytes(b"x")
    (problem,) = survey(download, TASKS["ad_nc"], None).problems
    assert problem.code == "NO_SCAN"
    assert said in problem.detail
    assert step in problem.action


def test_a_folder_of_freesurfer_volumes_is_told_to_convert_them(tmp_path, capsys):
    (tmp_path / "999_S_0001").mkdir()
    (tmp_path / "999_S_0001" / "T1.mgz").touch()
    assert main(["check", str(tmp_path), "--out", str(tmp_path.parent / "out")]) == 1
    assert "mri_convert" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "manifest", "split", "synth"])
def test_a_place_that_cannot_be_written_is_a_message_and_no_traceback(
    tiny_cohort, tmp_path, capsys, command
):
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "out"
    small = ["--subjects", "AD=1", "--resolution", "10", "--workers", "1"]
    arguments = [str(place), *small] if command == "synth" else [str(tiny_cohort), "--out"]
    more = ["--val", "0.2", "--test", "0.2"] if command == "split" else []
    where = [] if command == "synth" else [str(place)]
    assert main([command, *arguments, *where, *more]) == 1
    error = capsys.readouterr().err
    assert re.search("NOT_WRITABLE: cannot be written: (Not a directory|File exists)", error)
    assert str(place) in error
    with pytest.raises(FolderError, match=r"(?s)NOT_WRITABLE.*file.*--data\.cache_dir"):
        make(tiny_cohort, place).prepare_data()
    with pytest.raises(FolderError, match="NOT_WRITABLE"):
        ScanDataset([], [], cache_dir=place)


def test_an_option_that_is_cut_short_is_refused(tiny_cohort, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["check", str(tiny_cohort), "--horiz", "24"])
    assert "unrecognized arguments: --horiz" in capsys.readouterr().err


TABLES: dict[str, tuple[str, Callable[[str], bytes]]] = {
    "empty": ("BAD_TABLE", lambda text: b""),
    "header only": ("BAD_TABLE", lambda text: text.splitlines()[0].encode()),
    "web page": ("BAD_TABLE", lambda text: b"<html>please log in</html>"),
    "NUL bytes": ("BAD_TABLE", lambda text: text.encode() + b"\0\0"),
    "one value too many": ("BAD_TABLE", lambda text: (text + '"1"' + ',"x"' * 13 + "\n").encode()),
    "column twice": ("BAD_TABLE", lambda text: text.replace('"Sex"', '"Group"', 1).encode()),
    "no such column": ("BAD_TABLE", lambda text: text.replace('"Subject"', '"Who"', 1).encode()),
    "two kinds of dates": (
        "BAD_DATE",
        lambda text: re.sub(
            r'"(\d+)/(\d+)/(20\d\d)","NiFTI"', r'"\3-\1-\2","NiFTI"', text, count=1
        ).encode(),
    ),
    "one image, two subjects": (
        "DUPLICATE_ID",
        lambda text: (
            text + text.splitlines()[1].replace('"999_S_0001"', '"999_S_0099"') + "\n"
        ).encode(),
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_table_that_is_not_understood_is_named_with_the_next_step(download, tmp_path, table, name):
    code, change = TABLES[name]
    table.write_bytes(change(table.read_text()))
    before = state_of(download)
    with pytest.raises(DataError) as caught:
        make(download, tmp_path / "cache", collection_csv=table).prepare_data()
    assert caught.value.code == code
    assert str(table) in str(caught.value)
    assert "next:" in str(caught.value)
    assert state_of(download) == before


@pytest.mark.parametrize("encoding", ["utf-16", "cp1252"])
def test_unusual_encoding_is_reported(download, tmp_path, table, encoding):
    text = table.read_text().replace(
        "GradWarp", "GradWarp\u2013" if encoding == "cp1252" else "GradWarp"
    )
    table.write_bytes(text.encode(encoding))
    name = {"utf-16": "UTF-16", "cp1252": "Windows-1252"}[encoding]
    assert (
        f"note: {table.name}: read with {name}" in survey(download, TASKS["ad_nc"], None).summary()
    )


def test_series_of_one_volume_is_used_and_noted(download, tmp_path):
    replaced(lambda values: values[..., None])(first_scan(download), download)
    module = prepared(download, tmp_path / "cache")
    assert "ONE_VOLUME" in (module.state_dir / "problems.tsv").read_text()


@pytest.mark.parametrize(
    ("name", "option", "code"),
    [("NaN", {"nan": "zero"}, "NON_FINITE"), ("no affine", {"assume": "RAS"}, "NO_ORIENTATION")],
)
def test_what_may_be_repaired_is_repaired_and_counted(download, tmp_path, name, option, code):
    sound = prepared(download, tmp_path / "cache", augment=False)
    good = {item["image_id"]: item["image"] for part in SPLITS for item in sound.dataset(part)}
    scan = first_scan(download)
    SCANS[name][1](scan, download)
    module = prepared(download, tmp_path / "cache", augment=False, **option)
    assert f"warning\t{code}\ttaken for" in (module.state_dir / "problems.tsv").read_text()
    for item in (item for part in SPLITS for item in module.dataset(part)):
        assert item["image"].isfinite().all()
        # the damage is one voxel, or an orientation that was RAS all the same
        assert (item["image"] - good[item["image_id"]]).abs().mean() < 0.01


def test_subject_spelled_in_two_ways_is_one_subject(download, tmp_path):
    before = prepared(download, tmp_path / "cache").records
    table = next(download.glob("SYNTHETIC*"))
    text = re.sub(r'"(\d{3})_S_(\d{4,5})"', r'"sub-ADNI\1S\2"', table.read_text())
    table.write_text(text)
    after = prepared(download, tmp_path / "cache").records
    assert [(r.subject, r.split) for r in after] == [(r.subject, r.split) for r in before]


def test_brain_that_the_crop_cuts_off_is_a_warning(download, tmp_path):
    for shape, cut in (((24, 28, 24), False), ((14, 28, 24), True)):
        made = prepared(download, tmp_path / "cache", spatial_shape=shape)
        assert ("brain cut off" in (made.state_dir / "problems.tsv").read_text()) is cut
    sides = [float(side) for side in made.scans("train")[0].reach.split()]
    assert all(100 < side < 200 for side in sides)  # of a template brain of 140 x 180 x 150 mm
