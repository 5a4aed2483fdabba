"""Files and folders that replace others."""

from pathlib import Path

import pytest

from lightning_hybrid.state import replaced_files
from lightning_hybrid.state.replaced_files import becoming, new_file, new_folder
from lightning_hybrid.state.sharded_checkpoint import _METADATA, META

IN_FOLDER = (META, _METADATA)


def put(what: str, target: Path, text: str, error: Exception | None = None) -> None:
    """Make a file or a sharded checkpoint, which then replaces what is there."""
    new = new_file(target) if what == "file" else new_folder(target)
    with becoming(new, target):
        for file in [new] if what == "file" else [new / name for name in IN_FOLDER]:
            file.write_text(text)
        if error is not None:
            raise error


def text_of(target: Path) -> str:
    return (target / IN_FOLDER[0] if target.is_dir() else target).read_text()


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("after", ["file", "folder"])
@pytest.mark.parametrize("before", ["file", "folder"])
def test_what_is_complete_replaces_what_was_there_and_leaves_nothing_beside(
    before: str, after: str, exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr(replaced_files, "exchange_files", lambda *_: False)
    put(before, tmp_path / "last.ckpt", "old")
    put(after, tmp_path / "last.ckpt", "new")
    assert text_of(tmp_path / "last.ckpt") == "new"
    assert [*tmp_path.iterdir()] == [tmp_path / "last.ckpt"]


@pytest.mark.parametrize("what", ["file", "folder"])
def test_an_error_while_it_is_written_leaves_the_previous_one(what: str, tmp_path: Path) -> None:
    target = tmp_path / "last.ckpt"
    put(what, target, "old")
    with pytest.raises(OSError, match="full"):
        put(what, target, "ha", OSError("full"))
    assert text_of(target) == "old"
    assert [*tmp_path.iterdir()] == [target]
