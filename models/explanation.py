"""What ``explain`` writes: tables, pictures and NIfTI maps, in one folder."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib

from models.explain import summarise
from models.findings import OF_A_LAYER, Case, Findings, Map
from models.maps.native import to_native
from models.overlay import (
    case_title,
    evidence,
    map_title,
    meaning,
    save_group_means,
    save_overlay,
    save_page,
)
from models.tables import write_table
from models.tasks import is_number


@dataclass(frozen=True)
class Writer:
    """Writes one explanation.

    Args:
        folder: Where to; existing files of the same names are replaced.
        class_names: In the order of the labels; the last one is explained.
        layer: Layer that was explained, for the names of files.
        files: Original scan of each image ID; scans without one get no map on their own grid.
    """

    folder: Path
    class_names: Sequence[str]
    layer: str
    files: Mapping[str, str]

    def write(self, findings: Findings) -> None:
        """Write everything."""
        self.folder.mkdir(parents=True, exist_ok=True)
        table = summarise(findings.rows)
        write_table(findings.rows, self.folder / "explain.tsv")
        write_table(table, self.folder / "localisation.tsv")
        write_table(_region_rows(findings), self.folder / "regions.tsv")
        shown = [self._case(case) for case in findings.cases]
        means = save_group_means(findings, self.folder, self.class_names)
        record = {
            "layer": self.layer,
            "explained": self.class_names[-1],
            "evidence": evidence(self.class_names),
            "number": is_number(self.class_names),
            "cases": shown,
            "means": [path.name for path in means],
        }
        (self.folder / "explain.json").write_text(json.dumps(record, indent=2) + "\n")

    def _case(self, case: Case) -> dict[str, Any]:
        """Write pictures and maps of one scan; what a report has to know of them."""
        name = f"{case.subject}_{case.image_id}"
        pictures = []
        for one in case.maps:
            path = self.folder / f"{name}_{self._suffix(one)}.png"
            save_overlay(case, one, path, self.class_names)
            pictures.append({"file": path.name, "title": map_title(case, one)})
            if case.image_id in self.files and not one.empty:
                there = to_native(one.values, case.affine, Path(self.files[case.image_id]))
                # nibabel has no types
                nib.save(there, path.with_suffix(".nii.gz"))
        record = {
            "title": case_title(case, self.class_names),
            "meaning": meaning(case, self.class_names),
            "pictures": pictures,
        }
        # the one that points best, see docs/measurements.md
        shown = next((one for one in case.maps if one.method == "hirescam"), case.maps[0])
        if not shown.empty:  # nothing to click through else
            page = self.folder / f"{name}.html"
            save_page(case, shown, page, self.class_names)
            record["page"] = page.name
        return record

    def _suffix(self, one: Map) -> str:
        return f"{one.method}_{self.layer}" if one.method in OF_A_LAYER else one.method


def _region_rows(findings: Findings) -> list[dict[str, Any]]:
    return [
        {
            "method": method,
            "region": region,
            "share_of_map": share,
            "share_of_head": of_head,
            "times": share / of_head if of_head else "",
        }
        for method, regions in findings.regions.items()
        for region, (share, of_head) in regions.items()
    ]
