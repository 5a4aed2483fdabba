"""Names of subjects and visits, in whatever spelling a source uses."""

from __future__ import annotations

import re
import unicodedata

PTID = re.compile(r"\d{3}_S_\d{4,5}")  # five digits since ADNI4
_SPELLING = re.compile(r"(?:SUB-)?(?:ADNI)?(\d{3})[_\-. ]?S[_\-. ]?(\d{4,5})", re.IGNORECASE)
# studies whose names of people end in a session: OASIS-1 and -2, OASIS-3, BIDS
_WITH_SESSION = (
    re.compile(r"(OAS[12]_\d{4})_(MR\d+)(?:_.*)?", re.IGNORECASE),
    re.compile(r"(OAS3\d{4})_(?:[A-Za-z]+\d*_)?(d\d{4,5})(?:_.*)?", re.IGNORECASE),
    re.compile(r"((?:sub-)?[0-9A-Za-z]+)_ses-([0-9A-Za-z]+)(?:_.*)?"),
)
_MONTH = re.compile(r"(?:SES-)?M(\d{1,3})", re.IGNORECASE)


def one_spelling(text: str) -> str:
    """A name without what nobody sees.

    Composed and decomposed letters, wide digits and spaces of any kind are one (NFKC); invisible
    characters and the spaces around it are nothing.
    """
    seen = "".join(
        c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c) != "Cf"
    )
    return " ".join(seen.split())


def adni_subject(text: str) -> str:
    """``sub-ADNI999S0001`` and ``999_s_0001`` are ``999_S_0001``; empty for what is no ADNI ID."""
    match = _SPELLING.fullmatch(one_spelling(text))
    return f"{match[1]}_S_{match[2]}" if match else ""


def canonical_subject(text: str) -> str:
    """The ADNI spelling of an ADNI subject; any other without ``sub-`` and without a session.

    ``OAS1_0001_MR1`` is ``OAS1_0001``, ``OAS30001_MR_d0129`` is ``OAS30001``, ``sub-01_ses-M000``
    is ``01``.
    """
    text = one_spelling(text)
    for pattern in _WITH_SESSION:
        if match := pattern.fullmatch(text):
            text = match[1].upper() if match[1][:3].upper() == "OAS" else match[1]
            break
    return adni_subject(text) or text.removeprefix("sub-")


def session_in_name(text: str) -> str:
    """The session that follows a person in a name; empty without one."""
    matches = (pattern.fullmatch(text.strip()) for pattern in _WITH_SESSION)
    found = next((match[2] for match in matches if match), "")
    return canonical_session(found) or found


def canonical_session(text: str) -> str:
    """``ses-M00``, ``bl``, ``m06`` as ``M000``, ``M006``; empty for what names no month.

    ``sc`` is no month: the screening visit is not the baseline visit.
    """
    text = text.strip()
    if text.lower() in ("bl", "ses-bl"):
        return "M000"
    match = _MONTH.fullmatch(text)
    return f"M{int(match[1]):03d}" if match else ""


def image_number(text: str) -> str:
    """The digits of an image ID: of ``I9000001``, ``d9000001``, and ``9000001.0`` as pandas saves.

    Empty for what is none.
    """
    number = text.strip().upper().lstrip("ID").removesuffix(".0")
    return number if number.isdigit() else ""


def registry_number(subject: str) -> str:
    """RID: the number after the last underscore, which no two subjects share; empty for others."""
    return str(int(subject.rpartition("_")[2])) if PTID.fullmatch(subject) else ""
