"""The scanner of an image is carried from headers and tables to every table of results."""

import json

import pytest

from datamodules.labels import TASKS
from datamodules.records import read_manifest, write_manifest
from datamodules.report import demographics
from datamodules.sources.scanner import scanner_in, scanner_name
from datamodules.survey import survey
from datamodules.synth.cohort import CohortSpec
from datamodules.synth.generate import generate

SPEC = {"subjects": (("AD", 2), ("NC", 2)), "resolution_mm": 8.0}


@pytest.mark.parametrize("layout", ["ida", "bids", "csv"])
def test_every_layout_says_which_scanner_a_scan_is_from(tmp_path, layout):
    generate(tmp_path / "in", CohortSpec(**SPEC, layout=layout), workers=1)
    records = survey(tmp_path / "in", TASKS["ad_nc"], None).records
    assert {r.scanner.split(" Model ")[0] for r in records} == {"SYNTHETIC"}
    write_manifest(tmp_path / "manifest.tsv", records)
    assert read_manifest(tmp_path / "manifest.tsv") == records
    assert "SYNTHETIC Model" in demographics(records)[-1].scanners


def test_the_metadata_of_the_portal_say_it_where_the_table_does_not(tmp_path):
    generate(tmp_path, CohortSpec(**SPEC), workers=1)
    collection = next(tmp_path.glob("SYNTHETIC*.csv"))
    collection.write_text(collection.read_text().replace("Imaging Protocol", "Weighting"))
    image = next((tmp_path / "ADNI").rglob("*.nii.gz"))
    number = image.parent.name
    (tmp_path / f"ADNI_999_S_0001_MPRAGE_S1_{number}.xml").write_text(
        '<protocolTerm><protocol term="Manufacturer">GE MEDICAL SYSTEMS</protocol>'
        '<protocol term="Mfg Model">SIGNA EXCITE</protocol></protocolTerm>'
    )
    found = {r.image_id: r.scanner for r in survey(tmp_path, TASKS["ad_nc"], None).records}
    assert found.pop(number) == "GE SIGNA EXCITE"
    assert set(found.values()) == {""}


def test_a_header_for_all_holds_where_an_image_has_none(tmp_path):
    generate(tmp_path, CohortSpec(**SPEC, layout="bids"), workers=1)
    for path in tmp_path.glob("sub-*/ses-*/anat/*.json"):
        path.unlink()
    (tmp_path / "T1w.json").write_text(json.dumps({"Manufacturer": "Philips Healthcare"}))
    records = survey(tmp_path, TASKS["ad_nc"], None).records
    assert {record.scanner for record in records} == {"Philips"}


def test_one_scanner_has_one_name():
    assert scanner_name("SIEMENS", "TrioTim") == scanner_name("Siemens Healthineers", " TrioTim ")
    assert scanner_name("SIEMENS", "Skyra|DicomCleaner") == "Siemens Skyra"
    assert scanner_name("n/a", "") == ""
    assert scanner_in({"imagingprotocol": "Mfg Model=Ingenia;Manufacturer=Philips Medical"}) == (
        "Philips Ingenia"
    )
