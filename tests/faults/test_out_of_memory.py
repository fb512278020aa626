"""Real want of memory: allocations that the kernel refuses, in our engine and in vLLM, become results."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from test_workflow import checkout_at, kvstudy
from trial import whole_cells

from kvstudy.frameworks.base import ServerProcess
from kvstudy.frameworks.launch import environment_folder, make_server
from kvstudy.frameworks.lease import Lease
from kvstudy.grid.plan import model_id
from kvstudy.grid.schema import Visit
from kvstudy.grid.store import Layout, read_summary
from kvstudy.measure.visit import measure_visit

Limit = Callable[[ServerProcess], None]


@pytest.fixture(autouse=True)
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture(scope="module")
def work(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with the tiny model prepared."""
    folder = checkout_at(tmp_path_factory.mktemp("memory"), checkout)
    planned = kvstudy(folder, "grid", "study=tiny", "framework=full")
    assert planned.returncode == 0, planned.stderr
    (model,) = (folder / "results" / "plan" / "models").glob("*.json")
    out = folder / "results" / "models" / model.stem
    made = kvstudy(folder, "prepare", "--model", str(model), "--out", str(out))
    assert made.returncode == 0, made.stderr
    return folder


def visit(work: Path, *overrides: str) -> Visit:
    planned = kvstudy(work, "grid", *overrides)
    assert planned.returncode == 0, planned.stderr
    (path,) = (work / "results" / "plan").glob("*/visits/*.json")
    return Visit.model_validate_json(path.read_bytes())


def measured(work: Path, asked: Visit, limit: Limit | None = None, shell_limit: int | None = None) -> list[str]:
    """Outcomes of a visit whose server is started under `ulimit -d` (KiB), or limited when it is up."""
    layout = Layout(work / "results")
    deployment = asked.deployment

    def make(folder: Path, held: Lease) -> ServerProcess:
        environment = environment_folder(deployment, layout)
        server = make_server(deployment, layout.model(model_id(deployment)), environment, folder, held)
        if shell_limit is not None:
            command = ["sh", "-c", f'ulimit -d {shell_limit}; exec "$@"', "sh", *server.command()]
            server.command = lambda: command  # type: ignore[method-assign]
        if limit is not None:
            real = server.bring_up

            def bring_up(bound_s: float, waiting: Callable[[float], None] | None = None) -> None:
                real(bound_s, waiting)
                limit(server)

            server.bring_up = bring_up  # type: ignore[method-assign]
        return server

    model = layout.model(model_id(deployment))
    outcomes = measure_visit(asked, work / "results", make=make, model_dir=model)
    assert set(outcomes.cells) <= set(whole_cells(work / "results"))
    return sorted(outcomes.cells.values())


def causes(work: Path, asked: Visit) -> list[str]:
    layout = Layout(work / "results")
    return [str(read_summary(layout.cell(cell.cell_id))["cause"]) for cell in asked.cells]


@pytest.mark.long
def test_an_engine_that_does_not_fit_is_out_of_memory(work: Path) -> None:
    asked = visit(work, "study=tiny", "framework=full", "kv_memory_mib=16000")
    assert measured(work, asked, shell_limit=6 << 20) == ["oom", "oom"]
    assert all("memory" in cause for cause in causes(work, asked)), causes(work, asked)


def test_an_engine_that_runs_out_when_it_serves_is_out_of_memory(work: Path) -> None:
    """The kernel refuses all further memory once the engine is up; at its first requests it says so and ends."""

    def tighten(server: ServerProcess) -> None:
        # At once: what a first request was given, the allocator may give to the next without asking the kernel.
        process = psutil.Process(server.pid)
        process.rlimit(psutil.RLIMIT_DATA, (process.memory_info().data // 4, resource.RLIM_INFINITY))

    asked = visit(work, "study=tiny", "framework=full", "load.rate=8", "workload.prompt.high=900")
    found = measured(work, asked, limit=tighten)
    assert found == ["oom"], causes(work, asked)


@pytest.mark.long
def test_vllm_that_does_not_fit_is_out_of_memory(checkout: Path, vllm_results: Path) -> None:
    work = checkout_at(vllm_results.parent, checkout)
    asked = visit(work, "study=quick", "framework=vllm", "seed=0", "kv_memory_mib=16000", "load.rate=1")
    assert measured(work, asked, shell_limit=8 << 20) == ["oom"], causes(work, asked)
    assert "memory" in causes(work, asked)[0].lower()
