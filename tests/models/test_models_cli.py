import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
import yaml
from cohorts import made

from datamodules.synth import CohortSpec, generate
from models import ResAttNetClassifier
from models.cli import main
from models.commands.training import _refuse_no_truth
from models.drawing import FIGURES
from models.errors import UseError
from models.results import load_metrics
from models.tables import read_table

pytestmark = [
    # a cohort this small is read faster than a worker process starts
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
]


@pytest.fixture(scope="module")
def cohort(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cohort")
    (folder / "adni").symlink_to(made(tmp_path_factory, CohortSpec((("AD", 6), ("NC", 6)), 8.0)))
    return folder


def smaller(name: str, cohort: Path, folder: Path) -> str:
    """The settings of ``configs/<name>.yaml``, for a tiny network and cohort, on one device."""
    original = Path(__file__).parents[2] / "configs" / f"{name}.yaml"
    settings = yaml.safe_load(original.read_text())
    trainer, data = settings["trainer"], settings["data"]
    trainer.pop("strategy", None)
    trainer |= {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "enable_progress_bar": False}
    trainer["log_every_n_steps"] = 1  # an epoch has one
    for logger in trainer["logger"]:
        logger["init_args"]["save_dir"] = str(folder)
    data |= {"root": str(cohort / "adni"), "cache_dir": str(cohort / "cache"), "spacing_mm": 8.0}
    data |= {"spatial_shape": [24, 32, 24], "val_fraction": 0.3, "test_fraction": 0.3}
    data["num_workers"] = 0
    settings["model"] |= {"widths": [8, 8, 16, 16]}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return str(folder / "config.yaml")


@pytest.fixture
def config(cohort, tmp_path) -> str:
    return smaller("demo", cohort, tmp_path)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch) -> None:
    # Lightning 2.6 calls jsonargparse by names that its newest version calls old
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


def command(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["models", *arguments])
    main()


def refused(monkeypatch, capsys, *arguments: str) -> str:
    """What a command says that ends at once."""
    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, *arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


@pytest.fixture(scope="module")
def written(cohort, tmp_path_factory) -> str:
    """The configuration as ``fit`` writes it, with every option that ``fit`` has."""
    folder, out = tmp_path_factory.mktemp("written"), StringIO()
    config = smaller("demo", cohort, folder)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
        with pytest.raises(SystemExit, match="0"):
            command(patch, "fit", "--config", config, "--print_config")
    assert "weights_only" in out.getvalue()
    (folder / "written.yaml").write_text(out.getvalue())
    return str(folder / "written.yaml")


def checkpoint(run: Path) -> str:
    return str(run / "checkpoints" / "best.ckpt")


