"""A cohort as AIBL, OASIS-1 and OASIS-3 give theirs away, and as a hospital's DICOM folders.

People have numbers that these studies do not have: 999001 and on in AIBL, OAS1_9001, OAS39001.
"""

# mypy: allow-untyped-calls
# (most of nibabel carries no annotations)
from __future__ import annotations

import io
import json
import locale
from collections.abc import Sequence
from pathlib import Path

import nibabel as nib
import numpy as np

from ..atomic import write_atomically
from .clinical import cdr_sb, mmse, people, site
from .cohort import MAKER, CohortSpec, ScanPlan, Subject
from .files import FileForm, nifti_bytes
from .grids import Array

Paths = dict[int, str]
_CDR = {"NC": 0, "MCI": 0.5, "AD": 1}
_WORDS = {
    "NC": ("Cognitively normal", "No dementia"),
    "MCI": ("0.5 in memory only", "uncertain dementia"),
    "AD": ("AD Dementia", "AD dem w/depresss- not contribut", "DAT"),
}


_RPT = {"t1": "", "repeat": " RPT"}


def _csv(header: str, rows: Sequence[Sequence[object]]) -> bytes:
    return "\n".join([header, *(",".join(map(str, row)) for row in rows), ""]).encode()


def aibl_number(subject: Subject) -> int:
    """The number of a person in AIBL."""
    return 999_000 + subject.number


def aibl_path(plan: ScanPlan, spec: CohortSpec, suffix: str) -> Path:
    """Where the portal's archive of AIBL would put this scan."""
    series = "MPRAGE_ADNI_confirmed" + "_RPT" * (plan.kind == "repeat")
    number, day = aibl_number(plan.subject), f"{plan.acquired:%Y-%m-%d_%H_%M_%S}.0"
    file = f"AIBL_{number}_MR_{series}__br_raw_{plan.acquired:%Y%m%d%H%M%S}_1_S{plan.series_id}"
    name = f"{file}_I{plan.image_id}{suffix}"
    return Path("AIBL", str(number), series, day, f"I{plan.image_id}", name)


