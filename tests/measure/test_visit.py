"""A visit against a scripted server: whole cells, told-apart failures, nothing half done."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kvstudy.frameworks import http
from kvstudy.frameworks.base import Counters, Launch, ServerProcess, Watch
from kvstudy.frameworks.lease import Lease
from kvstudy.frameworks.native import NativeServer
from kvstudy.grid import store
from kvstudy.grid.records import MEMORY_COLUMNS, REQUEST_COLUMNS
from kvstudy.grid.schema import (
    Cell,
    ClosedLoad,
    FixedLength,
    Full,
    Hardware,
    KneeLoad,
    Load,
    Model,
    PoissonLoad,
    Slo,
    TextSource,
    UniformLength,
    Visit,
    Workload,
)
from kvstudy.load.mock import Script
from kvstudy.load.text import read_text
from kvstudy.measure import record
from kvstudy.measure import visit as measuring
from kvstudy.measure.faults import Allotted, Fault
from kvstudy.measure.visit import Measuring, measure_visit

CORES = sorted(os.sched_getaffinity(0))
TEXT = TextSource(kind="jsonl", path=str(Path(tempfile.gettempdir()) / f"kvstudy-test-text-{os.getuid()}.jsonl"))


def write_text() -> None:
    """A fifth of the Python documentation: enough for these loads, and quick to tokenise."""
    documents = read_text(TextSource()).documents[:16]
    store.write_text(Path(str(TEXT.path)), "".join(json.dumps({"text": item}) + "\n" for item in documents))


write_text()


@pytest.fixture(autouse=True)
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement that runs on this machine must not hold the tests up."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def cell(load: Load | None = None, *, seed: int = 0, limit: float | None = None) -> Cell:
    return Cell(
        framework=Full(bring_up_s=20),
        model=Model(name="mock", source="folder", path="x", dtype="float32", max_model_len=512),
        hardware=Hardware(
            name="cpu", device="cpu", server_cores=CORES[:1], client_cores=CORES[-1:], memory_limit_gib=limit
        ),
        kv_memory_mib=1,
        harness_version=1,
        workload=Workload(name="w", text=TEXT, prompt=UniformLength(low=12, high=40), output=FixedLength(tokens=4)),
        load=load or PoissonLoad(rate=20, duration_s=1.0, timeout_s=2, drain_s=2, warmup_requests=2),
        seed=seed,
    )


def visit_of(*cells: Cell) -> Visit:
    return Visit(id="v", study="s", deployment=cells[0].deployment, cells=cells)


def make_model(folder: Path) -> None:
    """As much of a prepared model as a visit to the mock needs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        read_text(TextSource()).documents[:5], trainers.BpeTrainer(vocab_size=600, show_progress=False)
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "model.json").write_text(json.dumps({"kv_bytes_per_token": 1024}))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder


class MockServer(NativeServer):
    """The mock in the engine's place: same metrics, same endpoints."""

    def __init__(self, launch: Launch, script: Script, extra: dict[str, str] | None = None) -> None:
        super().__init__(launch)
        self.script = script
        self.extra = extra or {}

    def command(self) -> list[str]:
        script = {key: value for key, value in vars(self.script).items() if value is not None}
        return [
            *(sys.executable, "-m", "kvstudy.load.mock", "--port", str(self.port)),
            *("--script", json.dumps(script)),
        ]

    def asked(self) -> dict[str, Any]:
        return {}


def maker(model: Path, script: Script, *later: Script) -> Callable[[Path, Lease], ServerProcess]:
    """Servers with `script`, then with `later` when they are brought up again."""
    scripts = [script, *later]

    def make(work: Path, held: Lease) -> ServerProcess:
        chosen = scripts.pop(0) if len(scripts) > 1 else scripts[0]
        launch = Launch(cell().deployment, model, {"kv_bytes_per_token": 1024}, None, work, pass_fds=held.fds)
        return MockServer(launch, chosen)

    return make


def summaries(results: Path) -> dict[str, dict[str, Any]]:
    return {path.parent.name: json.loads(path.read_text()) for path in results.glob("store/*/summary.json")}


