"""The wheel, built and installed as a user does, trains with two stages."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "first_script.py"


def run(folder: Path, *command: object) -> str:
    done = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def numbers(output: str) -> list[float]:
    [line] = [line for line in output.splitlines() if line.startswith("torch ")]
    return [float(word) for word in line.partition(": ")[2].split()]


@pytest.mark.conformance
@pytest.mark.distributed
def test_the_wheel_trains_two_stages_as_one_device(tmp_path: Path) -> None:
    """Its dependencies are this environment's; `make newest` installs them without constraints."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(tmp_path, *pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ROOT)
    [wheel] = tmp_path.glob("lightning_hybrid-*.whl")
    with zipfile.ZipFile(wheel) as file:
        tops = {name.partition("/")[0] for name in file.namelist()}
    assert tops == {"lightning_hybrid", "-".join(wheel.name.split("-")[:2]) + ".dist-info"}

    own = tmp_path / "environment"
    run(tmp_path, sys.executable, "-m", "venv", "--without-pip", own)
    run(tmp_path, *pip, "--python", own / "bin" / "python", "install", "--no-deps", wheel)
    [packages] = own.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    place = "import lightning_hybrid; print(lightning_hybrid.__file__)"
    assert run(tmp_path, own / "bin" / "python", "-c", place).startswith(str(packages))

    two, one = (run(tmp_path, own / "bin" / "python", SCRIPT, stages) for stages in (2, 1))
    assert numbers(two) == pytest.approx(numbers(one), rel=1e-10)
