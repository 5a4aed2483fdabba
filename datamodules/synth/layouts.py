"""Where the files of a cohort go and which tables lie beside them: the same scans, any layout."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from ..progression import Visit, label_visit
from ..tables import table_bytes
from . import studies
from .clinical import cdr_sb, clinical_rows, group, mmse, people, registry_number, site
from .cohort import (
    MAKER,
    CohortSpec,
    ScanPlan,
    Subject,
    SynthLayout,
    description,
    visit_name,
)
from .files import FileForm
from .grids import Array

Row = dict[str, object]


@dataclass(frozen=True)
class LayoutWriter:
    """What a layout does with a cohort.

    Attributes:
        path: of a scan, relative to the cohort's folder; gets the plan, the cohort and a suffix.
        tables: contents by path; gets the cohort, all plans and the paths of the scans.
        holds: whether a plan is written at all.
        write: writes a scan; gets the cohort's folder, the path, the volume, its form and the plan,
            and returns the bytes of each file. None: a NIfTI file.
    """

    path: Callable[[ScanPlan, CohortSpec, str], Path]
    tables: Callable[[CohortSpec, Sequence[ScanPlan], dict[int, str]], dict[str, bytes]]
    holds: Callable[[ScanPlan], bool]
    write: Callable[[Path, Path, Array, FileForm, ScanPlan], dict[str, int]] | None = None


def scan_name(plan: ScanPlan, layout: SynthLayout) -> str:
    """What the data module calls the scan: the image ID, where a layout has one."""
    if layout == "oasis1":
        return f"{studies.oasis1_name(plan.subject)}_MR1"
    if layout == "oasis3":
        return studies.oasis3_path(plan, _ANY, "").name.removesuffix("_T1w.nii.gz")
    if layout == "caps":
        return f"{_participant(plan.subject)}_{_session(plan.months)}"
    return f"I{plan.image_id}"


def download_path(plan: ScanPlan, spec: CohortSpec, suffix: str) -> Path:
    """Where the portal's archive would put this scan, relative to the download folder."""
    name = re.sub(r"[^0-9A-Za-z-]", "_", description(plan, spec.difficulty))
    stamp = f"{plan.acquired:%Y%m%d%H%M%S}{plan.image_id % 1000:03d}"
    file = (
        f"ADNI_{plan.subject.ptid}_MR_{name}_Br_{stamp}_S{plan.series_id}_I{plan.image_id}{suffix}"
    )
    day = f"{plan.acquired:%Y-%m-%d_%H_%M_%S}.0"
    return Path("ADNI", plan.subject.ptid, name, day, f"I{plan.image_id}", file)


def _collection_row(plan: ScanPlan, spec: CohortSpec) -> Row:
    """The row of the collection table, with the portal's own habits."""
    late = plan.subject.phase == "ADNI2"
    mci = {"sMCI": "EMCI" if late else "MCI", "pMCI": "LMCI" if late else "MCI"}
    group = {"NC": "CN", "AD": "AD", **mci}[plan.subject.diagnosis]
    day = plan.acquired
    text = description(plan, spec.difficulty)
    original = plan.kind != "mask" and "N3" not in text
    settings = {
        "Field Strength": f"{plan.subject.field_strength:.1f}",
        "Manufacturer": MAKER,
        "Mfg Model": plan.subject.model,
    }
    return {
        # newer collections leave the letter out
        "Image Data ID": plan.image_id if spec.difficulty == "L2" else f"I{plan.image_id}",
        "Subject": plan.subject.ptid,
        "Group": group,
        "Sex": plan.subject.sex,
        "Age": int(plan.age),
        "Visit": visit_name(plan),
        "Modality": "MRI",
        "Description": text,
        "Type": "Original" if original else "Processed",
        "Acq Date": f"{day.month}/{day.day}/{day.year}",
        "Format": "NiFTI",
        "Downloaded": "" if plan.subject.number % 7 == 0 else "1/31/2026",
        "Imaging Protocol": ";".join(f"{name}={value}" for name, value in settings.items()),
    }


