"""With this folder in PYTHONPATH, every Python has the emulated devices from its start."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "helpers")]

import emulated_cuda  # noqa: E402
import emulated_nccl  # noqa: E402

emulated_cuda.emulate()
emulated_nccl.emulate()
