"""Run every benchmark of this folder: ``python -m benchmarks``, or ``make bench``."""

import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    failed = False
    for script in sorted(Path(__file__).parent.glob("[!_]*.py")):
        print(f"\n== {script.name}", flush=True)
        failed |= subprocess.run([sys.executable, str(script)], check=False).returncode != 0
    sys.exit(failed)