def test_a_visit_writes_whole_cells_and_skips_them_next_time(model_dir: Path, results: Path) -> None:
    cells = (
        cell(),
        cell(PoissonLoad(rate=40, duration_s=1.0)),
        cell(ClosedLoad(concurrency=3, duration_s=1.0)),
    )
    make = maker(model_dir, Script(first_s=0.02, gap_s=0.002))
    outcomes = measure_visit(visit_of(*cells), results, make=make, model_dir=model_dir)
    assert outcomes.cells == {item.cell_id: "ok" for item in cells}
    for item in cells:
        folder = results / "store" / item.cell_id
        assert sorted(path.name for path in folder.iterdir()) == sorted(store.CELL_FILES)
        assert Cell.model_validate(yaml.safe_load((folder / "config.yaml").read_text())).cell_id == item.cell_id
        summary = store.read_summary(folder)
        # A machine that is busy with other tests may well be late, and the cell then says so.
        assert set(summary["verdict"]["reasons"]) <= {"client_bound"}, summary["checks"]
        assert summary["memory"]["kv_reserved.device"] == 1 << 20
        assert summary["memory"]["process_peak.host"] > 1 << 20
        assert summary["visit"]["bring_up_s"] > 0 and summary["visit"]["warm_up_s"] > 0
        frame = pd.read_parquet(folder / "requests.parquet")
        assert list(frame.columns) == list(REQUEST_COLUMNS) and len(frame) == summary["counts"]["offered"]
        assert list(pq.read_table(folder / "memory.parquet").column_names) == list(MEMORY_COLUMNS)
        log = (folder / "log.txt").read_text()
        assert "measuring" in log
        provenance = json.loads((folder / "provenance.json").read_text())
        assert provenance["fingerprint"] == summary["fingerprint"] and provenance["packages"]["numpy"]
    assert not [path for path in (results / "store").iterdir() if path.name.startswith(".")]

    def never(work: Path, held: Lease) -> ServerProcess:
        raise AssertionError("nothing was to be measured")

    again = measure_visit(visit_of(*cells), results, make=never, model_dir=model_dir)
    assert again.cells == outcomes.cells


def test_a_knee_is_one_cell_with_its_probes(model_dir: Path, results: Path) -> None:
    load = KneeLoad(slo=Slo(ttft_s=0.1), low=10, high=80, probes=4, duration_s=1.0, drain_s=1.0, timeout_s=3.0)
    outcomes = measure_visit(
        visit_of(cell(load)), results, make=maker(model_dir, Script(service_s=0.025)), model_dir=model_dir
    )
    assert list(outcomes.cells.values()) == ["ok"]
    (summary,) = summaries(results).values()
    capacity = summary["metrics"]["capacity"]
    assert 12 < capacity["value"] < 60 and capacity["unit"] == "requests/s"
    assert 3 <= len(summary["checks"]["capacity"]["probes"]) <= 4


def test_two_rates_see_the_same_requests(model_dir: Path, results: Path) -> None:
    cells = (cell(), cell(PoissonLoad(rate=40, duration_s=1.0)))
    measure_visit(visit_of(*cells), results, make=maker(model_dir, Script()), model_dir=model_dir)
    slow, fast = (pd.read_parquet(results / "store" / item.cell_id / "requests.parquet") for item in cells)
    both = min(len(slow), len(fast))
    assert slow["prompt_tokens"][:both].tolist() == fast["prompt_tokens"][:both].tolist()
    assert (slow["scheduled_s"][:both] / 2).tolist() == pytest.approx(fast["scheduled_s"][:both].tolist())


def test_a_server_that_dies_under_load_is_a_result_and_the_rest_goes_on(model_dir: Path, results: Path) -> None:
    cells = (cell(), cell(seed=1))
    make = maker(model_dir, Script(first_s=0.01, die_after=8, die_message="boom"), Script(first_s=0.01))
    outcomes = measure_visit(visit_of(*cells), results, make=make, model_dir=model_dir)
    assert sorted(outcomes.cells.values()) == ["crashed", "ok"]
    crashed = next(item for item in summaries(results).values() if item["outcome"] == "crashed")
    assert "boom" in crashed["cause"]
    assert crashed["counts"]["error"] > 0 and crashed["metrics"]["failures"]["value"] > 0
    assert crashed["metrics"]["e2el.p99"]["infinite"]
    # What was not sent any more was offered all the same.
    assert crashed["metrics"]["failures"]["n"] == crashed["counts"]["offered"]


