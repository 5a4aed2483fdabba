"""Who is in a synthetic cohort: subjects, visits, scans and the names the portal would give them.

Everything about a subject comes from (cohort seed, subject number) and everything about a scan from
(cohort seed, subject number, visit), so neither order nor number of processes changes a byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

import numpy as np

from ..errors import DataError
from .courses import COURSES, Course, usual_course
from .levels import GROUPS, Diagnosis, Difficulty

Kind = Literal["t1", "repeat", "mask"]
SynthLayout = Literal["ida", "bids", "caps", "csv", "aibl", "oasis1", "oasis3", "dicom"]

SITE, OTHER_SITE = 999, 998  # no such sites in ADNI
_OLDER = 4.0  # years, the people of the other hospital
FIRST_IMAGE_ID, OTHER_FIRST_IMAGE_ID = 9_000_000, 9_500_000
SCANNERS = 6
MAKER = "SYNTHETIC"  # of all scanners
_MISSING = 0.15  # share of follow-up visits that did not happen
_E4 = {"NC": 0.15, "sMCI": 0.22, "pMCI": 0.38, "AD": 0.42}  # frequency of the allele
_VISIT_MONTHS = {"bl": 0, "m06": 6, "m12": 12, "m24": 24, "m36": 36}

# what each phase calls its visits, and the T1 series of a preprocessed and a raw download
_PHASES = {
    "ADNI1": (2006, ("sc", "m06", "m12", "m24", "m36")),
    "ADNI2": (2011, ("v03", "v05", "v11", "v21", "v31")),
    "ADNI4": (2023, ("4_init", "4_m06", "4_m12", "4_m24", "4_m36")),
}
_PROCESSED = {
    "ADNI1": "MPR; GradWarp; B1 Correction; N3; Scaled",
    "ADNI2": "MT1; GradWarp; N3m",
    "ADNI4": "Accelerated Sagittal MPRAGE",
}
_ORIGINAL = {"ADNI1": "MP-RAGE", "ADNI2": "MPRAGE", "ADNI4": "Accelerated Sagittal MPRAGE"}


@dataclass(frozen=True)
class CohortSpec:
    """What to generate; equal specs give equal bytes.

    Attributes:
        subjects: how many of each diagnosis.
        resolution_mm: voxel size; the L2 voxel sizes are multiplied by it.
        difficulty: see ``levels.LEVELS``.
        seed: cohort seed.
        visits: which of bl, m06, m12, m24, m36; follow-ups are missing now and then.
        site_bias: 0 to 1, how strongly the scanner gives the diagnosis away (confounding).
        layout: how the files lie and which tables are beside them; the scans are the same, except
            that ``caps`` has registered ones at every level.
        elsewhere: another hospital: a site of its own, older people, and scanners that differ in
            contrast, blur, bias field, noise and gain, also where a level has one scanner only.
        raw: to try a preparation on: scans of L2 with face and neck, that lie tilted and shifted in
            a known way in a scanner with a stronger bias field.
        courses: add one subject with MCI for each course over time in ``courses.COURSES``.
    """

    subjects: tuple[tuple[Diagnosis, int], ...]
    resolution_mm: float = 2.0
    difficulty: Difficulty = "L1"
    seed: int = 0
    visits: tuple[str, ...] = ("bl",)
    site_bias: float = 0.0
    layout: SynthLayout = "ida"
    courses: bool = False
    elsewhere: bool = False
    raw: bool = False

    def __post_init__(self) -> None:
        if self.raw and (self.difficulty != "L2" or self.layout == "caps"):
            raise DataError(
                "BAD_COHORT",
                f"raw scans of {self.difficulty} in the layout {self.layout}",
                action="raw scans are of L2, in any layout but caps, which holds prepared ones",
            )
        unknown = [name for name, _ in self.subjects if name not in GROUPS]
        if unknown or not any(count > 0 for _, count in self.subjects):
            raise DataError(
                "BAD_COHORT",
                f"subjects {dict(self.subjects)}",
                action=f"give at least one subject of {', '.join(GROUPS)}, e.g. AD=60,NC=60",
            )
        missing = [visit for visit in self.visits if visit not in _VISIT_MONTHS]
        if missing or "bl" not in self.visits:
            raise DataError(
                "BAD_COHORT",
                f"visits {','.join(self.visits)}",
                action=f"give bl and any of {', '.join(_VISIT_MONTHS)}",
            )
        if not 0.5 <= self.resolution_mm <= 10:
            raise DataError(
                "BAD_COHORT", f"resolution {self.resolution_mm} mm", action="use 0.5 to 10 mm"
            )


@dataclass(frozen=True)
class Subject:
    """One synthetic person.

    Attributes:
        number: counts the people of the cohort from 1; random numbers depend on it.
        ptid: canonical PTID, at a site that ADNI does not have.
        diagnosis: class that the person is generated for.
        sex: F or M.
        age: years at the first scan.
        phase: ADNI1, ADNI2 or ADNI4.
        scanner: number of the scanner, below ``SCANNERS``, elsewhere as many above.
        severity: at the first scan; see ``levels.Group``.
        yearly: what the severity gains in a year.
        first_scan: date and time that visits are counted from.
        course: diagnoses over time.
        field_strength: tesla.
        apoe4: number of e4 alleles, 0 to 2.
    """

    number: int
    ptid: str
    diagnosis: Diagnosis
    sex: str
    age: float
    phase: str
    scanner: int
    severity: float
    yearly: float
    first_scan: datetime
    course: Course
    field_strength: float
    apoe4: int

    @property
    def model(self) -> str:
        """Of the scanner, as headers name it."""
        return f"Model {self.scanner + 1}"

    def day(self, months: int) -> datetime:
        """When this person comes for a visit, a few days off the month."""
        days = months * 30.44 + (self.number * 7 + months * 5) % 19
        return self.first_scan + timedelta(days=round(days))

    def age_at(self, months: int) -> float:
        """Age in years at a visit, with one decimal."""
        days = (self.day(months).date() - self.day(0).date()).days
        return round(round(self.age, 1) + days / 365.25, 1)


@dataclass(frozen=True)
class ScanPlan:
    """One file to be written, and its row in the collection table.

    Attributes:
        subject: who is scanned.
        kind: a T1 scan, its repeat, or a brain mask.
        visit: one of bl, m06, m12, m24, m36.
        months: of the visit, since the first one.
        image_id: number without its letter.
        series_id: number in the names of a download.
    """

    subject: Subject
    kind: Kind
    visit: str
    months: int
    image_id: int
    series_id: int

    @property
    def acquired(self) -> datetime:
        """Date and time of the scan; a repeat follows nine minutes later."""
        late = timedelta(minutes=9 if self.kind == "repeat" else 0)
        return self.subject.day(self.months) + late

    @property
    def severity(self) -> float:
        """Severity at this visit."""
        return self.subject.severity + self.subject.yearly * self.months / 12.0

    @property
    def age(self) -> float:
        """Age in years at this visit, as the tables compute it."""
        return self.subject.age_at(self.months)


def plan_cohort(spec: CohortSpec) -> list[ScanPlan]:
    """Every scan of the cohort, in the order of the image IDs."""
    diagnoses = [name for name, count in spec.subjects for _ in range(count)]
    # subject numbers must not give the diagnosis away
    shuffled = np.random.default_rng([spec.seed, 0, 9]).permutation(len(diagnoses))
    people: list[tuple[Diagnosis, Course | None]] = [(diagnoses[i], None) for i in shuffled]
    if spec.courses:
        people += [("pMCI" if c.expected == "pMCI" else "sMCI", c) for c in COURSES]
    plans: list[ScanPlan] = []
    first = OTHER_FIRST_IMAGE_ID if spec.elsewhere else FIRST_IMAGE_ID
    for number, (diagnosis, course) in enumerate(people, start=1):
        subject = _draw_subject(spec, number, diagnosis, course)
        for visit in sorted(spec.visits, key=_VISIT_MONTHS.__getitem__):
            months = _VISIT_MONTHS[visit]
            chance = np.random.default_rng([spec.seed, number, 2, months]).random()
            if months and chance < _MISSING:
                continue
            for kind in _kinds(spec, number, months):
                image_id = first + 17 * len(plans) + number % 13
                plans.append(ScanPlan(subject, kind, visit, months, image_id, 800_000 + len(plans)))
    return plans


def _kinds(spec: CohortSpec, number: int, months: int) -> list[Kind]:
    """A download holds more than one wants: brain masks, and repeats of the same sequence."""
    kinds: list[Kind] = ["t1"]
    if spec.difficulty == "L2" and number % 12 == 6:
        kinds.append("repeat")
    if months == 0 and number % 10 == 5:
        kinds.append("mask")
    return kinds


def _draw_subject(
    spec: CohortSpec, number: int, diagnosis: Diagnosis, course: Course | None
) -> Subject:
    rng = np.random.default_rng([spec.seed, number, 1])
    group = GROUPS[diagnosis]
    boxes = spec.difficulty == "L0"
    severity = group.box_drop if boxes else max(0.0, rng.normal(group.mean, group.sd))
    late = number % 10 == 0  # ADNI4 counts beyond 9999
    phase = "ADNI4" if late else ("ADNI1", "ADNI2")[int(rng.integers(2))]
    scanner = int(rng.integers(SCANNERS))
    if rng.random() < spec.site_bias:  # patients from the lower half, everybody else from the upper
        scanner = scanner // 2 + (0 if diagnosis == "AD" else SCANNERS // 2)
    scanner += SCANNERS * spec.elsewhere
    start = datetime(_PHASES[phase][0], 1, 1, 8) + timedelta(
        days=int(rng.integers(700)), seconds=int(rng.integers(8 * 3600))
    )
    site = OTHER_SITE if spec.elsewhere else SITE
    return Subject(
        number=number,
        ptid=f"{site}_S_{10_000 + number if late else number:04d}",
        diagnosis=diagnosis,
        sex="FM"[int(rng.integers(2))],
        age=float(np.clip(rng.normal(75 + _OLDER * spec.elsewhere, 7), 55, 92)),
        phase=phase,
        scanner=scanner,
        severity=float(severity),
        yearly=0.0 if boxes else group.yearly,
        first_scan=start,
        course=course or usual_course(diagnosis, number),
        field_strength=1.5 if phase == "ADNI1" and number % 4 else 3.0,
        apoe4=int(np.random.default_rng([spec.seed, number, 4]).binomial(2, _E4[diagnosis])),
    )


def visit_name(plan: ScanPlan) -> str:
    """The visit as the plan's phase writes it."""
    index = list(_VISIT_MONTHS).index(plan.visit)
    return _PHASES[plan.subject.phase][1][index]


def description(plan: ScanPlan, difficulty: Difficulty) -> str:
    """The series description as the portal shows it."""
    names = _ORIGINAL if difficulty == "L2" else _PROCESSED
    name = names[plan.subject.phase]
    if plan.kind == "mask":
        return "MPR; GradWarp; B1 Correction; Mask"
    return f"{name} REPEAT" if plan.kind == "repeat" else name
