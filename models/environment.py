"""Where a run was made, for its report."""

import json
import os
import platform
import sys
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("torch", "lightning", "monai", "nibabel", "nilearn", "numpy", "lightning-hybrid")


def environment() -> dict[str, str]:
    """Names and versions of what decides a result, and of the machine; no host or user name."""
    found = {
        "date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "python": platform.python_version(),
        "processors": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
    }
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["accelerators"] = ", ".join(names)
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # used from a clone, or not at all
            continue
    return found


def save_environment(folder: Path) -> None:
    """Write ``environment.json`` with the environment and the command line."""
    record = {"command": ["python", "-m", "models", *sys.argv[1:]], "environment": environment()}
    (folder / "environment.json").write_text(json.dumps(record, indent=2) + "\n")
