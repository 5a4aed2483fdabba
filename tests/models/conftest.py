import shutil
from pathlib import Path

import pytest
from cohorts import made, once

from datamodules.synth import CohortSpec
from models.cli import main

COHORT = CohortSpec((("AD", 6), ("NC", 6)), 8.0)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a cohort ``adni``, another one ``new`` of the same kind, and ``best.ckpt``.

    Not to be changed.
    """
    from test_models_cli import checkpoint, smaller

    def make(folder: Path) -> None:
        (folder / "adni").symlink_to(made(tmp_path_factory, COHORT))
        new = CohortSpec((("AD", 4), ("NC", 4)), 8.0, seed=7)
        (folder / "new").symlink_to(made(tmp_path_factory, new))
        config = smaller("demo", folder, folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
            patch.setattr("sys.argv", ["models", "fit", "--config", config])
            main()
        shutil.copy(checkpoint(folder / "run" / "version_0"), folder / "best.ckpt")

    return once(tmp_path_factory, "trained", make)
