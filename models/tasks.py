from collections.abc import Sequence
from typing import Literal

TaskName = Literal["ad_nc", "pmci_smci", "three_way", "age", "mmse"]

CLASSES: dict[str, tuple[str, ...]] = {
    "ad_nc": ("NC", "AD"),
    "pmci_smci": ("sMCI", "pMCI"),
    "three_way": ("NC", "MCI", "AD"),
    "age": ("age",),
    "mmse": ("MMSE",),
}
"""Class names of each task; the index is the label, and the last one is the disease. A task with
one name is a number of that name."""
UNITS = {"age": "years", "MMSE": "points"}
"""Of the numbers."""


def title_of(task: str) -> str:
    """What is told, for titles: ``AD against NC``, or the name of a number."""
    return " against ".join(reversed(classes_of(task)))


def is_number(class_names: Sequence[str]) -> bool:
    """Whether these names are of a task that tells a number, and no class."""
    return len(class_names) == 1


def classes_of(task: str) -> tuple[str, ...]:
    """Class names of a task.

    Raises:
        ValueError: If there is no such task.
    """
    if task not in CLASSES:
        raise ValueError(f"There is no task {task!r}; choose one of {', '.join(CLASSES)}.")
    return CLASSES[task]