@pytest.mark.conformance
def test_every_run_has_one_folder_of_its_own(config, tmp_path, monkeypatch, capsys) -> None:
    command(monkeypatch, "fit", "--config", config)
    run = tmp_path / "run" / "version_0"
    for name in ("config.yaml", "metrics.csv", "tensorboard", "checkpoints/best.ckpt"):
        assert (run / name).exists(), name
    assert f"best checkpoint: {checkpoint(run)}" in capsys.readouterr().out

    best = ["--config", str(run / "config.yaml"), "--ckpt_path", checkpoint(run)]
    command(monkeypatch, "validate", *best)
    command(monkeypatch, "test", *best)
    metrics = load_metrics(run / "test_metrics.json")
    assert metrics.keys() >= {"test/accuracy", "test/mcc", "test/loss"}
    command(monkeypatch, "predict", *best)
    options = ["--subjects", "2", "--layer", "layer1", "--methods", "[gradcam]"]
    command(monkeypatch, "explain", *best, *options)
    explained = read_table(run / "explain" / "explain.tsv")
    predicted = {row["image_id"]: row for row in read_table(run / "predictions.tsv")}
    assert {row["label"] for row in explained} == {"0", "1"}
    assert {row["network"] for row in explained} == {"trained", "untrained"}
    assert len(list((run / "explain").glob("999_S_*_gradcam_layer1.png"))) == 2
    for row in explained:
        seen = predicted[row["image_id"]]
        assert float(row["probability"]) == pytest.approx(float(seen["p_AD"]), abs=2e-4)
        assert seen["class"] == ("AD" if row["label"] == "1" else "NC")
        assert seen["sex"] in ("F", "M")
        assert seen["session"]
    assert read_table(run / "test_predictions.tsv") == list(predicted.values())
    ids = ["subject", "image_id", "label", "class", "predicted", "p_NC", "p_AD"]
    for row in predicted.values():
        assert list(row) == [*ids, "session", "age", "sex", "site", "scanner", "fold"]
        assert row["predicted"] == ("AD" if float(row["p_AD"]) > 0.5 else "NC")
        assert 40 < float(row["age"]) < 100
        assert row["site"]

    before = (run / "test_predictions.tsv").read_bytes()
    command(monkeypatch, "test", *best, "--data.shuffle_labels", "true")  # other settings
    assert (run / "test_predictions.tsv").read_bytes() == before
    assert (run / "test_metrics_2.json").exists()
    assert (run / "test_predictions_2.tsv").exists()
    pictures = [f"test_{what}{n}.png" for n in ("", "_2") for what in FIGURES]
    assert sorted(path.name for path in run.glob("*.png")) == sorted(pictures)
    before = (run / "predictions.tsv").read_bytes()
    command(monkeypatch, "predict", *best, "--data.shuffle_labels", "true")
    assert (run / "predictions.tsv").read_bytes() == before
    assert (run / "predictions_2.tsv").exists()

    command(monkeypatch, "report", "--config", str(run / "config.yaml"))
    page = (run / "report.html").read_text()
    for title in ("Cohort", "Training", "Test", "What the network looks at", "Settings"):
        assert f">{title}</h" in page
    assert page.count("data:image/png;base64,") >= 7  # curves, 3 figures, 2 cases, 2 means
    assert "http" not in re.sub("<pre>.*?</pre>", "", page, flags=re.S)

    said = refused(monkeypatch, capsys, "explain", *best, "--data.seed", "1")
    assert "trained on another split" in said
    said = refused(monkeypatch, capsys, "explain", *best, "--layer", "layer9")
    assert re.search(r"no layer 'layer9'; close to it: .*layer4", said)
    said = refused(monkeypatch, capsys, "explain", *best, "--truth", str(tmp_path / "nowhere"))
    assert "nowhere is no folder" in said
    command(monkeypatch, "fit", "--config", config)
    assert sorted(path.name for path in run.parent.iterdir()) == ["version_0", "version_1"]


@pytest.mark.parametrize("name", ["validate", "test", "predict", "explain"])
def test_what_fit_wrote_serves_every_command_and_a_missing_checkpoint_is_told(
    written, name, monkeypatch, capsys
) -> None:
    said = refused(monkeypatch, capsys, name, "--config", written, "--ckpt_path", "none.ckpt")
    assert re.search(r"no checkpoint .*none\.ckpt; that folder holds none", said)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--data.spacing", "--data.spacing_mm"),
        ("--data.spatial", "--data.spatial_shape"),
        ("--modle.depth", "--model.depth"),
    ],
)
def test_an_option_cut_short_or_mistyped_is_refused_with_the_whole_one(
    config, given, meant, monkeypatch, capsys
) -> None:
    said = refused(monkeypatch, capsys, "fit", "--config", config, given, "3")
    assert f"For {given}, is it {meant}?" in said


def test_a_folder_that_cannot_be_written_is_told_without_a_traceback(
    config, tmp_path, monkeypatch, capsys
) -> None:
    (tmp_path / "run").write_text("a file where the run's folder should be")
    said = refused(monkeypatch, capsys, "fit", "--config", config)
    assert re.search(r"folder of the run cannot be written.*save_dir", said)


def test_a_report_wants_the_folder_of_a_run_that_it_can_write_to(
    tmp_path, monkeypatch, capsys
) -> None:
    said = refused(monkeypatch, capsys, "report", str(tmp_path))
    assert "is not the folder of a run: it has no config.yaml" in said
    (tmp_path / "config.yaml").write_text("a: 1")
    (tmp_path / "report.html").mkdir()
    said = refused(monkeypatch, capsys, "report", str(tmp_path))
    assert f"{tmp_path / 'report.html'} cannot be written" in said