def aibl_tables(spec: CohortSpec, plans: Sequence[ScanPlan], paths: Paths) -> dict[str, bytes]:
    """The collection's table, and the study data in a folder of their own."""
    images = [
        (
            *(f"I{plan.image_id}", aibl_number(plan.subject), "", plan.subject.sex, int(plan.age)),
            *(1 + plan.months // 18, "MRI", f"MPRAGE ADNI confirmed{_RPT[plan.kind]}"),
            *("Original", f"{plan.acquired:%m/%d/%Y}", "NiFTI"),
        )
        for plan in plans
    ]
    header = "Image Data ID,Subject,Group,Sex,Age,Visit,Modality,Description,Type,Acq Date,Format"
    tables = {"AIBL_1_31_2026.csv": _csv(header, images)}
    persons = people(plans)
    key = {who: (aibl_number(who), site(who)) for who in persons}
    visits = [
        (who, (*key[who], f"m{months:02d}" if months else "bl"), months, dx)
        for who in persons
        for months, dx in who.course.visits
    ]
    study: dict[str, tuple[str, Sequence[Sequence[object]]]] = {
        "pdxconv": ("DXCURREN", [(*k, 1 + list(_CDR).index(dx)) for _, k, _, dx in visits]),
        "mmse": (
            "EXAMDATE,MMSCORE",
            [(*k, f"{s.day(m):%m/%d/%Y}", round(mmse(s, m))) for s, k, m, _ in visits],
        ),
    }
    for name, (columns, rows) in study.items():
        path = f"AIBL_study_data/aibl_{name}_01-Jun-2018.csv"
        tables[path] = _csv(f"RID,SITEID,VISCODE,{columns}", rows)
    return tables


def oasis1_name(subject: Subject) -> str:
    """The name of a person in OASIS-1."""
    return f"OAS1_{9000 + subject.number}"


def oasis1_path(plan: ScanPlan, spec: CohortSpec, suffix: str) -> Path:
    """Where a disc of OASIS-1 has the average of a session."""
    name = f"{oasis1_name(plan.subject)}_MR1"
    file = f"{name}_mpr_n4_anon_sbj_111.img"
    return Path("disc1", name, "PROCESSED", "MPRAGE", "SUBJ_111", file)


def write_analyze(
    folder: Path, scan: Path, volume: Array, form: FileForm, plan: ScanPlan
) -> dict[str, int]:
    """A pair of ``.hdr`` and ``.img``, a series of one volume that knows no orientation."""
    nifti = nib.Nifti1Image.from_bytes(nifti_bytes(volume, form, "int16"))
    image = nib.AnalyzeImage(np.asarray(nifti.dataobj)[..., None], None)
    image.header.set_zooms((*nifti.header.get_zooms(), 0))
    written = {"image": io.BytesIO(), "header": io.BytesIO()}
    image.to_file_map(image.make_file_map(written))
    sizes = {}
    for kind, path in (("image", scan), ("header", scan.with_suffix(".hdr"))):
        data = written[kind].getvalue()
        write_atomically(folder / path, data)
        sizes[path.as_posix()] = len(data)
    return sizes


def oasis1_tables(spec: CohortSpec, plans: Sequence[ScanPlan], paths: Paths) -> dict[str, bytes]:
    """The study's only table; a seventh of the people was not rated."""
    rows = []
    for plan in plans:
        who, dx = plan.subject, plan.subject.course.visits[0][1]
        rated = (round(mmse(who, 0)), _CDR[dx]) if who.number % 7 else ("", "")
        rows.append((f"{oasis1_name(who)}_MR1", who.sex, "R", int(plan.age), "", "", *rated, "N/A"))
    return {"oasis_cross-sectional.csv": _csv("ID,M/F,Hand,Age,Educ,SES,MMSE,CDR,Delay", rows)}


def oasis3_name(subject: Subject) -> str:
    """The name of a person in OASIS-3."""
    return f"OAS{39_000 + subject.number}"


def _days(subject: Subject, months: int, *, scan: bool = False) -> str:
    """Days from entry; scans are made one to three months after the visit."""
    days = (subject.day(months) - subject.day(0)).days + scan * (30 + subject.number * 13 % 60)
    return f"d{days:04d}"


def oasis3_path(plan: ScanPlan, spec: CohortSpec, suffix: str) -> Path:
    """Where the study's download script puts this scan."""
    who, day = oasis3_name(plan.subject), _days(plan.subject, plan.months, scan=True)
    run = 2 if plan.kind == "repeat" else 1
    name = f"sub-{who}_ses-{day}_run-{run:02d}_T1w.nii.gz"
    return Path(f"{who}_MR_{day}", f"anat{run + 1}", name)


def oasis3_tables(spec: CohortSpec, plans: Sequence[ScanPlan], paths: Paths) -> dict[str, bytes]:
    """The forms B4 and D1, the demographic table, and a JSON file beside each scan."""
    b4, d1, persons = [], [], []
    for who in people(plans):
        name, genes = oasis3_name(who), ("33", "34", "44")[who.apoe4]
        persons.append((name, f"{who.age:.2f}", 1 + (who.sex == "F"), genes))
        for months, dx in who.course.visits:
            day, words = _days(who, months), _WORDS[dx]
            visit = (name, f"{name}_UDSb4_{day}", day[1:], f"{who.age_at(months):.2f}")
            scores = (round(mmse(who, months)), cdr_sb(who, months), _CDR[dx])
            b4.append((*visit, *scores, words[who.number % len(words)]))
            flags = [int(dx == one) for one in ("NC", "AD", "MCI", "AD")]
            d1.append((*visit, *flags, 1 if dx == "AD" else "", 0))
    key = "OASISID,OASIS_session_label,days_to_visit,age at visit"
    flags_of_d1 = "NORMCOG,DEMENTED,MCIAMEM,PROBAD,PROBADIF,IMPNOMCI"
    forms = {
        "UDSb4-Form_B4/{}/OASIS3_UDSb4_cdr": _csv(f"{key},MMSE,CDRSUM,CDRTOT,dx1", b4),
        "UDSd1-Form_D1/{}/OASIS3_UDSd1_diagnoses": _csv(f"{key},{flags_of_d1}", d1),
        "demo-demographics/{}/OASIS3_demographics": _csv("OASISID,AgeatEntry,GENDER,APOE", persons),
    }
    where = "OASIS3_data_files/scans/"
    tables = {f"{where}{k.format('resources/csv/files')}.csv": v for k, v in forms.items()}
    for plan in plans:
        header = {"MagneticFieldStrength": plan.subject.field_strength, "Manufacturer": MAKER}
        header["ManufacturersModelName"] = plan.subject.model
        beside = paths[plan.image_id].removesuffix(".nii.gz") + ".json"
        tables[beside] = json.dumps(header).encode()
    return tables


def patient(subject: Subject) -> str:
    """The patient ID of a person in a hospital."""
    return f"999-{subject.number:04d}"


def dicom_path(plan: ScanPlan, spec: CohortSpec, suffix: str) -> Path:
    """The folder of a series, as an archive of images exports it."""
    series = "003" if plan.kind == "repeat" else "002"
    day = f"{plan.acquired:%Y%m%d}"
    return Path("DICOM", patient(plan.subject), day, f"{series}_t1_mprage_sag")


def write_dicom(
    folder: Path, scan: Path, volume: Array, form: FileForm, plan: ScanPlan
) -> dict[str, int]:
    """A series of slices, and of the first one of a visit a localizer of a few."""
    image = nib.Nifti1Image.from_bytes(nifti_bytes(volume, form, "int16"))
    affine = np.diag([-1.0, -1.0, 1.0, 1.0]) @ image.affine  # DICOM counts to left and back
    values, sizes = np.asarray(image.dataobj), np.linalg.norm(affine[:3, :3], axis=0)
    turn = affine[:3, :3] / sizes
    if np.cross(turn[:, 0], turn[:, 1]) @ turn[:, 2] < 0:  # slices are counted along their normal
        affine[:3, 3] += affine[:3, 2] * (values.shape[2] - 1)
        values, turn[:, 2] = values[:, :, ::-1], -turn[:, 2]
    day, time = f"{plan.acquired:%Y%m%d}", f"{plan.acquired:%H%M%S}"
    said = {
        "0008|0016": "1.2.840.10008.5.1.4.1.1.4",
        "0008|0008": "ORIGINAL\\PRIMARY\\M\\NORM",
        "0008|0060": "MR",
        **{f"0008|{tag}": day for tag in ("0020", "0022")},
        **{f"0008|{tag}": time for tag in ("0030", "0031", "0032")},
        "0008|0070": MAKER,
        "0008|1090": plan.subject.model,
        "0010|0010": "SYNTHETIC^PERSON",
        "0010|0020": patient(plan.subject),
        "0010|0030": f"{plan.acquired.year - int(plan.age)}0101",
        "0010|0040": plan.subject.sex,
        "0018|0050": f"{sizes[2]:.4f}",
        "0018|0087": f"{plan.subject.field_strength:g}",
        "0020|000d": f"1.2.826.0.1.3680043.2.1125.999.{plan.image_id}",
        "0020|0037": "\\".join(f"{x:.6f}" for x in turn[:, :2].T.ravel()),
    }
    places = {scan: 1}
    if scan.name[:3] == "002":
        places[scan.with_name("001_localizer")] = 20
    written = {}
    for place, step in places.items():
        uid = f"{said['0020|000d']}.{int(place.name[:3])}"
        own = {"0008|103e": place.name[4:], "0020|000e": uid, "0020|0011": place.name[:3]}
        for k in range(0, values.shape[2], step):
            corner = affine[:3, 3] + k * sizes[2] * turn[:, 2]
            where = "\\".join(f"{x:.5f}" for x in corner)
            one = {"0008|0018": f"{uid}.{k + 1}", "0020|0013": str(k + 1), "0020|0032": where}
            path = folder / place / f"IM{k + 1:04d}.dcm"
            _write_slice(path, values[:, :, k].T, sizes, said | own | one)
            written[path.relative_to(folder).as_posix()] = path.stat().st_size
    return written


def _write_slice(path: Path, values: Array, sizes: Array, tags: dict[str, str]) -> None:
    from ..prepare.itk import simple_itk

    sitk = simple_itk()
    image = sitk.GetImageFromArray(np.ascontiguousarray(values))
    image.SetSpacing(sizes[:2].tolist())
    for tag, text in tags.items():
        image.SetMetaData(tag, text)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = sitk.ImageFileWriter()
    writer.KeepOriginalImageUIDOn()
    writer.SetFileName(str(path))
    before = locale.setlocale(locale.LC_CTYPE)
    writer.Execute(image)
    locale.setlocale(locale.LC_CTYPE, before)  # it leaves another one, and Python reads ASCII then


def dicom_tables(spec: CohortSpec, plans: Sequence[ScanPlan], paths: Paths) -> dict[str, bytes]:
    """What a hospital knows: who has what."""
    rows = [(patient(who), who.course.visits[0][1]) for who in people(plans)]
    return {"patients.csv": _csv("patient_id,diagnosis", rows)}