def test_out_of_memory_is_its_own_outcome(model_dir: Path, results: Path) -> None:
    make = maker(model_dir, Script(die_after=8, die_message="torch.OutOfMemoryError: CUDA out of memory."))
    outcomes = measure_visit(visit_of(cell()), results, make=make, model_dir=model_dir)
    assert list(outcomes.cells.values()) == ["oom"]


def test_a_server_that_dies_each_time_ends_in_bounded_time(
    model_dir: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "MAX_RESTARTS", 1)
    cells = tuple(cell(seed=seed) for seed in range(4))
    make = maker(model_dir, Script(first_s=0.01, die_after=6))
    outcomes = measure_visit(visit_of(*cells), results, make=make, model_dir=model_dir)
    assert set(outcomes.cells.values()) == {"crashed"} and len(outcomes.cells) == 4


def test_a_hanging_server_is_a_timeout_in_bounded_time(model_dir: Path, results: Path) -> None:
    begun = time.monotonic()
    load = PoissonLoad(rate=20, duration_s=0.5, timeout_s=1.0, drain_s=1.0, warmup_requests=0)
    outcomes = measure_visit(
        visit_of(cell(load)), results, make=maker(model_dir, Script(hang_share=1.0)), model_dir=model_dir
    )
    assert list(outcomes.cells.values()) == ["timeout"]
    assert time.monotonic() - begun < 20


def test_a_server_that_hangs_for_good_under_load_is_replaced_and_the_rest_goes_on(
    model_dir: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "HEALTH_S", 2.0)
    begun = time.monotonic()
    load = PoissonLoad(rate=20, duration_s=1.0, timeout_s=1.0, drain_s=1.0, warmup_requests=0, slo=Slo(ttft_s=1.0))
    cells = (cell(load), cell(load, seed=1))
    make = maker(model_dir, Script(first_s=0.01, freeze_after=8), Script(first_s=0.01))
    outcomes = measure_visit(visit_of(*cells), results, make=make, model_dir=model_dir)
    assert list(outcomes.cells.values()) == ["ok", "ok"] and time.monotonic() - begun < 60
    hung, sound = sorted(summaries(results).values(), key=lambda item: item["counts"]["ok"])
    assert hung["counts"]["ok"] == 7 and hung["counts"]["timeout"] + hung["counts"]["censored"] > 3
    assert hung["metrics"]["goodput"]["value"] == pytest.approx(7 / hung["counts"]["offered"])
    assert hung["metrics"]["e2el.p99"]["infinite"] and "failures" in hung["flags"]
    assert sound["metrics"]["goodput"]["value"] == 1.0 and sound["metrics"]["goodput"]["low"] > 0.7


@pytest.mark.parametrize(
    ("script", "start", "outcome"),
    [
        (Script(error_share=1.0), "http 503", "crashed"),
        (Script(break_share=1.0), "error in stream", "crashed"),
        (Script(cut_share=1.0), "stream cut", "crashed"),
        (Script(hang_share=1.0), "censored", "timeout"),
    ],
    ids=["503", "mid-stream", "cut", "hang"],
)
def test_a_class_of_failure_that_takes_every_request(
    model_dir: Path, results: Path, script: Script, start: str, outcome: str
) -> None:
    load = PoissonLoad(rate=20, duration_s=0.5, timeout_s=2, drain_s=0.5, warmup_requests=0, slo=Slo(e2el_s=9.0))
    measure_visit(visit_of(cell(load)), results, make=maker(model_dir, script), model_dir=model_dir)
    (summary,) = summaries(results).values()
    assert summary["outcome"] == outcome and summary["cause"].startswith(start)
    goodput = summary["metrics"]["goodput"]
    assert goodput["value"] == 0.0 and goodput["n"] == summary["counts"]["offered"] and goodput["high"] > 0.0
    assert summary["metrics"]["failures"]["value"] == 1.0 and summary["metrics"]["ttft.p50"]["value"] is None