def test_folds_name_a_configuration_that_is_missing_and_a_folder_that_cannot_be_written(
    config, tmp_path, monkeypatch, capsys
) -> None:
    (tmp_path / "file").write_text("no folder")
    out = ["--folds", "2", "--out", str(tmp_path / "file")]
    said = refused(monkeypatch, capsys, "folds", "--config", "none.yaml", *out)
    assert "There is no configuration none.yaml" in said
    said = refused(monkeypatch, capsys, "folds", "--config", config, *out)
    assert f"Results cannot be written to {tmp_path / 'file'}" in said


def test_masks_of_none_of_the_scans_are_refused(tmp_path) -> None:
    for folder, said in ((tmp_path, "no mask of any held-out"), (tmp_path / "no", "is no folder")):
        with pytest.raises(UseError, match=rf"--truth {folder} .*{said}.*I9000001\.nii\.gz"):
            _refuse_no_truth(folder, ["I9000001"])
    (tmp_path / "I9000001.nii.gz").touch()
    _refuse_no_truth(tmp_path, ["I9000000", "I9000001"])


@pytest.mark.parametrize("name", ["validate", "test", "predict", "explain"])
def test_untrained_weights_are_never_evaluated(config, name, monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit):
        command(monkeypatch, name, "--config", config)
    assert "ckpt_path" in capsys.readouterr().err


def test_fewer_epochs_than_the_warm_up_are_told_without_a_traceback(
    cohort, tmp_path, monkeypatch, capsys
):
    said = refused(monkeypatch, capsys, "fit", "--config", smaller("modern", cohort, tmp_path))
    assert "warmup_epochs=3" in said
    assert "max_epochs is 1" in said
    assert "--model.warmup_epochs 0" in said


def test_trouble_with_the_data_is_told_without_a_traceback(
    config, tmp_path, monkeypatch, capsys
) -> None:
    root = str(tmp_path / "nowhere")
    assert root in refused(monkeypatch, capsys, "fit", "--config", config, "--data.root", root)


@pytest.mark.parametrize("name", ["paper", "modern"])
def test_the_recipes_are_understood(name, monkeypatch, capsys) -> None:
    path = Path(__file__).parents[2] / "configs" / f"{name}.yaml"
    with pytest.raises(SystemExit, match="0"):
        command(monkeypatch, "fit", "--config", str(path), "--print_config")
    assert "learning_rate" in capsys.readouterr().out


@pytest.mark.conformance
@pytest.mark.parametrize("name", ["paper", "modern"])
def test_the_recipes_train_and_what_they_leave_can_be_tested(
    name, cohort, tmp_path, monkeypatch
) -> None:
    config = smaller(name, cohort, tmp_path)
    # the warm-up of the modern one takes three
    command(monkeypatch, "fit", "--config", config, "--trainer.max_epochs", "4")
    run = tmp_path / name / "version_0"
    command(monkeypatch, "test", "--config", config, "--ckpt_path", checkpoint(run))
    assert 0 <= load_metrics(run / "test_metrics.json")["test/accuracy"] <= 1


def test_help_names_every_command(monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit, match="0"):
        command(monkeypatch, "--help")
    shown = capsys.readouterr().out
    assert all(
        name in shown for name in ("python -m models", "fit", "explain", "report RUN", "folds")
    )


