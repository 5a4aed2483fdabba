from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from datamodules import checks
from datamodules.checks import check_file, check_records
from datamodules.cli import main
from datamodules.errors import Problem, listing
from datamodules.labels import TASKS
from datamodules.survey import survey
from datamodules.synth import CohortSpec, generate

pytestmark = pytest.mark.usefixtures("undrawn")

PLACES = np.moveaxis(np.indices((20, 22, 24)), 0, -1) - [9.5, 10.5, 11.5]
NOISE = np.random.default_rng(0).integers(0, 100, (20, 22, 24))
VOLUME = (NOISE + 800 * (np.linalg.norm(PLACES, axis=-1) < 8)).astype(np.int16)
AFFINE = np.diag([8.0, 8.0, 8.0, 1.0])


def image(data: np.ndarray = VOLUME, affine: np.ndarray = AFFINE) -> nib.Nifti1Image:
    made = nib.Nifti1Image(data, affine)
    made.set_sform(affine, 1)
    made.set_qform(affine, 1)
    return made


def header_edit(**values: object) -> bytes:
    data = bytearray(image().to_bytes())
    header = nib.Nifti1Header(bytes(data[:348]), check=False)
    for name, value in values.items():
        header[name] = value
    return header.binaryblock + bytes(data[348:])


def conflicting() -> nib.Nifti1Image:
    made = image()
    made.set_sform(np.diag([-8.0, 8.0, 8.0, 1.0]), 1)
    return made


def with_nan() -> np.ndarray:
    data = VOLUME.astype(np.float32)
    data[3, 4, 5] = np.nan
    return data


