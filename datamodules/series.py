"""Which of several images of one visit is used.

One visit often holds several T1-weighted series (a repeat, an accelerated one) and the same series
at several stages of processing. One of them is used, the others are excluded and name it:

1. only T1-weighted images of the whole head, by an allow-list of series names; masks, stripped or
   registered derivatives and the like are never inputs;
2. the furthest processed form, since the later steps repair the earlier ones: ``Scaled`` before
   ``N3``/``N3m`` before the original;
3. the main series before a repeat (``REPEAT``, ``MPR-R``, a later ``run-``); in CAPS the cropped
   image before the whole one, as ClinicaDL does;
4. in ADNI3 and ADNI4 the accelerated series, which is the one that all their scanners have;
5. 1.5 T in ADNI1, where every subject has it, 3 T later;
6. the lowest image ID.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from .records import ScanRecord

# descriptions with every special character turned into an underscore, as in folder names
_T1 = re.compile(
    r"MP_?RAGE|(^|_)MPR(_|$)|^MT1(_|$)"  # Siemens; ADNI's MPR and MT1
    r"|SPGR|BRAVO"  # GE: 3D spoiled gradient echo
    r"|T1.*T?FE|TFE.*T1"  # Philips: T1 TFE, T1W_3D_TFE, 3D T1 FFE
    r"|MP2RAGE.*DEN"  # with its noise removed; UNI alone has bright noise for air
    r"|(^|_)T1W$|^T1$|(^|_)S?T1W?_?3D|(^|_)3D_?T1",
    re.IGNORECASE,
)
_NOT_T1 = re.compile(
    r"MASK|SPATIALLY_NORMALIZED|HHP_6_DOF|HARP|SCOUT|LOCALI[SZ]ER|CALIBRATION|_ND$|REFORMAT|SUBTRACT"
    r"|PHASE(?!_ENC)|(^|_)PHA?(_|$)|(^|_)(REAL|IMAG(INARY)?)(_|$)|INV_?[12]"  # parts of an image
    r"|GADO|GADAV|(^|_)(GAD|GD)(_|$)|(^|_)(POST|C|KM)(_|$)|CONTRAST"  # an agent
    r"|(^|_)T2|FLAIR|(^|_)PD(W|_|$)|(^|_)(T|F)?SE(_|$)|SPIN_?ECHO"  # other weightings, slices
    r"|SWI|DWI|DTI|(^|_)EPI|BOLD|(^|_)ASL|FIELD_?MAP|FIESTA|CISS|(^|_)TOF|ANGIO",
    re.IGNORECASE,
)


def is_t1(description: str) -> bool:
    """Whether a series description names a T1-weighted image of the whole head."""
    name = re.sub(r"[^0-9A-Za-z]+", "_", description)
    return bool(_T1.search(name)) and not _NOT_T1.search(name)


def choose_series(records: Iterable[ScanRecord]) -> list[ScanRecord]:
    """Keep one series per subject and visit; exclude the others as ``other_series:<the winner>``.

    A visit is the session, or without one the day of the scan; in BIDS without sessions there is
    one.
    """
    records = list(records)
    best: dict[tuple[str, str], ScanRecord] = {}
    for record in sorted((r for r in records if r.used), key=preference):
        best.setdefault(_visit(record), record)
    chosen = []
    for record in records:
        winner = best.get(_visit(record))
        if record.used and winner is not None and winner is not record:
            record = replace(record, reason=f"other_series:{winner.image_id}")
        chosen.append(record)
    return chosen


def _visit(record: ScanRecord) -> tuple[str, str]:
    alone = "" if record.layout == "bids" else record.image_id
    return record.subject, record.session or record.acq_date or alone


def preference(record: ScanRecord) -> tuple[int, bool, bool, bool, int, str]:
    """Sorts the images of one visit, the best first; see the head of this file."""
    name = re.sub(r"[^0-9A-Za-z]+", "_", record.description).lower()
    scaled, corrected = re.search(r"scaled(_2)?(_|$)", name), re.search(r"n3m?(_|$)", name)
    late = record.phase in ("ADNI3", "ADNI4")
    wanted = 1.5 if record.phase == "ADNI1" else 3.0
    digits = re.sub(r"\D", "", record.image_id) if record.image_id[:1] == "I" else ""
    return (
        0 if scaled else 1 if corrected else 2,
        bool(re.search(r"repeat|_rpt|^mpr_r(_|$)", name)),
        late and "accel" not in name,
        record.field_strength is not None and abs(record.field_strength - wanted) > 0.6,
        int(digits or 0),
        record.path,  # in BIDS run-1 before run-2, in CAPS desc-Crop before the whole image
    )