def finished(*arguments: str) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, "-m", "models", *arguments],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.conformance
def test_a_network_of_shuffled_labels_is_scored_beside_the_trained_one(
    config, cohort, tmp_path, monkeypatch, capsys
) -> None:
    command(monkeypatch, "fit", "--config", config)
    command(monkeypatch, "fit", "--config", config, "--data.shuffle_labels", "true")
    runs = [tmp_path / "run" / f"version_{number}" for number in (0, 1)]
    explaining = ["explain", "--config", str(runs[0] / "config.yaml")]
    explaining += ["--ckpt_path", checkpoint(runs[0]), "--methods", "[gradient]", "--subjects", "1"]
    explaining += ["--truth", str(cohort / "adni" / "truth" / "planted"), "--shuffled_ckpt"]
    command(monkeypatch, *explaining, checkpoint(runs[1]))
    rows = {r["network"]: r for r in read_table(runs[0] / "explain" / "localisation.tsv")}
    assert rows.keys() == {"trained", "untrained", "shuffled"}
    assert all(row["scored"] for row in rows.values())
    assert rows["shuffled"]["like_trained"] != rows["untrained"]["like_trained"] != ""
    # the same weights as a network of shuffled labels: the same maps
    command(monkeypatch, *explaining, checkpoint(runs[0]))
    rows = {r["network"]: r for r in read_table(runs[0] / "explain" / "localisation.tsv")}
    assert float(rows["shuffled"]["like_trained"]) == pytest.approx(1)
    assert rows["shuffled"]["times_chance"] == rows["trained"]["times_chance"]

    other = torch.load(checkpoint(runs[1]), weights_only=True)
    other["ADNIDataModule"]["preprocessing"]["spacing_mm"] = 2.0
    torch.save(other, tmp_path / "other.ckpt")
    said = refused(monkeypatch, capsys, *explaining, str(tmp_path / "other.ckpt"))
    assert "OTHER_PREPROCESSING" in said
    assert "spacing_mm 2.0 there, 8.0 here" in said


@pytest.mark.conformance
def test_three_classes_are_trained_and_tested(tmp_path, monkeypatch) -> None:
    spec = CohortSpec(subjects=(("AD", 5), ("NC", 5), ("sMCI", 5)), resolution_mm=8.0)
    generate(str(tmp_path / "adni"), spec, workers=1)
    config = smaller("demo", tmp_path, tmp_path)
    command(monkeypatch, "fit", "--config", config, "--data.task", "three_way")
    run = tmp_path / "run" / "version_0"
    settings = ["--config", str(run / "config.yaml"), "--ckpt_path", checkpoint(run)]
    command(monkeypatch, "test", *settings)
    rows = read_table(run / "test_predictions.tsv")
    assert {row["class"] for row in rows} == {"NC", "MCI", "AD"}
    for row in rows:
        chances = {name: float(row[f"p_{name}"]) for name in ("NC", "MCI", "AD")}
        assert sum(chances.values()) == pytest.approx(1, abs=2e-3)
        assert row["predicted"] == max(chances, key=chances.__getitem__)
    assert "test/auroc" in load_metrics(run / "test_metrics.json")


@pytest.mark.conformance
@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["ddp", "lightning_hybrid.HybridGabraStrategy"])
def test_replicas_write_one_table_and_the_metrics_of_one_device(config, tmp_path, strategy) -> None:
    arguments = ["--config", config, "--trainer.strategy", strategy, "--trainer.devices", "2"]
    if strategy != "ddp":
        arguments += ["--trainer.strategy.data_parallel_size", "2"]
        finished("fit", "--config", config)
    else:
        done = finished("fit", *arguments)
        assert "MEMBER: 2/2" in done.stderr + done.stdout
    run = tmp_path / "run" / "version_0"
    ResAttNetClassifier.load_from_checkpoint(checkpoint(run), map_location="cpu")
    assert not (tmp_path / "run" / "version_1").exists()
    best = ["--ckpt_path", checkpoint(run)]
    finished("test", "--config", config, *best)
    alone = read_table(run / "test_predictions.tsv"), load_metrics(run / "test_metrics.json")
    finished("test", *arguments, *best)
    newest = max(run.glob("test_metrics*.json"), key=lambda p: p.stat().st_mtime)
    table = run / newest.name.replace("metrics", "predictions").replace(".json", ".tsv")
    together = read_table(table), load_metrics(newest)
    assert [row["image_id"] for row in together[0]] == [row["image_id"] for row in alone[0]]
    for name, value in alone[1].items():
        if name != "test/loss":  # Lightning's mean over ranks counts repeated scans
            assert together[1][name] == pytest.approx(value, abs=1e-4), name


