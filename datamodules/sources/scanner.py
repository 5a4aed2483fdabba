"""Which scanner an image is from, as headers and tables say it: manufacturer and model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from ..tables import MISSING

# one maker under the names of its history; others keep theirs
_MAKERS = {"siemens": "Siemens", "ge": "GE", "general": "GE", "philips": "Philips"}


def scanner_name(manufacturer: str, model: str) -> str:
    """``Siemens TrioTim`` of ``SIEMENS`` and ``TrioTim``; empty where neither is known."""
    maker, kind = (
        "" if text.strip().lower() in MISSING else text.strip() for text in (manufacturer, model)
    )
    first = re.split(r"[\s_]", maker.lower(), maxsplit=1)[0]
    kind = kind.partition("|")[0]  # what follows is software that the header went through
    return " ".join(filter(None, (_MAKERS.get(first, maker), kind)))


def scanner_in(row: Mapping[str, str]) -> str:
    """The scanner in a row of a table, by normalised column name."""
    maker = row.get("manufacturer") or row.get("mfg") or ""
    model = row.get("manufacturersmodelname") or row.get("mfgmodel") or row.get("model") or ""
    return (
        scanner_name("", row.get("scanner", "")) or scanner_name(maker, model) or _in_protocol(row)
    )


def _in_protocol(row: Mapping[str, str]) -> str:
    """In the portal's column of settings: ``Manufacturer=SIEMENS;Mfg Model=TrioTim;...``."""
    pairs = (part.partition("=") for part in row.get("imagingprotocol", "").split(";"))
    found = {name.strip().lower(): value for name, _, value in pairs}
    return scanner_name(found.get("manufacturer", ""), found.get("mfg model", ""))


def in_xml(path: Path) -> str:
    """In the portal's file of metadata, which lies beside an image."""
    text = path.read_text(errors="replace")
    terms = dict(re.findall(r'<protocol term="([^"]+)">([^<]*)<', text))
    return scanner_name(terms.get("Manufacturer", ""), terms.get("Mfg Model", ""))


def header_of_scan(image: Path, root: Path) -> dict[str, object]:
    """What the JSON files of BIDS say of an image: one for all, overridden by its own."""
    found: dict[str, object] = {}
    name = re.sub(r"\.nii(\.gz)?$", ".json", image.name, flags=re.IGNORECASE)
    for path in (root / "T1w.json", image.with_name(name)):
        try:
            values = json.loads(path.read_text()) if path.is_file() else {}
        except ValueError:  # no JSON: nothing is known, and the image is read all the same
            values = {}
        found |= values if isinstance(values, dict) else {}
    return found
