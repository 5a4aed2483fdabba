"""Diagnosis words and classification tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import DataError

TaskName = Literal["ad_nc", "pmci_smci", "three_way"]

_WORDS = {
    "NC": ("cn", "nc", "nl", "normal", "control"),
    "SMC": ("smc",),
    "MCI": ("mci", "emci", "lmci"),
    "AD": ("ad", "dementia", "dem"),
    "sMCI": ("smci",),
    "pMCI": ("pmci",),
    "rMCI": ("rmci", "regmci"),
    "uMCI": ("umci", "ukmci", "usmci"),
    "other": ("other",),  # impaired, and none of these: dementia of another cause, not yet certain
}
CONCLUSIONS = {"sMCI": "", "pMCI": "", "rMCI": "reverted", "uMCI": "unstable"}
"""What is said of an MCI when its future is known, and why some of them have no class."""
_ALIASES = {word: name for name, words in _WORDS.items() for word in words}


@dataclass(frozen=True)
class Task:
    """A classification task.

    Attributes:
        name: what settings and files call it, e.g. ``ad_nc``.
        class_names: diagnoses, in the order of the labels.
        needs_history: whether the classes cannot be told from the research group alone.
    """

    name: str
    class_names: tuple[str, ...]
    needs_history: bool = False

    def label(self, dx: str) -> int | None:
        """Label of a diagnosis, or None when it has no part in the task."""
        if dx in ("sMCI", "pMCI") and dx not in self.class_names:
            dx = "MCI"
        return self.class_names.index(dx) if dx in self.class_names else None


TASKS: dict[str, Task] = {
    "ad_nc": Task("ad_nc", ("NC", "AD")),
    "pmci_smci": Task("pmci_smci", ("sMCI", "pMCI"), needs_history=True),
    "three_way": Task("three_way", ("NC", "MCI", "AD")),
}


def task_named(name: str) -> Task:
    """The task of a name.

    Raises:
        DataError: there is none.
    """
    if name not in TASKS:
        raise DataError("BAD_TASK", f"task {name!r}", action=f"use one of {', '.join(TASKS)}")
    return TASKS[name]


def diagnosis(word: str) -> str | None:
    """The diagnosis that a table's word stands for, or None for an unknown word."""
    return _ALIASES.get(word.strip().lower())


def known_words() -> str:
    """All accepted words, for messages."""
    return ", ".join(sorted(_ALIASES))
