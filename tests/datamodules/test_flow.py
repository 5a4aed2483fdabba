from datamodules.flow import flow
from datamodules.records import ScanRecord


def scan(number: int, subject: str, **known: object) -> ScanRecord:
    return ScanRecord(subject=subject, image_id=f"I{number}", path="", **known)


def test_every_scan_is_counted_in_exactly_one_place() -> None:
    records = [
        scan(1, "a", label=0, split="train"),
        scan(2, "b", label=1, split="test"),
        scan(3, "b", label=1, split="test"),  # a later one
        scan(4, "b", reason="other_series:I3"),
        scan(5, "c", reason="not_t1"),
        scan(6, "c", reason="not_t1", problem="TRUNCATED"),
    ]
    parts = {"train": records[:1], "val": [], "test": records[1:2]}
    counts = flow(records, parts, ("NC", "AD"))
    assert counts["found"] == {"scans": 6, "people": 3}
    assert counts["excluded"] == {
        "scans": 2,
        "people": 2,
        "why": {"other_series": 1, "not_t1": 1},
    }
    assert counts["bad"] == {"scans": 1, "people": 1, "why": {"TRUNCATED": 1}}
    assert counts["used"] == {"scans": 3, "people": 2}
    assert counts["later_scans_of_held_out_people"] == 1
    assert counts["parts"]["test"] == {"scans": 1, "people": 1, "classes": {"NC": 0, "AD": 1}}
    places = [counts[name]["scans"] for name in ("excluded", "bad", "used")]
    assert sum(places) == counts["found"]["scans"]