def test_a_server_that_listens_no_more_is_refused_and_what_it_refuses_counts(model_dir: Path, results: Path) -> None:
    load = PoissonLoad(rate=20, duration_s=1.0, timeout_s=2, drain_s=1, warmup_requests=0, slo=Slo(e2el_s=1.0))
    make = maker(model_dir, Script(deaf_after=8))
    assert list(measure_visit(visit_of(cell(load)), results, make=make, model_dir=model_dir).cells.values()) == ["ok"]
    (found,) = summaries(results).values()
    requests = pd.read_parquet(results / "store" / found["cell"] / "requests.parquet")
    failed = requests[requests["status"] != "ok"]
    offered = found["counts"]["offered"]
    assert len(failed) == offered - 7 > 3 and failed["error"].iloc[1:].str.startswith("refused").all()
    # Refusing is quick: what counts is that none of it counts as served, or as fast.
    assert found["metrics"]["goodput"]["value"] == pytest.approx(7 / offered)
    assert found["metrics"]["e2el.p90"]["infinite"] and found["metrics"]["e2el.p90"]["value"] is None
    assert found["metrics"]["e2el.mean"]["n"] == 7 and "failures" in found["flags"]


def test_half_503_halve_what_succeeds_and_are_counted(model_dir: Path, results: Path) -> None:
    measure_visit(visit_of(cell()), results, make=maker(model_dir, Script(error_share=0.5)), model_dir=model_dir)
    (summary,) = summaries(results).values()
    assert summary["outcome"] == "ok" and "failures" in summary["flags"]
    assert summary["metrics"]["failures"]["value"] == pytest.approx(0.5, abs=0.1)
    assert summary["metrics"]["ttft.p90"]["infinite"]


def test_all_400_is_unsupported(model_dir: Path, results: Path) -> None:
    script = Script(error_share=1.0, error_status=400)
    outcomes = measure_visit(visit_of(cell()), results, make=maker(model_dir, script), model_dir=model_dir)
    assert list(outcomes.cells.values()) == ["unsupported"]


def test_a_memory_limit_ends_the_cell(model_dir: Path, results: Path) -> None:
    limited = cell(PoissonLoad(rate=5, duration_s=8.0, warmup_requests=0), limit=0.001)

    def make(work: Path, held: Lease) -> ServerProcess:
        launch = Launch(limited.deployment, model_dir, {"kv_bytes_per_token": 1024}, None, work)
        return MockServer(launch, Script(first_s=0.01))

    outcomes = measure_visit(visit_of(limited), results, make=make, model_dir=model_dir)
    assert list(outcomes.cells.values()) == ["oom"]
    (summary,) = summaries(results).values()
    assert "limit" in summary["cause"] and summary["visit"]["load_s"] < 5


def test_faults_of_the_installation_leave_no_cell(model_dir: Path, results: Path) -> None:
    with pytest.raises(Fault, match="not prepared"):
        measure_visit(visit_of(cell()), results)

    class Broken(MockServer):
        def command(self) -> list[str]:
            return [sys.executable, "-c", "import sys; sys.exit('kvstudy engine: no model here')"]

    def make(work: Path, held: Lease) -> ServerProcess:
        return Broken(Launch(cell().deployment, model_dir, {"kv_bytes_per_token": 1024}, None, work), Script())

    with pytest.raises(Fault, match="did not come up: kvstudy engine: no model here"):
        measure_visit(visit_of(cell()), results, make=make, model_dir=model_dir)

    class Missing(MockServer):
        def command(self) -> list[str]:
            return ["/no/such/python"]

    def absent(work: Path, held: Lease) -> ServerProcess:
        return Missing(Launch(cell().deployment, model_dir, {"kv_bytes_per_token": 1024}, None, work), Script())

    with pytest.raises(Fault, match="cannot start /no/such/python"):
        measure_visit(visit_of(cell()), results, make=absent, model_dir=model_dir)
    assert not (results / "store").exists()


def test_out_of_memory_at_bring_up_is_a_result_for_every_cell(model_dir: Path, results: Path) -> None:
    class Big(MockServer):
        def command(self) -> list[str]:
            return [sys.executable, "-c", "raise MemoryError('cannot allocate memory')"]

    def make(work: Path, held: Lease) -> ServerProcess:
        return Big(Launch(cell().deployment, model_dir, {"kv_bytes_per_token": 1024}, None, work), Script())

    outcomes = measure_visit(visit_of(cell(), cell(seed=1)), results, make=make, model_dir=model_dir)
    assert list(outcomes.cells.values()) == ["oom", "oom"]
    for summary in summaries(results).values():
        assert summary["counts"]["offered"] == 0 and summary["metrics"] == {}


def test_a_full_disk_leaves_nothing_half(model_dir: Path, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record, "write_requests", full)
    with pytest.raises(OSError, match="No space"):
        measure_visit(visit_of(cell()), results, make=maker(model_dir, Script()), model_dir=model_dir)
    assert list((results / "store").iterdir()) == []


DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_visit import *
visit = visit_of(cell(PoissonLoad(rate=20, duration_s=0.5)), cell(PoissonLoad(rate=5, duration_s=60.0)))
import kvstudy.measure.command as command
import kvstudy.measure.visit as v
path = Path({results!r}) / "visit.json"
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text(visit.model_dump_json())
v.model_folder = lambda *_: Path({model!r})
v.make_server = lambda d, m, e, work, held: maker(Path({model!r}), Script(first_s=0.01))(work, held)
sys.exit(command.main(["--visit", str(path), "--results", {results!r}, "--marker", {results!r} + "/marker.json"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_an_interrupted_visit_stops_its_server_and_goes_on_later(
    model_dir: Path, results: Path, number: signal.Signals
) -> None:
    code = DRIVER.format(tests=str(Path(__file__).parent), results=str(results), model=str(model_dir))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(item for item in sys.path if item)}
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=env)
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if "poisson-r5_" in line:  # the long cell begins
            time.sleep(0.7)
            break
    process.send_signal(number)
    rest = process.stderr.read()
    assert process.wait(20) == 130, "".join(seen) + rest
    assert "interrupted" in rest and "Traceback" not in rest
    assert not (results / "marker.json").exists()
    assert all(not path.name.startswith(".") for path in (results / "store").iterdir())
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    port = [word for word in listed.split() if word == str(results)]
    assert not port


def test_counters_and_watch_of_the_engine_shape(model_dir: Path, tmp_path: Path) -> None:
    server = MockServer(Launch(cell().deployment, model_dir, {"kv_bytes_per_token": 1024}, None, tmp_path), Script())
    try:
        server.bring_up(20)
        counters = server.counters()
        assert counters.moved_h2d == 0 and counters.prefix_queries == 0 and counters.attended_entries is None
        assert isinstance(server.watch(), Watch) and isinstance(counters, Counters)
        assert http.get_json(f"{server.url}/v1/models")["data"][0]["id"] == "mock"
    finally:
        server.stop()
    assert server.failure() is not None


def test_the_order_is_seeded_and_not_the_plans(model_dir: Path, results: Path) -> None:
    cells = tuple(cell(seed=seed) for seed in range(8))
    job = Measuring(visit_of(*cells), store.Layout(results), model_dir, maker(model_dir, Script()))
    served: list[str] = []
    job._serve = lambda item, *rest: served.append(item.cell_id) or True  # type: ignore[method-assign,func-returns-value,assignment]
    job.run()
    assert sorted(served) == sorted(item.cell_id for item in cells)
    assert served != [item.cell_id for item in cells]


def test_what_a_cluster_ends_is_no_result(model_dir: Path, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's memory is what was asked of SLURM, not the deployment's limit: the retry asks for more."""
    monkeypatch.setattr(MockServer, "killed", lambda self: self.failure() is not None)
    dying = Script(first_s=0.01, die_after=8)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(Allotted, match="killed"):
        measure_visit(visit_of(cell()), results, make=maker(model_dir, dying), model_dir=model_dir)
    assert not summaries(results)
    monkeypatch.delenv("SLURM_JOB_ID")
    outcomes = measure_visit(visit_of(cell()), results, make=maker(model_dir, dying), model_dir=model_dir)
    assert list(outcomes.cells.values()) == ["crashed"]


def test_each_load_finds_a_server_that_has_forgotten_the_last(
    model_dir: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bring-up serves both loads; peaks and caches are cleared before each and after the warm-up."""
    events: list[str] = []
    offer, reset, bring_up = measuring.client.run, MockServer.reset, MockServer.bring_up

    def seen(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            events.append(what)
            return call(*args, **kwargs)

        return wrapper

    monkeypatch.setattr(measuring.client, "run", seen("load", offer))
    monkeypatch.setattr(MockServer, "reset", seen("reset", reset))
    monkeypatch.setattr(MockServer, "bring_up", seen("up", bring_up))
    cells = (cell(), cell(PoissonLoad(rate=40, duration_s=1.0)))
    measure_visit(visit_of(*cells), results, make=maker(model_dir, Script(first_s=0.01)), model_dir=model_dir)
    assert events == ["up", "load", "reset", "load", "reset", "load"]