BAD: dict[str, tuple[str, Callable[[], bytes]]] = {
    "empty": ("EMPTY", lambda: b""),
    "login page": ("NOT_NIFTI", lambda: b"<!DOCTYPE html>" * 50),
    "cut": ("TRUNCATED", lambda: image().to_bytes()[:9000]),
    "gzip content": ("WRONG_SUFFIX", lambda: gzip.compress(image().to_bytes())),
    "four volumes": ("NOT_3D", lambda: image(np.stack([VOLUME] * 4, -1)).to_bytes()),
    "one slice": ("NOT_3D", lambda: image(VOLUME[:, :, 0]).to_bytes()),
    "complex": ("BAD_DTYPE", lambda: image(VOLUME.astype(np.complex64)).to_bytes()),
    "no forms": ("NO_ORIENTATION", lambda: header_edit(sform_code=0, qform_code=0)),
    "flat affine": ("SINGULAR_AFFINE", lambda: header_edit(srow_x=[0, 0, 0, 0], qform_code=0)),
    "no voxel size": ("BAD_PIXDIM", lambda: header_edit(pixdim=[1, 0, 8, 8, 0, 0, 0, 0])),
    "flipped form": ("FORM_CONFLICT", lambda: conflicting().to_bytes()),
    "NaN": ("NON_FINITE", lambda: image(with_nan()).to_bytes()),
    "constant": ("CONSTANT", lambda: image(np.zeros_like(VOLUME)).to_bytes()),
    "mask": ("BINARY_LOOKS_LIKE_MASK", lambda: image((VOLUME > 400).astype(np.uint8)).to_bytes()),
    "huge claim": ("TOO_LARGE", lambda: header_edit(dim=[3, 30000, 30000, 30000, 1, 1, 1, 1])),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_file_gets_its_code_and_an_action(tmp_path, name):
    code, content = BAD[name]
    path = tmp_path / "scan.nii"
    path.write_bytes(content())
    report = check_file(path)
    assert report.code == code, report
    assert report.detail
    assert report.action


def damaged_gzip(how: str) -> bytes:
    data = bytearray(gzip.compress(image().to_bytes(), mtime=0))
    if how == "flipped bit":
        data[len(data) // 2] ^= 16
    cuts = {"cut in half": len(data) // 2, "trailer cut": len(data) - 6, "header only": 12}
    return bytes(data[: cuts.get(how, len(data))])


@pytest.mark.parametrize("how", ["cut in half", "trailer cut", "header only", "flipped bit"])
def test_damaged_gzip_is_found_by_reading_to_the_end(tmp_path, how):
    path = tmp_path / "scan.nii.gz"
    path.write_bytes(damaged_gzip(how))
    assert check_file(path).code == "CORRUPT_GZIP"


def test_plain_file_with_a_gzip_name_is_told_to_be_renamed(tmp_path):
    path = tmp_path / "scan.nii.gz"
    path.write_bytes(image().to_bytes())
    report = check_file(path)
    assert report.code == "WRONG_SUFFIX"
    assert report.action == "rename it to scan.nii"


@pytest.mark.parametrize("name", ["scan", "scan.gz", "scan.Nii.Gz", "scan.nii.bak", "scan.NII.GZ"])
@pytest.mark.parametrize("gzipped", [True, False])
def test_a_name_passes_only_where_the_loader_can_open_it(tmp_path, name, gzipped):
    path = tmp_path / name
    path.write_bytes(gzip.compress(image().to_bytes()) if gzipped else image().to_bytes())
    report = check_file(path)
    if report.code:
        path = path.rename(tmp_path / report.action.removeprefix("rename it to "))
        assert not check_file(path).code
    assert nib.load(path).get_fdata().shape == VOLUME.shape


def test_missing_file_is_reported(tmp_path):
    assert check_file(tmp_path / "scan.nii").code == "NOT_FOUND"


def big_endian() -> bytes:
    header = nib.Nifti1Header(endianness=">")
    header.set_data_dtype(np.int16)
    made = nib.Nifti1Image(VOLUME, AFFINE, header)
    made.set_sform(AFFINE, 1)
    return made.to_bytes()


@pytest.mark.parametrize(
    "content",
    [
        lambda: image().to_bytes(),
        lambda: image(VOLUME[..., None]).to_bytes(),
        big_endian,
        lambda: nib.Nifti2Image(VOLUME, AFFINE).to_bytes(),
    ],
    ids=["plain", "series of one", "big-endian", "nifti-2"],
)
def test_unusual_but_good_files_pass(tmp_path, content):
    path = tmp_path / "scan.nii"
    path.write_bytes(content())
    report = check_file(path)
    assert report.code == "", report
    assert report.shape == "20 22 24"
    assert report.axcodes == "RAS"


def records_of(root: Path):
    return survey(root, TASKS["ad_nc"], None).records


def used_path(root: Path) -> Path:
    return Path(next(record.path for record in records_of(root) if record.used))


def test_problem_names_path_subject_and_image(download, tmp_path):
    path = used_path(download)
    path.write_bytes(path.read_bytes()[:-200])
    records, problems, _ = check_records(records_of(download), tmp_path / "checks.json")
    (problem,) = problems
    assert (problem.code, problem.path) == ("CORRUPT_GZIP", str(path))
    assert problem.image_id in path.name
    assert problem.subject in path.name
    assert [r.image_id for r in records if r.problem] == [problem.image_id]


def test_second_check_reads_no_file_and_a_replaced_one_is_read(download, tmp_path, monkeypatch):
    store = tmp_path / "checks.json"
    first = check_records(records_of(download), store)
    read: list[Path] = []
    real = checks.check_file
    monkeypatch.setattr(checks, "check_file", lambda p, how: read.append(p) or real(p, how))
    assert check_records(records_of(download), store) == first
    assert not read
    path = used_path(download)
    times = path.stat()
    path.write_bytes(path.read_bytes()[::-1])  # as long and, by its time stamp, as old as before
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert check_records(records_of(download), store)[1][0].code == "NOT_NIFTI"
    assert read == [path]


def test_same_content_under_two_ids_is_an_error(download, tmp_path):
    first, second = (Path(r.path) for r in records_of(download)[:2] if r.used)
    shutil.copy(first, second)
    problems = check_records(records_of(download), tmp_path / "checks.json")[1]
    assert [problem.code for problem in problems] == ["DUPLICATE_CONTENT"] * 2


def test_damaged_store_only_costs_a_second_reading(download, tmp_path):
    store = tmp_path / "checks.json"
    first = check_records(records_of(download), store)
    store.write_text(store.read_text()[:50])
    assert check_records(records_of(download), store) == first


def test_coarse_voxels_are_a_warning(download, tmp_path):
    _, problems, warnings = check_records(records_of(download), tmp_path / "checks.json")
    assert not problems
    assert {warning.code for warning in warnings} == {"GEOMETRY"}


def test_warnings_fill_one_line_on_the_screen_and_are_all_in_the_table(
    tiny_cohort, tmp_path, capsys
):
    assert main(["check", str(tiny_cohort), "--out", str(tmp_path)]) == 0
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")]
    rows = (tmp_path / "problems.tsv").read_text().splitlines()[1:]
    assert warned[0].startswith(f"warning: {len(rows)} x GEOMETRY, voxels above 4 mm")
    assert len(warned) == 1 < len(rows)


def test_commands_do_not_overwrite_what_another_one_found(tiny_cohort, tmp_path, capsys):
    checked = tmp_path / "manifest.tsv"
    assert main(["check", str(tiny_cohort), "--out", str(tmp_path)]) == 0
    before = checked.read_bytes()
    for _ in range(2):
        assert main(["manifest", str(tiny_cohort), "--out", str(tmp_path / "scans.tsv")]) == 0
    assert main(["manifest", str(tiny_cohort), "--out", str(checked)]) == 1
    assert "OUT_EXISTS" in capsys.readouterr().err
    assert checked.read_bytes() == before
    assert main(["manifest", str(tiny_cohort), "--out", str(checked), "--force"]) == 0
    assert checked.read_bytes() != before


def test_check_replaces_its_own_report_only(tiny_cohort, tmp_path, capsys):
    (tmp_path / "problems.tsv").write_text("mine")
    assert main(["check", str(tiny_cohort), "--out", str(tmp_path)]) == 1
    assert "OUT_EXISTS" in capsys.readouterr().err
    assert (tmp_path / "problems.tsv").read_text() == "mine"
    for more in (["--force"], []):
        assert main(["check", str(tiny_cohort), "--out", str(tmp_path), *more]) == 0


def test_help_is_plain_and_shows_every_command_at_work(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    assert "`" not in text
    for command in ("synth", "check", "manifest", "split"):
        assert f"  python -m datamodules {command} " in text


def test_screen_shows_the_first_problems_of_each_kind():
    many = [Problem("EMPTY", "0 bytes", "again", f"/scan{n}") for n in range(40)]
    text = listing([*many, Problem("NO_ROW", "no row", "export")])
    assert text.count("0 bytes") == 5
    assert "EMPTY: 35 more, see problems.tsv" in text
    assert "NO_ROW: no row" in text


def test_check_command_reports_and_exits_with_one(download, tmp_path, capsys):
    out = tmp_path / "report"
    assert main(["check", str(download), "--out", str(out)]) == 0
    path = used_path(download)
    path.write_bytes(b"")
    assert main(["check", str(download), "--out", str(out)]) == 1
    printed = capsys.readouterr().out
    assert f"{path}" in printed
    assert "bad 1" in printed
    assert "EMPTY" in (out / "problems.tsv").read_text()


def test_nothing_is_written_into_the_data_folder(download, capsys):
    assert main(["check", str(download), "--out", str(download / "report")]) == 1
    assert "INSIDE_DATA" in capsys.readouterr().err
    assert not (download / "report").exists()


def saved_again(how: str, path: Path, to: Path) -> None:
    """The same picture in another file."""
    old = nib.load(path)
    values = np.asarray(old.dataobj)
    made = {
        "float32": lambda: nib.Nifti1Image(values.astype(np.float32), old.affine),
        "scaled": lambda: nib.Nifti1Image(values.astype(np.float64) * 0.37 + 2, old.affine),
        "uint8": lambda: nib.Nifti1Image(
            (values * (255 / values.max())).astype(np.uint8), old.affine
        ),
        "turned": lambda: old.as_reoriented(np.array([[1, -1], [0, 1], [2, -1]])),
        "compressed": lambda: old,
    }[how]()
    made.set_data_dtype(np.int16 if how == "scaled" else made.get_data_dtype())
    data = made.to_bytes()
    to.write_bytes(gzip.compress(data, compresslevel=1))


@pytest.mark.parametrize("how", ["float32", "scaled", "uint8", "turned", "compressed"])
def test_same_picture_saved_again_under_another_id_is_found(download, tmp_path, how):
    first, second = [Path(r.path) for r in records_of(download) if r.used][::9][:2]
    saved_again(how, first, second)
    assert first.read_bytes() != second.read_bytes()
    problems = check_records(records_of(download), tmp_path / "checks.json")[1]
    assert [problem.code for problem in problems] == ["DUPLICATE_CONTENT"] * 2
    assert {problem.path for problem in problems} == {str(first), str(second)}


def test_visits_and_people_are_no_copies_of_each_other(tmp_path):
    for level in ("L0", "L2"):
        spec = CohortSpec((("AD", 2), ("NC", 2)), 8.0, level, visits=("bl", "m12"))
        generate(tmp_path / level, spec)
        records = survey(tmp_path / level, TASKS["ad_nc"], tmp_path / f"{level}.json")
        assert not records.problems


def test_stopped_check_goes_on_where_it_was(download, tmp_path, monkeypatch):
    store, read = tmp_path / "checks.json", []
    real = checks.check_file

    def stop(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_records(records_of(download), store, workers=1, progress=stop)
    monkeypatch.setattr(checks, "check_file", lambda p, how: read.append(p) or real(p, how))
    everything = check_records(records_of(download), store, workers=1)
    assert len(read) == sum(r.used for r in records_of(download)) - 3
    assert everything == check_records(records_of(download), tmp_path / "fresh.json")
