"""Files of changes say what shows them, and a release collects them."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("release", ROOT / "changelog" / "release.py")
assert _spec is not None
assert _spec.loader is not None
release = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(release)

BEFORE = """# Changelog

What users notice.

## Unreleased

### Changed
- An older change, in
  two lines.

### Fixed
- An older mistake.

## 0.1.0 - 2026-01-02

### Added
- All of it.
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A repository with a changelog and three files of changes."""
    (tmp_path / "CHANGELOG.md").write_text(BEFORE)
    (tmp_path / "Makefile").write_text("demo: READY\n\techo\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text("")
    folder = tmp_path / "changelog"
    folder.mkdir()
    (folder / "README.md").write_text("How.\n")
    (folder / "b.added.md").write_text(
        "Something [new](../docs/x.md)\nin two lines.\n(tests/test_x.py)\n"
    )
    (folder / "a.fixed.md").write_text("A mistake.\n(tests/test_x.py, make demo)\n")
    (folder / "c.removed.md").write_text("Something old.\n(make demo)\n")
    return tmp_path


def test_each_change_of_this_repository_names_what_shows_it() -> None:
    wrong = [line for path in release.fragments(ROOT) for line in release.problems(path, ROOT)]
    assert wrong == []


def test_a_release_collects_the_files_below_what_was_unreleased(copy: Path) -> None:
    assert release.main(["0.2.0"], copy) is None
    text = (copy / "CHANGELOG.md").read_text()
    start, heading, rest = text.partition("## 0.2.0 - ")
    assert start == "# Changelog\n\nWhat users notice.\n\n"
    assert heading
    assert (
        rest[10:]
        == """

### Changed
- An older change, in
  two lines.

### Fixed
- An older mistake.
- A mistake.
  (tests/test_x.py, make demo)

### Added
- Something [new](docs/x.md)
  in two lines.
  (tests/test_x.py)

### Removed
- Something old.
  (make demo)

## 0.1.0 - 2026-01-02

### Added
- All of it.
"""
    )
    assert [path.name for path in (copy / "changelog").iterdir()] == ["README.md"]


def test_the_next_release_stands_above_the_one_before(copy: Path) -> None:
    release.main(["0.2.0"], copy)
    (copy / "changelog" / "d.changed.md").write_text("More.\n(tests/test_x.py)\n")
    before = (copy / "CHANGELOG.md").read_text()
    assert release.main(["0.3.0"], copy) is None
    text = (copy / "CHANGELOG.md").read_text()
    assert text.index("## 0.3.0") < text.index("- More.") < text.index("## 0.2.0")
    assert text.endswith(before[before.index("## 0.2.0") :])


def test_the_changelog_of_this_repository_loses_no_line_in_a_release(copy: Path) -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    (copy / "CHANGELOG.md").write_text(text)
    assert release.main(["9.0.0"], copy) is None
    after = (copy / "CHANGELOG.md").read_text().splitlines()
    assert set(text.splitlines()) - set(after) <= {"## Unreleased"}
    assert sum(line.startswith("- ") for line in after) == 3 + sum(
        line.startswith("- ") for line in text.splitlines()
    )


def test_a_check_changes_nothing(copy: Path) -> None:
    assert release.main(["--check", "0.2.0"], copy) is None
    assert (copy / "CHANGELOG.md").read_text() == BEFORE
    assert len(release.fragments(copy)) == 3


def test_a_release_that_was_collected_already_is_left_as_it_is(copy: Path) -> None:
    release.main(["0.2.0"], copy)
    text = (copy / "CHANGELOG.md").read_text()
    assert release.main(["0.2.0"], copy) is None
    assert (copy / "CHANGELOG.md").read_text() == text


def test_a_version_without_changes_is_refused(copy: Path) -> None:
    release.main(["0.2.0"], copy)
    assert "is empty" in release.main(["0.3.0"], copy)


def test_later_changes_are_not_put_under_a_version_that_is_out(copy: Path) -> None:
    release.main(["0.2.0"], copy)
    (copy / "changelog" / "d.changed.md").write_text("More.\n(tests/test_x.py)\n")
    assert "another version" in release.main(["0.2.0"], copy)
    assert "More." not in (copy / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.new.md", "A.\n(tests/test_x.py)", "NAME.KIND.md"),
        ("plain.md", "A.\n(tests/test_x.py)", "NAME.KIND.md"),
        ("a.added.md", "A change without its test.", "no (TEST OR COMMAND)"),
        ("a.added.md", "(tests/test_x.py)", "no (TEST OR COMMAND)"),
        ("a.added.md", "A.\n(tests/test_y.py)", "there is no 'tests/test_y.py'"),
        ("a.added.md", "A.\n(make nothing)", "there is no 'make nothing'"),
        ("a.added.md", "- A.\n(tests/test_x.py)", "bullet"),
        ("a.added.md", "", "no (TEST OR COMMAND)"),
    ],
)
def test_a_file_that_is_not_as_it_should_be_ends_the_release(
    copy: Path, name: str, text: str, said: str
) -> None:
    (copy / "changelog" / name).write_text(text)
    assert said in release.main(["0.2.0"], copy)
    assert (copy / "CHANGELOG.md").read_text() == BEFORE
