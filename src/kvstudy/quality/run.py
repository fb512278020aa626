"""`kvstudy quality --visit VISIT.json --results DIR --marker FILE`: score the cells of a visit that are not whole.

A visit's cells share their items. They are scored part by part (a kind of item at one context); a part that is done is
written for each cell at once, so that Ctrl-C, a full disk or a fault lose one part at most, and a run that is taken up
again goes on where it was. When a cell has all its parts it is written whole into the store and its parts are dropped.
The marker comes last. Timing means nothing here, but the work would disturb a measurement: the visit holds the devices'
lease as a measurement does.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import yaml
from pydantic import ValidationError
from transformers import AutoTokenizer
from transformers.utils import logging

from kvstudy.engine.config import Budget as EngineBudget
from kvstudy.engine.config import EngineConfig
from kvstudy.engine.core import Engine
from kvstudy.frameworks import http
from kvstudy.frameworks.base import Launch, OutOfMemory, Unavailable
from kvstudy.frameworks.launch import environment_folder, make_server, model_folder
from kvstudy.frameworks.lease import Lease, lease
from kvstudy.frameworks.native import engine_config
from kvstudy.grid import store
from kvstudy.grid.plan import project_root
from kvstudy.grid.records import ITEM_COLUMNS, Metric, Summary, Verdict
from kvstudy.grid.schema import H2O, Budget, Full, QualityCell, QualityVisit, digest
from kvstudy.grid.store import Layout
from kvstudy.load.text import Text, TextError, read_text
from kvstudy.measure import fingerprint
from kvstudy.measure import state as states
from kvstudy.measure.interrupts import interruptible
from kvstudy.quality import measures, tasks
from kvstudy.quality.items import Drawer, Item
from kvstudy.quality.score import BATCH_BYTES, REFERENCE, Row, Run, Scorer, Wanted
from kvstudy.quality.served import Endpoint, ServedScorer

#: How far a served log probability may be from the scored one on average, in nats. Ours agree to 1e-6 in float32, and
#: to four digits in bfloat16 where the batches are alike; the rest is room for other batches and other engines.
TOLERANCE = 0.05
CHECKED_ITEMS = 2


class Fault(Exception):
    """The installation or the text is at fault: one line, exit code 2."""


@dataclass(frozen=True)
class Part:
    """A kind of item at one context: what is scored and kept together."""

    kind: str
    context: int

    @property
    def name(self) -> str:
        """The file of its rows."""
        return f"{self.kind}-{self.context}"


#: `lm-eval`'s part; its prompts have lengths of their own.
TASKS = Part("tasks", 0)


def parts_of(cell: QualityCell) -> list[Part]:
    """The parts of a cell that our engine or an endpoint scores, short contexts first."""
    asked = cell.quality
    found = []
    for kind in ("perplexity", "greedy", "retention"):
        spec = getattr(asked, kind)
        found += [Part(kind, context) for context in spec.contexts] if spec is not None else []
    return sorted(found, key=lambda part: (part.context, part.kind))


def tokens_of(cell: QualityCell, part: Part) -> int:
    """Tokens of prompt and output that a part's requests reach."""
    spec = getattr(cell.quality, part.kind)
    return part.context + int(spec.continuation if part.kind == "perplexity" else spec.output)


def say(line: str) -> None:
    """A line for whoever watches."""
    print(line, file=sys.stderr, flush=True)