@pytest.mark.conformance
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("devices", "options", "planned"),
    [
        (4, {"data_parallel_size": 2, "pipeline_parallel_size": 2}, "2 replicas x 2 stages"),
        (2, {"pipeline_parallel_size": 2, "schedule": "looped"}, r"2 devices with \d+ stages"),
    ],
    ids=["two replicas of two stages", "two stages on each device"],
)
def test_what_stages_trained_is_explained_with_the_weights_that_they_test(
    config, tmp_path, devices, options, planned
) -> None:
    strategy = "lightning_hybrid.HybridGabraStrategy"
    arguments = ["--config", config, "--trainer.strategy", strategy]
    arguments += ["--trainer.devices", str(devices)]
    arguments += [f"--trainer.strategy.{name}={value}" for name, value in options.items()]
    done = finished("fit", *arguments)
    assert re.search(planned, done.stdout + done.stderr)
    run = tmp_path / "run" / "version_0"
    finished("test", *arguments, "--ckpt_path", checkpoint(run))
    explaining = ["--subjects", "1", "--methods", "[hirescam]"]
    finished("explain", "--config", config, "--ckpt_path", checkpoint(run), *explaining)
    tested = {r["image_id"]: float(r["p_AD"]) for r in read_table(run / "test_predictions.tsv")}
    rows = [r for r in read_table(run / "explain" / "explain.tsv") if r["network"] == "trained"]
    assert {row["image_id"] for row in rows} == tested.keys()
    for row in rows:
        assert float(row["probability"]) == pytest.approx(tested[row["image_id"]], abs=2e-4)


@pytest.mark.conformance
@pytest.mark.distributed
def test_blocks_that_run_again_in_two_stages_train_the_weights_of_one_device(
    config, tmp_path
) -> None:
    stages = ["--trainer.strategy", "lightning_hybrid.HybridGabraStrategy"]
    sizes = {"data_parallel_size": 1, "pipeline_parallel_size": 2, "num_microbatches": 1}
    stages += [text for n, size in sizes.items() for text in (f"--trainer.strategy.{n}", str(size))]
    stages += ["--trainer.devices", "2"]
    finished("fit", "--config", config)
    finished("fit", "--config", config, *stages, "--model.recompute", "[1,2]")
    weights = [
        torch.load(checkpoint(tmp_path / "run" / f"version_{n}"), weights_only=True)["state_dict"]
        for n in (0, 1)
    ]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.conformance
def test_folds_are_trained_tested_and_summed_up_and_a_second_call_repeats_none(
    config, tmp_path
) -> None:
    options = ["--config", config, "--folds", "2", "--out", str(tmp_path / "cv")]
    finished("folds", *options)
    rows = {row["metric"]: row for row in read_table(tmp_path / "cv" / "folds.tsv")}
    assert rows["accuracy"]["folds"] == "2"
    each = [load_metrics(p)["test/accuracy"] for p in (tmp_path / "cv").rglob("test_metrics.json")]
    assert float(rows["accuracy"]["mean"]) == pytest.approx(sum(each) / 2, abs=1e-4)
    assert "$ python" not in finished("folds", *options).stdout


@pytest.mark.conformance
def test_folds_without_a_test_set_predict_everybody_once(config, tmp_path) -> None:
    out = tmp_path / "cv"
    options = ["--config", config, "--folds", "3", "--out", str(out)]
    finished("folds", *options, "--data.test_fraction", "0")
    rows = read_table(out / "out_of_fold.tsv")
    assert len({row["subject"] for row in rows}) == len(rows) == 12
    assert {row["run"] for row in rows} == {"fold_0", "fold_1", "fold_2"}
    summed = {row["metric"]: row for row in read_table(out / "folds.tsv")}
    right = sum(row["class"] == row["predicted"] for row in rows)
    assert float(summed["accuracy"]["vote"]) == pytest.approx(right / 12, abs=1e-4)
    assert summed["accuracy"]["vote_low"]
