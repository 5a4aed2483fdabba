"""Diagnosis words and tasks: classes to tell apart, or a number to tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import DataError

TaskName = Literal["ad_nc", "pmci_smci", "three_way", "age", "mmse"]

_WORDS = {
    "NC": ("cn", "nc", "nl", "normal", "control"),
    "SMC": ("smc",),
    "MCI": ("mci", "emci", "lmci"),
    "AD": ("ad", "dementia", "dem"),
    "sMCI": ("smci",),
    "pMCI": ("pmci",),
    "rMCI": ("rmci", "regmci"),
    "uMCI": ("umci", "ukmci", "usmci"),
    "OD": ("od", "other dementia"),  # demented of another cause
    "other": ("other",),  # impaired, and none of these, or not yet certain
}
CONCLUSIONS = {"sMCI": "", "pMCI": "", "rMCI": "reverted", "uMCI": "unstable"}
"""What is said of an MCI when its future is known, and why some of them have no class."""
_ALIASES = {word: name for name, words in _WORDS.items() for word in words}


@dataclass(frozen=True)
class Task:
    """What is to be told from a scan.

    Attributes:
        name: what settings and files call it, e.g. ``ad_nc``.
        class_names: diagnoses, in the order of the labels; of a number its name alone.
        needs_history: whether the classes cannot be told from the research group alone.
        number: field of a scan's record that is to be told; empty: a class is.
        everybody: whether scans take part whatever the diagnosis.
    """

    name: str
    class_names: tuple[str, ...]
    needs_history: bool = False
    number: str = ""
    everybody: bool = False

    def label(self, dx: str) -> int | None:
        """Label of a diagnosis, or None when it has no part in the task."""
        if self.number:
            return 0 if self.everybody or dx == "NC" else None
        if dx in ("sMCI", "pMCI") and dx not in self.class_names:
            dx = "MCI"
        return self.class_names.index(dx) if dx in self.class_names else None


TASKS: dict[str, Task] = {
    "ad_nc": Task("ad_nc", ("NC", "AD")),
    "pmci_smci": Task("pmci_smci", ("sMCI", "pMCI"), needs_history=True),
    "three_way": Task("three_way", ("NC", "MCI", "AD")),
    "age": Task("age", ("age",), number="age"),
    "mmse": Task("mmse", ("MMSE",), number="mmse", everybody=True),
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
