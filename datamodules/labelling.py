"""From scans and diagnoses to labels: every scan gets a label, a reason or a problem.

It is done on the full history and for all scans, before any scan is dropped for another cause.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date

from .errors import Problem
from .labels import CONCLUSIONS, Task, diagnosis, known_words
from .progression import LabelRule, Visit, filled, label_visit, nominal_day, visit_of_scan
from .records import ScanRecord
from .series import choose_series
from .sources.clinical import Clinical, Person

_MCI_REASONS = ("short_follow_up", "interval_censored", "converts_after_horizon", "no_dates")
"""Reasons why it is not known what became of an MCI, which is MCI all the same."""


def label_records(
    records: Sequence[ScanRecord], task: Task, rule: LabelRule, clinical: Clinical | None
) -> tuple[list[ScanRecord], list[Problem]]:
    """Label scans, choose one series per visit and find contradictions.

    Without ``clinical`` the diagnosis is the group that the source gives; with it, that of the
    visit of the scan, seen in the light of all others.
    """
    labelled = []
    for record in records:
        if not record.problem:
            if clinical is None:
                record = _from_group(record, task, rule)
            else:
                record = _from_history(record, task, rule, clinical)
            record = _with_number(record, task)
        labelled.append(record)
    problems = [*_unknown_labels(labelled)]
    # before a series is chosen: its label is no righter than that of the others
    marked, conflicts = _conflicts(labelled, labels=clinical is None and not task.everybody)
    chosen = choose_series(marked)
    problems += conflicts
    return (chosen if clinical is None else _one_class_each(chosen)), problems


def _from_group(record: ScanRecord, task: Task, rule: LabelRule) -> ScanRecord:
    dx = diagnosis(record.dx_bl)
    dx = rule.meant.get(dx, dx) if dx else dx
    record = replace(record, dx=dx or "", label=task.label(dx or ""))
    if record.reason:
        return record
    if dx is None and not task.everybody:
        return replace(record, problem="UNKNOWN_LABEL")
    return _excluded_unless_in_task(record)


def _excluded_unless_in_task(record: ScanRecord) -> ScanRecord:
    if record.label is None:
        return replace(record, reason=_NO_CLASS.get(record.dx, "not_in_task"))
    return record


_NO_CLASS = {"SMC": "smc", "OD": "other_dementia", "other": "other_diagnosis"}


def _with_number(record: ScanRecord, task: Task) -> ScanRecord:
    """A record with the number that the task is about; without one it is excluded."""
    if not task.number or record.label is None:
        return record
    target = getattr(record, task.number)
    lacking = f"no_{task.number}" if target is None else ""
    return replace(record, target=target, reason=record.reason or lacking)


def _from_history(
    record: ScanRecord, task: Task, rule: LabelRule, clinical: Clinical
) -> ScanRecord:
    person = clinical.person(record.subject)
    if person is None:
        return replace(record, dx_source=clinical.source, reason=record.reason or "missing")
    record = replace(
        record,
        sex=record.sex or person.sex,
        site=person.site or record.site,
        apoe4=person.apoe4,
        dx_bl=person.dx_bl or record.dx_bl,
        dx_source=f"{clinical.source}, {sum(bool(v.dx) for v in person.visits)} visits",
    )
    if rule.gaps == "fill":
        person = replace(person, visits=tuple(filled(person.visits)))
    day = date.fromisoformat(record.acq_date) if record.acq_date else None
    apart = clinical.within_days or rule.max_days_apart
    if clinical.for_all_scans:
        visit: Visit | None = person.visits[0]
    else:
        visit = visit_of_scan(person.visits, day, record.session, apart)
    if visit is None:
        return replace(record, reason=record.reason or "no_dx_near_scan")
    record = _at_visit(record, visit, day)
    if task.everybody:
        dx, reason = visit.dx, ""
    elif clinical.final:
        dx, reason = visit.dx, CONCLUSIONS.get(visit.dx, "")
    else:
        dx, reason = _class_of(person, visit, rule)
    if _is_mci_all_the_same(reason, person, visit, rule) and visit.dx in task.class_names:
        dx, reason = visit.dx, ""
    record = replace(record, dx=dx or visit.dx, label=None if reason else task.label(dx))
    if record.reason or reason:
        return replace(record, reason=record.reason or reason)
    return _excluded_unless_in_task(record)


def _is_mci_all_the_same(reason: str, person: Person, visit: Visit, rule: LabelRule) -> bool:
    """Whether somebody with MCI at the scan has MCI, though not stable nor progressive MCI."""
    if reason in _MCI_REASONS:
        return True
    if reason != "unstable" or visit.dx != "MCI" or rule.reverters != "visit":
        return False
    ill = min((other.day for other in person.visits if other.dx == "AD"), default=date.max)
    return any(other.dx not in ("", "AD") and other.day > ill for other in person.visits)


def _class_of(person: Person, visit: Visit, rule: LabelRule) -> tuple[str, str]:
    dx, reason = label_visit(person.visits, visit, rule)
    # tables of visits call them normal: that they came with complaints stands at screening only
    complaint = diagnosis(person.dx_bl) == "SMC" and dx == "NC"
    return ("", "smc") if complaint and rule.smc == "exclude" else (dx, reason)


def _at_visit(record: ScanRecord, visit: Visit, day: date | None) -> ScanRecord:
    session, age, apart = visit.session or record.session, visit.age, None
    if day and visit.dated:
        apart = (visit.day - day).days
    elif visit.session[:1] == "d" and (counted := nominal_day(record.session)):
        session, apart = record.session, (visit.day - counted).days
        age = None if age is None else round(age - apart / 365.25, 1)
    return replace(
        record,
        session=session,
        age=age if age is not None else record.age,
        mmse=visit.mmse if visit.mmse is not None else record.mmse,
        cdr_sb=visit.cdr_sb if visit.cdr_sb is not None else record.cdr_sb,
        phase=visit.phase or record.phase,
        field_strength=(
            record.field_strength if record.field_strength is not None else visit.field_strength
        ),
        exam_date=visit.day.isoformat() if visit.dated else "",
        days_apart=apart,
    )


def _unknown_labels(records: Sequence[ScanRecord]) -> Iterator[Problem]:
    """One problem for each unknown group: whole collections say ``Patient`` in every row."""
    groups: dict[str, list[ScanRecord]] = defaultdict(list)
    for record in records:
        if record.problem == "UNKNOWN_LABEL":
            groups[record.dx_bl].append(record)
    for group, alike in groups.items():
        first = min(alike, key=_line)
        mapped = bool(group) and first.layout in ("csv", "bids")
        missing = f"group {group!r} is none of" if group else "no diagnosis at all: none of"
        yield Problem(
            "UNKNOWN_LABEL",
            f"{missing} {known_words()}",
            (f"say what it means with --data.label_map / --label-map '{group}=...', " * mapped)
            + "give the diagnoses (ADNIMERGE, DXSUM) with --data.diagnosis_csv / --diagnosis-csv, "
            "or correct the table",
            first.row or first.path,
            first.subject,
            first.image_id,
            len(alike),
        )


def _line(record: ScanRecord) -> tuple[int, str]:
    number = record.row.rpartition(" ")[2]
    return int(number) if number.isdigit() else 0, record.path


def _one_class_each(records: Sequence[ScanRecord]) -> list[ScanRecord]:
    """A subject who changes class over time is used for the class of the first scan only."""
    first: dict[str, str] = {}
    for record in sorted((r for r in records if r.used), key=lambda r: r.order):
        first.setdefault(record.subject, str(record.label))
    return [
        replace(record, reason="class_changes")
        if record.used and first[record.subject] != str(record.label)
        else record
        for record in records
    ]


def _conflicts(
    records: Sequence[ScanRecord], labels: bool
) -> tuple[list[ScanRecord], list[Problem]]:
    """Mark scans of people whose rows say two sexes or, if ``labels``, two classes."""
    classes: dict[str, set[str]] = defaultdict(set)
    sexes: dict[str, set[str]] = defaultdict(set)
    for record in records:
        sexes[record.subject] |= {record.sex} - {""}
        if record.used and labels:
            classes[record.subject].add(record.dx)
    problems, marked = [], []
    for record in records:
        found = {"LABEL_CONFLICT": classes[record.subject], "TWO_SEXES": sexes[record.subject]}
        code = next((name for name, said in found.items() if len(said) > 1), "")
        if record.used and code:
            record = replace(record, problem=code)
            both = " and ".join(sorted(found[code]))
            detail = f"the subject's rows say {both}; here: {_said(record, code)}"
            action = "correct the table, or leave the subject out: two people under one name?"
            who = (record.path, record.subject, record.image_id)
            problems.append(Problem(code, detail, action, *who))
        marked.append(record)
    return marked, problems


def _said(record: ScanRecord, code: str) -> str:
    return record.dx_source if code == "LABEL_CONFLICT" else record.sex or "nothing"
