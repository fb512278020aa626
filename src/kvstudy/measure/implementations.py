"""Native against upstream on the same prompts: tokens, kept or fetched entries, logits, memory, time.

    kvstudy compare-implementations study=forks
    kvstudy compare-implementations study=forks --printed infinigen=run.log    what the authors' own command printed

For every deployment of an author's fork in a study, its native control is the one of the same policy and rule under
the same model, hardware, budget and memory (for FlexGen: the full cache). Both serve one batch of the study's own
prompts, of one length. The fork runs in its environment, once for time and once traced; our engine runs freely, for
tokens and time, and once more with the fork's tokens forced, so that entries and logits are compared under the same
history. Under the debug switch device=cpu nothing is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvstudy.engine.config import EngineConfig
from kvstudy.engine.core import Engine
from kvstudy.engine.policies.h2o import H2O as H2OPolicy
from kvstudy.engine.policies.infinigen import WHOLE_LAYERS, Fetched, InfiniGen
from kvstudy.engine.request import Request, SamplingParams
from kvstudy.frameworks import environments
from kvstudy.frameworks.base import Launch, Unavailable, last_words
from kvstudy.frameworks.launch import environment_folder, model_folder
from kvstudy.frameworks.lease import Lease, lease
from kvstudy.frameworks.native import engine_config
from kvstudy.frameworks.upstream.launcher import batch_config, fork_environment
from kvstudy.frameworks.upstream.printed import NotPrinted, parse_printed
from kvstudy.grid.schema import Cell, Deployment
from kvstudy.grid.store import Layout, write_json
from kvstudy.load import workload

#: (step, layer, row, head) -> the positions that an implementation keeps or fetches.
Sets = dict[tuple[int, int, int, int], frozenset[int]]


@dataclass(frozen=True)
class Pair:
    """A fork's cell and the native one it is compared with; None where the study has none."""

    upstream: Cell
    native: Cell | None


@dataclass
class Run:
    """What one implementation did with a batch. `seconds` are prefill and decode; None where they mean nothing."""

    tokens: np.ndarray  # [batch, steps]
    logits: np.ndarray  # [steps, batch, vocabulary]
    sets: Sets
    kv_bytes: dict[str, int]  # peak, by tier
    seconds: dict[str, float] | None


def pairs(cells: Sequence[Cell]) -> list[Pair]:
    """The comparisons that a study holds, one a deployment of a fork."""
    found: dict[str, Pair] = {}
    for cell in cells:
        if cell.framework.implementation == "upstream" and cell.deployment.id not in found:
            controls = [other for other in cells if _is_control(other, cell)]
            found[cell.deployment.id] = Pair(cell, controls[0] if controls else None)
    return list(found.values())


def _is_control(other: Cell, cell: Cell) -> bool:
    own, theirs = other.framework, cell.framework
    same = ("model", "hardware", "budget", "kv_memory_mib", "workload")
    name = "full" if theirs.name == "flexgen" else theirs.name
    return (
        own.implementation == "native"
        and own.name == name
        and getattr(own, "rule", None) == getattr(theirs, "rule", None)
        and all(getattr(other, key) == getattr(cell, key) for key in same)
    )


def choose_prompts(drawn: workload.Drawn, most: int) -> tuple[list[list[int]], int]:
    """Up to `most` prompts of the length that is drawn most often, and an output length that all of them have."""
    lengths, counts = np.unique(drawn.prompt_tokens, return_counts=True)
    length = lengths[counts.argmax()]
    rows = np.flatnonzero(drawn.prompt_tokens == length)[:most]
    return [drawn.prompts[row].tolist() for row in rows], int(drawn.output_tokens[rows].min())


# --- the two sides -----------------------------------------------------------------------------------


