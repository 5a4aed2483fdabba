"""What a rank knows of one tensor of another rank."""

from typing import Any

import torch

from lightning_hybrid.remote.proxy import Remote, RemoteKind


def test_a_change_in_place_counts_from_the_first_fetch_until_the_owner_has_it() -> None:
    nobody: Any = None
    value = torch.zeros(2)
    remote = Remote(nobody, RemoteKind.BUFFER, "mean", value)
    value += 1
    assert not remote.changed  # what was never fetched is not ours to change
    remote.seen = 0
    assert remote.changed
    remote.note_equal()
    assert not remote.changed
    value += 1
    assert remote.changed


def test_a_write_that_no_version_counts_is_noted() -> None:
    nobody: Any = None
    remote = Remote(nobody, RemoteKind.BUFFER, "mean", torch.zeros(2))
    remote.written = True
    assert remote.changed
    remote.note_equal()
    assert not remote.changed
