from typing import Literal

TaskName = Literal["ad_nc", "pmci_smci", "three_way"]

CLASSES: dict[str, tuple[str, ...]] = {
    "ad_nc": ("NC", "AD"),
    "pmci_smci": ("sMCI", "pMCI"),
    "three_way": ("NC", "MCI", "AD"),
}
"""Class names of each task; the index is the label, and the last one is the disease."""


def classes_of(task: str) -> tuple[str, ...]:
    """Class names of a task.

    Raises:
        ValueError: If there is no such task.
    """
    if task not in CLASSES:
        raise ValueError(f"There is no task {task!r}; choose one of {', '.join(CLASSES)}.")
    return CLASSES[task]