def run_upstream(launch: Launch, prompts: list[list[int]], steps: int) -> Run:
    """One batch in the fork's environment.

    Raises
    ------
    Unavailable
        The fork did not run; its last words.
    """
    config = batch_config(launch, 0)
    assert launch.environment_dir is not None
    work = launch.work_dir
    (work / "batch.json").write_text(json.dumps(config), encoding="utf-8")
    (work / "prompts.json").write_text(json.dumps({"prompts": prompts, "max_tokens": steps}), encoding="utf-8")
    out = work / "out.npz"
    command = [str(environments.python_of(launch.environment_dir)), "-m", "batch_server", "--config", "batch.json"]
    done = subprocess.run(
        [*command, "--batch", "prompts.json", "--out", str(out)],
        env=fork_environment(launch.gpu_ids),
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or not out.is_file():
        raise Unavailable(f"{config['fork']} did not run: {last_words(done.stdout + done.stderr, done.returncode)}")
    with np.load(out) as arrays:
        given = {name: arrays[name] for name in arrays.files}
    times = given["times"]
    debug = launch.deployment.hardware.device == "cpu"
    device, host = given["kv_bytes"].tolist()
    return Run(
        given["tokens"],
        given["logits"],
        _upstream_sets(given, len(prompts)),
        {"device": device, "host": host},
        None if debug else {"prefill": float(times[0]), "decode": float(times[-1] - times[0])},
    )


def _upstream_sets(given: dict[str, np.ndarray], batch: int) -> Sets:
    """From `kept` [steps, layers, entries, batch x heads] or `fetched` (layers from 2, padded with -1)."""
    sets: Sets = {}
    for name, first_step, first_layer in (("kept", 0, 0), ("fetched", 1, WHOLE_LAYERS)):
        if name not in given:
            continue
        steps, layers, _, columns = given[name].shape
        heads = columns // batch
        for step, layer, column in np.ndindex(steps, layers, columns):
            chosen = frozenset(int(x) for x in given[name][step, layer, :, column] if x >= 0)
            sets[step + first_step, layer + first_layer, column // heads, column % heads] = chosen
    return sets


def run_native(launch: Launch, prompts: list[list[int]], steps: int, forced: np.ndarray) -> Run:
    """The same batch on our engine: freely for tokens, memory and time, then with the fork's tokens for the rest."""
    config = EngineConfig.model_validate(engine_config(launch, 0))
    engine = Engine(config)
    begun = time.perf_counter()
    at: list[float] = []
    free = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True)
    requests = engine.generate(
        prompts, free, on_step=lambda outputs: at.append(time.perf_counter()) if outputs else None
    )
    tokens = np.array([request.output for request in requests])
    kv_bytes = {"device": engine.device_pool.peak_live_bytes, "host": engine.host_pool.peak_live_bytes}
    debug = launch.deployment.hardware.device == "cpu"
    seconds = None if debug else {"prefill": at[0] - begun, "decode": at[-1] - at[0]}

    engine = Engine(config)
    sets: Sets = {}
    given = [
        SamplingParams(max_tokens=steps, forced_tokens=tuple(int(t) for t in row), return_logits=True) for row in forced
    ]
    rows: dict[int, int] = {}
    _watch(engine, sets, rows)
    submitted = [engine.submit(prompt, params) for prompt, params in zip(prompts, given, strict=True)]
    rows |= {request.id: row for row, request in enumerate(submitted)}
    while engine.has_work():
        engine.step()
    logits = np.stack([torch.stack(list(request.logits)).float().cpu().numpy() for request in submitted], axis=1)
    return Run(tokens, logits, sets, kv_bytes, seconds)


def _watch(engine: Engine, sets: Sets, rows: dict[int, int]) -> None:
    (policy,) = engine.policies.values()
    steps: Counter[int] = Counter()
    if isinstance(policy, H2OPolicy) and not policy.off:

        def look(request: Request) -> None:
            state = request.kv
            held = state.positions[:, :, : state.size]
            stays = torch.ones_like(held, dtype=torch.bool)
            if state.hole:
                stays.scatter_(2, state.free[..., None], False)
            step = steps[request.id]  # 0 is the end of the prompt
            steps[request.id] += 1
            for layer, head in np.ndindex(held.shape[0], held.shape[1]):
                chosen = held[layer, head][stays[layer, head]]
                sets[step, layer, rows[request.id], head] = frozenset(chosen.tolist())

        policy.look = look
    if isinstance(policy, InfiniGen) and not policy.off:

        def watch(fetched: Fetched) -> None:
            for request, entries in zip(fetched.rows.requests, fetched.entries, strict=True):
                step = request.computed - request.prompt_tokens + 1
                for head, chosen in enumerate(entries):
                    sets[step, fetched.layer, rows[request.id], head] = frozenset(chosen.tolist())

        policy.watch = watch


# --- the comparison ----------------------------------------------------------------------------------


def compare(theirs: Run, ours: Run) -> dict[str, Any]:
    """What agrees. Entries are compared where both report them, under the same tokens."""
    shared = sorted(theirs.sets.keys() & ours.sets.keys())
    equal = sum(theirs.sets[key] == ours.sets[key] for key in shared)
    differ = next((key for key in shared if theirs.sets[key] != ours.sets[key]), None)
    same = theirs.tokens == ours.tokens
    forced = theirs.tokens == ours.logits.argmax(axis=-1).T
    return {
        "tokens": int(same.size),
        "tokens_equal": int(same.sum()),
        "tokens_equal_same_history": int(forced.sum()),
        "logit_difference": float(np.abs(theirs.logits - ours.logits).max()),
        "logit_deviation": float(theirs.logits.std()),
        "sets": len(shared),
        "sets_equal": int(equal),
        "sets_first_difference": None
        if differ is None
        else dict(zip(("step", "layer", "row", "head"), differ, strict=True)),
        "kv_bytes": {"upstream": theirs.kv_bytes, "native": ours.kv_bytes},
        "seconds": None if theirs.seconds is None else {"upstream": theirs.seconds, "native": ours.seconds},
    }


def compare_pair(pair: Pair, layout: Layout, most: int) -> dict[str, Any]:
    """One comparison, as a record of `implementations.json`."""
    cell = pair.upstream
    record: dict[str, Any] = {
        "framework": cell.framework.name,
        "upstream": cell.deployment.slug,
        "native": None if pair.native is None else pair.native.deployment.slug,
        "rule": getattr(cell.framework, "rule", None),
        "model": cell.model.name,
        "budget": cell.budget.share,
        "commit": cell.framework.pins.get("commit", ""),
        "device": cell.hardware.device,
        "debug": cell.hardware.device == "cpu",
        "serving": "batch server",
    }
    if pair.native is None:
        return record | {"reason": "the study has no native cell of this policy and rule under the same conditions"}
    model_dir = model_folder(cell.deployment, layout)
    drawn = workload.load_requests(workload.prepare(cell, model_dir, layout))
    prompts, steps = choose_prompts(drawn, most)
    record |= {"prompts": len(prompts), "prompt_tokens": len(prompts[0]), "output_tokens": steps}
    # Under the debug switch nothing is timed, so nothing need be had alone.
    alone = lease(cell.model.gpus) if cell.hardware.device == "cuda" else contextlib.nullcontext(Lease((), ()))
    with tempfile.TemporaryDirectory(prefix="kvstudy-compare-") as work, alone as held:

        def launch(deployment: Deployment) -> Launch:
            environment = environment_folder(deployment, layout)
            return Launch(
                deployment=deployment,
                model_dir=model_dir.resolve(),
                card=json.loads((model_dir / "model.json").read_text(encoding="utf-8")),
                environment_dir=environment.absolute() if environment else None,
                work_dir=Path(work),
                gpu_ids=held.gpu_ids,
            )

        theirs = run_upstream(launch(cell.deployment), prompts, steps)
        ours = run_native(launch(pair.native.deployment), prompts, steps, theirs.tokens)
    return record | compare(theirs, ours)


def sentence(record: dict[str, Any]) -> str:
    """A record in a line."""
    if "reason" in record:
        return f"{record['upstream']}: {record['reason']}"
    sets = f"{record['sets_equal']}/{record['sets']} sets" if record["sets"] else "no entries dropped"
    timed = record["seconds"]
    spoken = "not timed (debug switch device=cpu)"
    if timed is not None:
        spoken = ", ".join(f"{side} {took['prefill']:.3g} + {took['decode']:.3g} s" for side, took in timed.items())
    kv = {side: sum(sizes.values()) for side, sizes in record["kv_bytes"].items()}
    return (
        f"{record['upstream']} against {record['native']}: {record['tokens_equal']}/{record['tokens']} tokens equal, "
        f"{sets}, logits within {record['logit_difference']:.2g} (deviation {record['logit_deviation']:.2g}); "
        f"KV {kv['upstream'] / 2**20:.3g} MiB against {kv['native'] / 2**20:.3g} MiB; {spoken}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line where something is missing."""
    parser = argparse.ArgumentParser(
        prog="kvstudy compare-implementations", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--plan", type=Path, required=True, help="plan.json of a study")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--out", type=Path, required=True, help="implementations.json")
    parser.add_argument("--prompts", type=int, default=4, help="prompts in the batch, at most (default %(default)s)")
    parser.add_argument(
        "--printed", action="append", default=[], metavar="FRAMEWORK=LOG", help="output of the authors' own command"
    )
    options = parser.parse_args(argv)
    from kvstudy.grid.plan import load_plan

    plan = load_plan(options.plan)
    try:
        printed = []
        for text in options.printed:
            name, _, path = text.partition("=")
            printed.append({"framework": name, **parse_printed(Path(path).read_text(encoding="utf-8")).as_json()})
        records = []
        for pair in pairs(plan.cells):
            records.append(compare_pair(pair, Layout(options.results), options.prompts))
            print(sentence(records[-1]), flush=True)
        if not records:
            print(f"kvstudy compare-implementations: study {plan.name} has no author's fork", file=sys.stderr)
            return 2
        write_json(options.out, {"pairs": records, "printed": printed})
    except (Unavailable, NotPrinted, workload.WorkloadError, OSError) as error:
        print(f"kvstudy compare-implementations: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
