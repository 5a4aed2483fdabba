"""Names of subjects and visits, in whatever spelling a source uses."""

from __future__ import annotations

import re

PTID = re.compile(r"\d{3}_S_\d{4,5}")  # five digits since ADNI4
_SPELLING = re.compile(r"(?:SUB-)?(?:ADNI)?(\d{3})_?S_?(\d{4,5})", re.IGNORECASE)
_MONTH = re.compile(r"(?:SES-)?M(\d{1,3})", re.IGNORECASE)


def adni_subject(text: str) -> str:
    """``sub-ADNI999S0001`` and ``999_s_0001`` are ``999_S_0001``; empty for what is no ADNI ID."""
    match = _SPELLING.fullmatch(text.strip())
    return f"{match[1]}_S_{match[2]}" if match else ""


def canonical_subject(text: str) -> str:
    """The ADNI spelling of an ADNI subject; any other name as it is, without ``sub-``."""
    return adni_subject(text) or text.strip().removeprefix("sub-")


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