@dataclass
class Scoring:
    """The work of one visit."""

    visit: QualityVisit
    layout: Layout
    model_dir: Path
    journal: states.Journal | None = None
    text: Text = field(init=False)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    reasons: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.todo = [c for c in self.visit.cells if not store.is_whole(self.layout.cell(c.cell_id))]

    def run(self) -> None:
        """Score what is missing. Raises `Fault`."""
        if not self.todo:
            say(f"nothing to score: all {len(self.visit.cells)} cells are there")
            return
        first = self.todo[0]
        logging.disable_progress_bar()
        try:
            self.text = read_text(first.quality.text)
            tokenizer = AutoTokenizer.from_pretrained(self.model_dir)
            drawer = Drawer(tokenizer, self.text, first.seed)
            gpus = first.model.gpus if first.hardware.device == "cuda" else 0
            with tempfile.TemporaryDirectory(prefix="kvstudy-quality-") as work, lease(gpus, say=say) as held:
                self._score(drawer, tokenizer, Path(work), held)
        except (TextError, Unavailable) as error:
            raise Fault(str(error)) from error

    def _score(self, drawer: Drawer, tokenizer: Any, work: Path, held: Lease) -> None:
        every = parts_of(self.todo[0])
        served = [cell for cell in self.todo if cell.framework.environment is not None]
        scorer = self._scorer(tokenizer, work, [cell for cell in self.todo if cell not in served])
        if served:
            self._score_served(served[0], scorer, drawer, work, held)
        else:
            for part, items in self._missing(scorer, drawer):
                for cell_id, rows in _rows(scorer, part, items, self._output(part)).items():
                    if cell_id != REFERENCE:
                        write_rows(rows, self.layout.quality_part(cell_id, part.name))
            self._spot_check(scorer, drawer, work, held)
        if self.todo[0].quality.tasks is not None:
            self._score_tasks(work, held)
            every.append(TASKS)
        for cell in self.todo:
            self._finish(cell, every)

    def _missing(self, scorer: Scorer, drawer: Drawer) -> Iterator[tuple[Part, list[Item]]]:
        """Each part that deployments lack, short contexts first, and its items; `scorer.only` says which they are."""
        every = parts_of(self.todo[0])
        for number, part in enumerate(every, start=1):
            missing = [c for c in self.todo if self._takes(c, part, scorer) and not self._path(c, part).is_file()]
            if not missing:
                continue
            say(f"{part.name} ({number}/{len(every)}): {len(missing)} deployments")
            if self.journal is not None:
                self.journal.running(f"{part.name} ({number}/{len(every)})")
            begun = time.monotonic()
            scorer.only = {cell.cell_id for cell in missing}
            yield part, getattr(drawer, part.kind)(getattr(self.todo[0].quality, part.kind), part.context)
            say(f"  {time.monotonic() - begun:.0f} s")

    def _path(self, cell: QualityCell, part: Part) -> Path:
        return self.layout.quality_part(cell.cell_id, part.name)

    def _output(self, part: Part) -> int:
        spec = getattr(self.todo[0].quality, part.kind)
        return int(getattr(spec, "output", 0))

    # --- through an endpoint ---------------------------------------------------------------------

    @contextmanager
    def _served(self, cell: QualityCell, work: Path, held: Lease) -> Iterator[Endpoint]:
        """The deployment, up as for a measurement, but on the cores of its client too: nothing is timed."""
        cores = every_core(cell)
        deployment = cell.deployment.model_copy(
            update={"hardware": cell.hardware.model_copy(update={"server_cores": cores})}
        )
        environment = environment_folder(deployment, self.layout)
        server = make_server(deployment, self.model_dir, environment, work, held)
        say(f"bringing up {cell.slug}")
        try:
            server.bring_up(cell.framework.bring_up_s)
            yield Endpoint(server.url, server.model_name, server.counters)
        except OutOfMemory as error:
            raise Fault(f"{cell.slug} does not fit into its memory: {error}") from error
        finally:
            server.stop()

    def _score_served(self, cell: QualityCell, scorer: Scorer, drawer: Drawer, work: Path, held: Lease) -> None:
        """A framework that is not ours, beside our full cache on the same requests."""
        served: ServedScorer | None = None
        with ExitStack() as up:
            for part, items in self._missing(scorer, drawer):
                if served is None:
                    endpoint = up.enter_context(self._served(cell, work, held))
                    per_token = self.launches[cell.cell_id].kv_bytes_per_token
                    served = ServedScorer(endpoint, lambda token: str(drawer.tokenizer.decode([token])), per_token)
                runs = _of_reference(scorer, part, items, self._output(part))
                write_rows(served.rows(part.kind, part.context, runs, self._output(part)), self._path(cell, part))
        as_ours = getattr(cell.framework, "kv_cache_dtype", "auto") == "auto"  # else it is meant to differ
        if served is not None and served.off and as_ours:
            self._checked([cell], "agrees_with_full", cell.cell_id, served.off)

    def _score_tasks(self, work: Path, held: Lease) -> None:
        """`lm-eval` of each deployment, and once of our full cache, which the others are compared with."""
        first = self.todo[0]
        asked = first.quality.tasks
        assert asked is not None
        whole = first.model_copy(update={"framework": Full(), "budget": Budget()})
        key = digest([first.model.name, asked.model_dump(mode="json"), first.seed, first.kv_memory_mib])
        kept = self.layout.quality_part(f"tasks-{key}", "x").with_name("full.json")
        if not kept.is_file():
            store.write_json(kept, self._samples(whole, work, held)[0])
        full = json.loads(kept.read_text(encoding="utf-8"))
        for cell in self.todo:
            if not self._path(cell, TASKS).is_file():
                samples, base = self._samples(cell, work, held)
                write_rows(list(tasks.rows_of(samples, full, base)), self._path(cell, TASKS))

    def _samples(self, cell: QualityCell, work: Path, held: Lease) -> tuple[dict[str, list[Any]], Row]:
        """A deployment's answers, as much of them as is kept, and the shares that it attended to and kept."""
        asked = cell.quality.tasks
        assert asked is not None
        with self._served(cell, work, held) as endpoint:
            length = int(http.get_json(f"{endpoint.url}/v1/models")["data"][0]["max_model_len"])
            lm = tasks.completions_model(endpoint.url, endpoint.model, self.model_dir, length)
            found = tasks.evaluate(lm, asked, project_root(), cell.seed)
            counted = endpoint.counters()
        wanted = ("doc_id", "acc", "filtered_resps")
        samples = {task: [{name: of[name] for name in wanted} for of in all_of] for task, all_of in found.items()}
        full = counted.full_entries or 0.0
        shares = [(share or 0.0) / full if full else 1.0 for share in (counted.attended_entries, counted.kept_entries)]
        return samples, tasks.base_row(*shares)

    def _spot_check(self, scorer: Scorer, drawer: Drawer, work: Path, held: Lease) -> None:
        """Of each framework some deployments, drawn by the visit's name, are served and asked for the same scores."""
        for name in dict.fromkeys(cell.framework.name for cell in self.todo):
            mine = [cell for cell in self.todo if cell.framework.name == name]
            able = [
                (cell, part)
                for cell in mine
                if (parts := [p for p in parts_of(cell) if p.kind == "perplexity" and self._takes(cell, p, scorer)])
                for part in parts[:1]
            ]
            # A budget below 1 if there is one: with the whole cache little can differ.
            able.sort(key=lambda pair: (pair[0].budget.share >= 1, digest([self.visit.id, pair[0].cell_id])))
            for cell, part in able[: cell_checks(mine)]:
                assert cell.quality.perplexity is not None
                items = drawer.perplexity(cell.quality.perplexity, part.context)[:CHECKED_ITEMS]
                scorer.only = {cell.cell_id}
                runs = scorer.forced(items)[cell.cell_id]
                with self._served(cell, work, held) as endpoint:
                    scores = endpoint.score_all(items)
                off = [
                    abs(a - b)
                    for run, own in zip(runs, scores, strict=True)
                    for a, b in zip(run.logp, own.logprobs, strict=True)
                ]
                self._checked(mine, "served_path", cell.cell_id, off)

    def _checked(self, cells: Sequence[QualityCell], check: str, against: str, off: Sequence[float]) -> None:
        """Note by how much log probabilities differed, and that these cells are not valid where it is too much."""
        mean = sum(off) / len(off)
        found = {"cell": against, "tokens": len(off), "mean_abs": mean, "max_abs": max(off), "tolerance": TOLERANCE}
        say(f"  {check}: log probabilities differ by {mean:.4f} nats on average, {max(off):.3f} at most")
        for cell in cells:
            self.checks.setdefault(cell.cell_id, {})[check] = found
            if not mean <= TOLERANCE:
                self.reasons.setdefault(cell.cell_id, []).append(f"{check}_differs")

    # --- the engine ------------------------------------------------------------------------------

    def _scorer(self, tokenizer: Any, work: Path, native: Sequence[QualityCell]) -> Scorer:
        """An engine as the deployments have it, with pools for a batch of items, and each native one's policy."""
        card = json.loads((self.model_dir / "model.json").read_text(encoding="utf-8"))
        wanted: dict[str, Wanted] = {}
        self.launches: dict[str, Launch] = {}
        for cell in self.todo:
            deployment = cell.deployment
            if cell not in native:  # our engine's full cache, as far as the deployment says what it is
                deployment = deployment.model_copy(update={"framework": Full()})
            launch = Launch(deployment, self.model_dir.resolve(), card, None, work)
            config = EngineConfig.model_validate(engine_config(launch, 0))
            self.launches[cell.cell_id] = launch
            if cell in native:
                wanted[cell.cell_id] = (config.policy, config.policy_options, config.budget)
        cores = list(every_core(self.todo[0])) or None
        own = config.model_copy(
            update={
                "policy": "full",
                "policy_options": {},
                "budget": EngineBudget(),
                "kv_memory_bytes": 4 * BATCH_BYTES,
                "host_kv_memory_bytes": 2 * BATCH_BYTES,
                "max_num_seqs": 1 << 16,
                "max_model_len": None,
                "link_gbps": None,
                "cores": cores,
                "port": 0,
            }
        )
        torch.manual_seed(0)
        return Scorer(Engine(own, tokenizer), wanted)

    def _takes(self, cell: QualityCell, part: Part, scorer: Scorer) -> bool:
        """Whether the deployment can be scored on the part; what it cannot be is noted and said once."""
        reason, noted = self._refused(cell, part, scorer), self.left_out.setdefault(cell.cell_id, [])
        if reason is not None and reason not in noted:
            say(f"{cell.cell_slug}: {reason}")
            noted.append(reason)
        return reason is None

    def _refused(self, cell: QualityCell, part: Part, scorer: Scorer) -> str | None:
        """Why a part is not scored: a policy that cannot be forked, a context that its KV memory does not hold."""
        launch, tokens = self.launches[cell.cell_id], tokens_of(cell, part)
        policy = scorer.branches.policy(cell.cell_id if cell.cell_id in scorer.wanted else REFERENCE)
        if (reason := policy.unforkable()) is not None:
            return reason
        if tokens > cell.model.max_model_len:
            return f"{part.name}: {tokens} tokens, and the model takes {cell.model.max_model_len}"
        need = policy.reserve(part.context, tokens - part.context)
        host = int(getattr(cell.framework, "host_kv_memory_mib", 0) * (1 << 20))
        if need.device_peak_bytes > launch.kv_bytes or need.host_bytes > host:
            return f"{part.name}: a request of {tokens} tokens does not fit into the deployment's KV memory"
        return None

    # --- a whole cell ----------------------------------------------------------------------------

    def _finish(self, cell: QualityCell, every: Sequence[Part]) -> None:
        rows = [pd.read_parquet(path) for part in every if (path := self._path(cell, part)).is_file()]
        left_out = self.left_out.get(cell.cell_id, [])
        reasons = self.reasons.get(cell.cell_id, [])
        outcome: Any = "ok" if rows else "unsupported"
        items = pd.concat(rows, ignore_index=True) if rows else frame_of([])
        summary = measures.summarise(items)
        hardware = fingerprint.stable()
        record = Summary(
            cell=cell.cell_id,
            deployment=cell.deployment.id,
            outcome=outcome,
            cause=None if rows else "; ".join(left_out),
            verdict=Verdict(status="INVALID" if reasons else "VALID", reasons=reasons),
            metrics=_metrics(summary),
            budget={"share": cell.budget.share, **_shares(items)},
            checks=self.checks.get(cell.cell_id, {})
            | {"left_out": left_out, "text": {"sha256": self.text.sha256, "label": self.text.label}},
            source="simulated" if isinstance(cell.framework, H2O) and cell.framework.rule == "masked" else "measured",
            fingerprint=fingerprint.fingerprint(hardware),
        )
        import kvstudy

        provenance = {
            "schema_version": 1,
            "time": fingerprint.now(),
            "kvstudy": kvstudy.__version__,
            **fingerprint.commit(),
            "command": fingerprint.command(),
            "seed": cell.seed,
            "hardware": hardware,
            "framework": {"name": cell.framework.name, "pins": dict(cell.framework.pins)},
            "visit": {"id": self.visit.id, "study": self.visit.study},
            "packages": fingerprint.packages(),
        }
        folder = self.layout.cell(cell.cell_id)
        try:
            with store.staged(folder) as staging:
                text = yaml.safe_dump(cell.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
                (staging / store.CONFIG).write_text(text, encoding="utf-8")
                items.to_parquet(staging / store.ITEMS, index=False)
                summary.to_parquet(staging / store.MEASURES, index=False)
                store.write_json(staging / store.SUMMARY, record.model_dump(mode="json"))
                store.write_json(staging / store.PROVENANCE, provenance)
        except FileExistsError:
            say(f"  {cell.cell_slug} was scored by someone else meanwhile: theirs is kept")
        shutil.rmtree(self.layout.quality_part(cell.cell_id, "x").parent, ignore_errors=True)


def every_core(cell: QualityCell) -> tuple[int, ...]:
    """The cores of the cell's server and client together; none are named where it may use any."""
    hardware = cell.hardware
    return tuple(sorted({*hardware.server_cores, *hardware.client_cores})) if hardware.server_cores else ()


def cell_checks(cells: Sequence[QualityCell]) -> int:
    """How many deployments of a framework are checked."""
    return max(cell.quality.spot_checks for cell in cells)


def _of_reference(scorer: Scorer, part: Part, items: list[Item], output: int) -> list[Run]:
    runs = scorer.forced(items) if part.kind == "perplexity" else scorer.said(items, output)
    return runs[REFERENCE]


def _rows(scorer: Scorer, part: Part, items: list[Item], output: int) -> dict[str, list[Row]]:
    if part.kind == "perplexity":
        return scorer.perplexity(items, part.context)
    score: Callable[..., dict[str, list[Row]]] = getattr(scorer, part.kind)
    return score(items, part.context, output)


def frame_of(rows: Sequence[Row]) -> pd.DataFrame:
    """Rows with the columns and types of `records.ITEM_COLUMNS`."""
    frame = pd.DataFrame(list(rows), columns=list(ITEM_COLUMNS))
    return frame.astype(ITEM_COLUMNS)


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """A part's rows, whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    frame_of(rows).to_parquet(temporary, index=False)
    temporary.replace(path)


def _shares(items: pd.DataFrame) -> dict[str, float | None]:
    return {name: float(items[name].mean()) if len(items) else None for name in ("attended", "kept")}


def _metrics(summary: pd.DataFrame) -> dict[str, Metric]:
    """Measures over all depths, as `perplexity@256`."""
    units = {"nll": "nats", "kl": "nats", "perplexity": "", "first_divergence": "tokens", "length_drift": "tokens"}
    found = {}
    for row in summary.to_dict("records"):
        if math.isnan(row["depth"]):
            low, high = (None if pd.isna(row[side]) else float(row[side]) for side in ("low", "high"))
            unit = units.get(row["measure"], "share")
            name = f"{row['measure']}@{row['context']}"
            found[name] = Metric(value=row["value"], unit=unit, n=row["n"], low=low, high=high)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: every cell has a folder; 2: one line says what is missing; 130: interrupted."""
    parser = argparse.ArgumentParser(prog="kvstudy quality", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--visit", type=Path, required=True, help="the quality visit, as the plan wrote it")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--marker", type=Path, required=True, help="written last")
    parser.add_argument("--freeze", type=Path, help="freeze file of the framework's environment")
    parser.add_argument("--log", type=Path, help="where its output is kept, for `kvstudy status` to name")
    parser.add_argument(
        "--attempt", type=int, default=1, help="a retry ends at once where the last try ended in a fault"
    )
    options = parser.parse_args(arguments)
    journal: states.Journal | None = None
    interruptible()
    try:
        visit = QualityVisit.model_validate_json(options.visit.read_text(encoding="utf-8"))
        layout = Layout(options.results)
        path = layout.state(visit.study, visit.id)
        if (cause := states.not_again(path, options.attempt)) is not None:
            say(f"kvstudy quality: not tried again, since that would change nothing: {cause}")
            return 2
        journal = states.Journal(path, visit.id, options.log)
        journal.running()
        journal.beat()  # a part may take minutes, and says nothing meanwhile
        Scoring(visit, layout, model_folder(visit.cells[0].deployment, layout), journal).run()
        store.write_json(
            options.marker,
            {"visit": visit.id, "study": visit.study, "cells": [cell.cell_id for cell in visit.cells]},
        )
        journal.done()
    except (Fault, Unavailable, ValidationError, OSError) as error:
        say(f"kvstudy quality: {' '.join(str(error).split())}")
        states.note(journal, "stopped" if isinstance(error, OSError) else "failed", str(error))
        return 2
    except KeyboardInterrupt:
        say("kvstudy quality: interrupted; finished parts stay, run again to go on")
        states.note(journal, "interrupted", "interrupted")
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
