"""The Snakefile as users run it: a tiny grid with the real engine, from configuration to report."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fake_devices import environment
from kvstudy.grid.store import CELL_FILES, Layout


def snakemake(checkout: Path, results: Path, *args: str, study: str = "tiny") -> subprocess.CompletedProcess[str]:
    """Run snakemake in a folder of its own, so that runs of the checkout are not touched."""
    work = results.parent
    for name in ("Snakefile", "workflow", "profiles", "conf", "envs", "reports", "src"):
        if not (work / name).exists():
            (work / name).symlink_to(checkout / name)
    split = args.index("--config") + 1 if "--config" in args else None
    extra = list(args[split:]) if split else []
    before = list(args[: split - 1]) if split else list(args)
    return subprocess.run(
        [sys.executable, "-m", "snakemake", "--cores", "2", *before, "--config", f"study={study}", *extra],
        cwd=work,
        env=environment(work),
        text=True,
        capture_output=True,
        timeout=560,
        check=False,
    )


@pytest.fixture(scope="module")
def finished(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a whole run of study=tiny; made once for this module."""
    results = tmp_path_factory.mktemp("work") / "results"
    run = snakemake(checkout, results)
    assert run.returncode == 0, run.stdout + run.stderr
    return results


def cells(results: Path, study: str = "tiny") -> list[str]:
    plan = json.loads(Layout(results).plan(study).read_text())
    return [cell["id"] for cell in plan["cells"]]


def test_a_run_ends_in_whole_cells_and_a_report(finished: Path) -> None:
    layout = Layout(finished)
    assert len(cells(finished)) == 6
    for cell in cells(finished):
        assert {path.name for path in layout.cell(cell).iterdir()} >= set(CELL_FILES)
        summary = json.loads((layout.cell(cell) / "summary.json").read_text())
        assert summary["outcome"] == "ok"
        assert summary["counts"]["ok"] > 0
        assert summary["metrics"]["throughput.output"]["value"] > 0
    pdf = layout.study("tiny") / "report.pdf"
    assert pdf.read_bytes().startswith(b"%PDF")
    assert list((layout.study("tiny") / "figures").glob("*.pdf"))
    assert list((layout.study("tiny") / "tables").glob("*.tex"))
    assert not list((finished / "store").glob(".*")), "half a cell was left behind"


def test_every_cell_is_one_run_of_mlflow(finished: Path) -> None:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{finished}/mlflow.db")
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    logged = [run.data.tags["cell_id"] for run in runs if "cell_id" in run.data.tags]
    # Those of quality, too, which the store holds beside the measured ones.
    assert sorted(logged) == sorted(path.name for path in (finished / "store").iterdir())
    assert set(logged) > set(cells(finished))


def test_a_second_run_does_nothing(checkout: Path, finished: Path) -> None:
    run = snakemake(checkout, finished)
    assert run.returncode == 0, run.stderr
    assert "Nothing to be done" in run.stdout + run.stderr


def test_the_report_is_rebuilt_from_cells_alone(checkout: Path, finished: Path) -> None:
    """And of it what is missing: a figure that is there is not drawn again."""
    view = Layout(finished).study("tiny")
    lost = sorted((view / "figures").glob("ttft_vs_rate.*"))
    before = {path: path.stat().st_mtime_ns for path in (*finished.glob("store/*/*"), *view.glob("figures/*"))}
    for path in (*lost, view / "report.pdf"):
        path.unlink()
    run = snakemake(checkout, finished, "report")
    assert run.returncode == 0, run.stderr
    assert len(lost) > 2 and all(path.is_file() for path in (*lost, view / "report.pdf"))
    assert {path for path, at in before.items() if path.stat().st_mtime_ns != at} == set(lost)


def test_a_lost_cell_is_measured_again_and_no_other(checkout: Path, finished: Path) -> None:
    """Asked for by its visit's marker: what follows is made by rules that other tests run."""
    layout = Layout(finished)
    lost, *kept = cells(finished)
    plan = json.loads(layout.plan("tiny").read_text())
    (visit,) = (visit["id"] for visit in plan["visits"] if lost in visit["cells"])
    times = {cell: (layout.cell(cell) / "summary.json").stat().st_mtime_ns for cell in kept}
    shutil.rmtree(layout.cell(lost))
    run = snakemake(checkout, finished, f"results/tiny/visits/{visit}.json")
    assert run.returncode == 0, run.stderr
    assert (layout.cell(lost) / "summary.json").is_file()
    assert times == {cell: (layout.cell(cell) / "summary.json").stat().st_mtime_ns for cell in kept}


def test_a_new_rate_measures_only_the_new_cells(checkout: Path, finished: Path) -> None:
    run = snakemake(checkout, finished, "--dry-run", "--config", 'overrides=["load.rate=4,8,16","framework=full"]')
    assert run.returncode == 0, run.stderr
    assert "measure" in run.stdout + run.stderr


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (["study=tinny"], "did you mean 'tiny'"),
        (["modle=tiny-llama"], "unknown key 'modle'"),
        (["overrides=+load.rate=3"], "refused"),
    ],
)
def test_bad_input_is_one_clear_line(checkout: Path, results: Path, config: list[str], says: str) -> None:
    run = snakemake(checkout, results, "--dry-run", "--config", *config)
    assert run.returncode != 0
    assert says in run.stderr
    assert "Traceback" not in run.stderr
    assert not (results / "store").exists()


def test_more_gpus_than_handed_out_is_refused(checkout: Path, results: Path) -> None:
    config = ["hardware=gpu", "model=llama-3.1-70b", "framework=vllm"]
    run = snakemake(checkout, results, "--dry-run", "--resources", "gpu=2", "--config", *config)
    assert run.returncode != 0
    assert "needs 4 GPUs" in run.stderr


def test_lint_finds_nothing(checkout: Path, results: Path) -> None:
    """Environments are venvs built by a rule, so the lint that asks for conda does not apply."""
    run = snakemake(checkout, results, "--lint")
    titles = [line.strip() for line in (run.stdout + run.stderr).splitlines() if line.startswith("    * ")]
    other = [title for title in titles if "Specify a conda environment or container" not in title]
    assert not other, run.stdout + run.stderr