def _ida_tables(
    spec: CohortSpec, plans: Sequence[ScanPlan], paths: dict[int, str]
) -> dict[str, bytes]:
    tables = {
        f"SYNTHETIC_{spec.difficulty}_1_31_2026.csv": [_collection_row(p, spec) for p in plans],
        "ADNIMERGE_31Jan2026.csv": clinical_rows(plans),
    }
    return {
        name: table_bytes(rows, delimiter=",", quoting=csv.QUOTE_ALL)
        for name, rows in tables.items()
    }


def _participant(subject: Subject) -> str:
    return f"sub-ADNI{subject.ptid.replace('_', '')}"


def _session(months: int) -> str:
    return f"ses-M{months:03d}"


def _bids_path(plan: ScanPlan, spec: CohortSpec, suffix: str) -> Path:
    sub, ses = _participant(plan.subject), _session(plan.months)
    run = "_run-02" if plan.kind == "repeat" else ""
    return Path(sub, ses, "anat", f"{sub}_{ses}{run}_T1w.nii.gz")


def _participant_row(subject: Subject) -> Row:
    return {
        "participant_id": _participant(subject),
        "alternative_id_1": subject.ptid,
        "sex": subject.sex,
        "age_bl": f"{subject.age:.1f}",
        "adni_rid": registry_number(subject),
        "site": site(subject),
        "original_study": subject.phase,
        "diagnosis_sc": group(subject),
        "mmse_bl": f"{mmse(subject, 0):.0f}",
        "apoe4": subject.apoe4,
    }


def _session_rows(subject: Subject) -> list[Row]:
    words = {"NC": "CN", "MCI": "MCI", "AD": "AD"}
    return [
        {
            "session_id": _session(months),
            "examination_date": f"{subject.day(months):%Y-%m-%d}",
            "age": f"{subject.age_at(months):.1f}",
            "current_study": subject.phase,
            "diagnosis": words[dx],
            "MMSE": f"{mmse(subject, months):.0f}",
            "cdr_sb": f"{cdr_sb(subject, months):.1f}",
        }
        for months, dx in subject.course.visits
    ]


def _bids_tables(
    spec: CohortSpec, plans: Sequence[ScanPlan], paths: dict[int, str]
) -> dict[str, bytes]:
    subjects = people(plans)
    dataset = {"Name": "Synthetic cohort", "BIDSVersion": "1.7.0", "DatasetType": "raw"}
    tables = {
        "dataset_description.json": (json.dumps(dataset, indent=1) + "\n").encode(),
        "participants.tsv": table_bytes([_participant_row(subject) for subject in subjects]),
    }
    for subject in subjects:
        sub = _participant(subject)
        tables[f"{sub}/{sub}_sessions.tsv"] = table_bytes(_session_rows(subject))
        for months in {plan.months for plan in plans if plan.subject == subject}:
            own = [p for p in plans if p.subject == subject and p.months == months]
            scans: list[Row] = [
                {
                    "filename": f"anat/{Path(paths[p.image_id]).name}",
                    "scan_id": p.image_id,
                    "mri_field": subject.field_strength,
                }
                for p in own
                if p.image_id in paths
            ]
            ses = _session(months)
            header = {"MagneticFieldStrength": subject.field_strength, "Manufacturer": MAKER}
            header["ManufacturersModelName"] = subject.model
            for scan in scans:
                path = f"{sub}/{ses}/{re.sub(r'[.]nii.*', '.json', str(scan['filename']))}"
                tables[path] = (json.dumps(header, indent=1) + "\n").encode()
            tables[f"{sub}/{ses}/{sub}_{ses}_scans.tsv"] = table_bytes(scans)
    return tables


def _caps_path(plan: ScanPlan, spec: CohortSpec, suffix: str) -> Path:
    sub, ses = _participant(plan.subject), _session(plan.months)
    size = f"{spec.resolution_mm:g}"
    space = f"space-MNI152NLin2009cSym_desc-Crop_res-{size}x{size}x{size}"
    return Path("subjects", sub, ses, "t1_linear", f"{sub}_{ses}_{space}_T1w.nii.gz")


def _caps_tables(
    spec: CohortSpec, plans: Sequence[ScanPlan], paths: dict[int, str]
) -> dict[str, bytes]:
    """What ``clinica iotools merge-tsv`` makes of the BIDS folder."""
    rows = [
        {"participant_id": "", **row, **_participant_row(subject)}
        | {"mri_field": subject.field_strength}
        for subject in people(plans)
        for row in _session_rows(subject)
    ]
    return {"merged.tsv": table_bytes(rows)}


def _plain_path(plan: ScanPlan, spec: CohortSpec, suffix: str) -> Path:
    return Path("scans", f"{plan.subject.ptid}_{plan.visit}{suffix}")


def _plain_tables(
    spec: CohortSpec, plans: Sequence[ScanPlan], paths: dict[int, str]
) -> dict[str, bytes]:
    rows: list[Row] = [
        {
            "path": paths[plan.image_id],
            "subject": plan.subject.ptid,
            "label": _label(plan),
            "image_id": f"I{plan.image_id}",
            "session": f"M{plan.months:03d}",
            "acq_date": f"{plan.acquired:%Y-%m-%d}",
            "age": f"{plan.age:.1f}",
            "sex": plan.subject.sex,
            "mmse": f"{mmse(plan.subject, plan.months):.0f}",
            "phase": plan.subject.phase,
            "field_strength": plan.subject.field_strength,
            "site": site(plan.subject),
            "apoe4": plan.subject.apoe4,
            "cdr_sb": f"{cdr_sb(plan.subject, plan.months):.1f}",
            "scanner": f"{MAKER} {plan.subject.model}",
        }
        for plan in plans
        if plan.image_id in paths
    ]
    return {"scans.csv": table_bytes(rows, delimiter=",", quoting=csv.QUOTE_ALL)}


def _label(plan: ScanPlan) -> str:
    """The class of a scan, as somebody would write it who knows the subject's whole history."""
    visits = [
        Visit(plan.subject.day(months).date(), dx) for months, dx in plan.subject.course.visits
    ]
    near = min(visits, key=lambda visit: abs(visit.day - plan.acquired.date()))
    if abs(near.day - plan.acquired.date()) > timedelta(days=60):
        return "MCI"
    return label_visit(visits, near)[0] or near.dx


def _is_scan(plan: ScanPlan) -> bool:
    return plan.kind != "mask"


def _is_first(plan: ScanPlan) -> bool:
    return plan.kind == "t1" and plan.months == 0


_ANY = CohortSpec((("NC", 1),))
LAYOUTS: dict[SynthLayout, LayoutWriter] = {
    "ida": LayoutWriter(download_path, _ida_tables, lambda plan: True),
    "bids": LayoutWriter(_bids_path, _bids_tables, _is_scan),
    "caps": LayoutWriter(_caps_path, _caps_tables, lambda plan: plan.kind == "t1"),
    "csv": LayoutWriter(_plain_path, _plain_tables, lambda plan: plan.kind == "t1"),
    "aibl": LayoutWriter(studies.aibl_path, studies.aibl_tables, _is_scan),
    "oasis1": LayoutWriter(
        studies.oasis1_path, studies.oasis1_tables, _is_first, studies.write_analyze
    ),
    "oasis3": LayoutWriter(studies.oasis3_path, studies.oasis3_tables, _is_scan),
    "dicom": LayoutWriter(studies.dicom_path, studies.dicom_tables, _is_scan, studies.write_dicom),
}
