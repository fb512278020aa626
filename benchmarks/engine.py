"""Our engine beside vLLM, each policy beside `full`: `python -m benchmarks.engine [--json] [--rows decode,prefill]`.

SmolLM2-135M in bfloat16 (`--model`, a folder). Both engines get the same cores, one and then two, and are stepped by
hand in processes of their own, by turns; a row's `ratio` is the median over the rounds. vLLM's side is run by the
interpreter of its own environment (`--vllm-python`, by default that under `results/environments`): the faster of eager
and compiled, prefix caching off, threads bound to the cores. What stands beside a row: both engines' absolute values,
and the time that the bytes alone need (weights once, KV once, at the rate at which this machine streams memory on these
cores). The rows are those of docs/engine.md; every part takes less than eight minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Row, emit, line
from benchmarks.sides import ROOT, Side, interleaved, ratio

DECODE = [(1, 256), (8, 256), (32, 256), (8, 16), (1, 2048), (8, 2048), (8, 4096)]
SHORT = 4
"""Points that both of vLLM's modes are measured at; the rest is left to the one that was faster at these."""
TARGETS = [point for point in DECODE if point != (8, 16)]
PREFILL = [256, 512, 2048, 4096]
ROUNDS, STEPS = 6, 8
GIB = 1 << 30
PCIE4 = 25.0
"""GB/s that a x16 link of PCIe 4 delivers (31.5 less the protocol's share)."""
BUDGET = 0.2


class Bench:
    """What the parts share: the folder of the model, vLLM's interpreter, the cores."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model = str(options.model.resolve())
        self.vllm_python: Path | None = options.vllm_python
        available = sorted(os.sched_getaffinity(0))
        self.cores = [available[:count] for count in options.cores if count <= len(available)]
        self.all_cores = available
        self.modes: list[str] = options.vllm_modes
        self._open = ExitStack()
        self._pairs: dict[tuple[int, ...], dict[str, Side]] = {}

    def pair(self, cores: Sequence[int]) -> dict[str, Side]:
        """Our engine and vLLM, eager and compiled, on these cores: started once, kept until `close`.

        vLLM as three processes, all of them on these cores: faster than as one (see `helpers`).
        """
        if tuple(cores) not in self._pairs:
            sides = {"ours": self._open.enter_context(self.ours(cores))}
            for mode in self.modes:
                sides[f"vllm {mode}"] = self._open.enter_context(
                    self.vllm(cores, eager=mode == "eager", helpers="pinned")
                )
            self._pairs[tuple(cores)] = sides
        return dict(self._pairs[tuple(cores)])

    def close(self) -> None:
        """End what `pair` keeps."""
        self._open.close()

    @contextmanager
    def ours(self, cores: Sequence[int], **engine: Any) -> Iterator[Side]:
        """Our engine on these cores, with these options."""
        with self.process(cores) as side:
            side("start", model=self.model, cores=list(cores), **{"kv_memory_bytes": GIB, **engine})
            yield side

    @staticmethod
    def process(cores: Sequence[int]) -> Side:
        """A process for an engine of ours, not started yet."""
        env = {"OMP_NUM_THREADS": str(len(cores)), "GOMP_SPINCOUNT": "10000", "PYTHONPATH": str(ROOT / "src")}
        return Side(sys.executable, "benchmarks.kvstudy_side", cores, env)

    @contextmanager
    def vllm(self, cores: Sequence[int], *, eager: bool = True, helpers: str = "none") -> Iterator[Side]:
        """`helpers`: `none` (one process), `pinned` with the worker, `floating` on all cores, or vLLM left `alone`."""
        assert self.vllm_python is not None
        env: dict[str, str | None] = {
            "PYTHONPATH": None,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if helpers == "none" else "1",
        }
        iomp = self.vllm_python.parent.parent / "lib" / "libiomp5.so"
        if iomp.exists():
            env["LD_PRELOAD"] = str(iomp)
        if helpers != "alone":
            env |= {"OMP_NUM_THREADS": str(len(cores)), "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}
        if helpers == "none":  # what vLLM sets for a worker of its own
            bound = ",".join(map(str, cores))
            env |= {"KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{bound}]", "KMP_BLOCKTIME": "5"}
        home = cores if helpers in ("none", "pinned") else self.all_cores
        with Side(str(self.vllm_python), "benchmarks.vllm_side", home, env) as side:
            side("start", model=self.model, eager=eager, kv_bytes=GIB + (64 << 20), max_tokens=4096)
            yield side


def label(cores: Sequence[int]) -> str:
    return f"{len(cores)} core{'s' if len(cores) > 1 else ''} ({','.join(map(str, cores))})"


def decode_pair(sides: dict[str, Side], batch: int, context: int, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds a step of each side, a median a round."""
    for side in sides.values():
        side("begin", batch=batch, context=context, steps=rounds * STEPS + 4)
    timed = {name: partial(side, "decode", steps=STEPS) for name, side in sides.items()}
    found = interleaved(timed, rounds)
    for side in sides.values():
        side("end")
    return found


def against(times: dict[str, list[float]]) -> tuple[str, float]:
    """(the fastest vLLM of a row, how many times as fast we are)."""
    best = min((name for name in times if name != "ours"), key=lambda name: statistics.median(times[name]))
    return best, ratio(times[best], times["ours"])


def decode(bench: Bench) -> Iterator[Row]:
    """Target 1, and vLLM left alone."""
    for cores in bench.cores:
        sides = bench.pair(cores)
        limits = sides["ours"]("machine")
        yield Row(f"memory read, {label(cores)}", limits["bytes_per_s"] / 1e9, "GB/s")
        yield Row(f"largest matrix product, {label(cores)}", limits["flops_per_s"] / 1e9, "GFLOP/s")
        ratios: dict[tuple[int, int], float] = {}
        spent: dict[str, list[float]] = {}
        for batch, context in DECODE:
            times = decode_pair(sides, batch, context)
            for side, found in times.items():
                spent.setdefault(side, []).append(statistics.median(found))
            best, faster = against(times)
            ratios[batch, context] = faster
            if len(ratios) == SHORT and len(sides) > 2:  # vLLM reads long prompts for minutes
                slower = max((name for name in sides if name != "ours"), key=lambda name: sum(spent[name]))
                del sides[slower]
            yield decode_row(f"decode {batch} x {context}, {label(cores)}", times, batch, context, limits, best, faster)
        mean = float(np.exp(np.mean([np.log(ratios[point]) for point in TARGETS])))
        yield Row(f"decode, geometric mean, {label(cores)}", mean, "x vLLM", mean, 1.0, mean >= 1.0)


def decode_row(
    name: str,
    times: dict[str, list[float]],
    batch: int,
    context: int,
    limits: dict[str, float],
    best: str,
    faster: float,
) -> Row:
    step = statistics.median(times["ours"])
    read = (limits["weight_bytes"] + batch * context * limits["token_bytes"]) / limits["bytes_per_s"]
    product = batch * limits["weight_bytes"] / limits["flops_per_s"]
    beside = {f"{side} ms": statistics.median(found) * 1e3 for side, found in times.items() if side != "ours"}
    beside |= {"tok/s": batch / step, f"tok/s {best}": batch / statistics.median(times[best])}
    beside |= {"byte limit ms": read * 1e3, "product limit ms": product * 1e3}
    aim = 0.9 if (batch, context) in TARGETS else None
    return Row(name, step * 1e3, "ms/step", faster, aim, None if aim is None else faster >= aim, beside)


def alone(bench: Bench) -> Iterator[Row]:
    """vLLM as it comes, on this machine's cores, beside ours on one core and on all."""
    sizes = [bench.all_cores[:1], bench.all_cores] if len(bench.all_cores) > 1 else [bench.all_cores]
    with ExitStack() as stack:
        sides = {f"ours on {len(cores)}": stack.enter_context(bench.ours(cores)) for cores in sizes}
        sides["vllm"] = stack.enter_context(bench.vllm(bench.all_cores, helpers="alone"))
        for batch, context in ((1, 256), (8, 256), (32, 256), (8, 2048)):
            times = decode_pair(sides, batch, context)
            ours = [name for name in times if name != "vllm"]
            beside = {f"{name} ms": statistics.median(times[name]) * 1e3 for name in ours}
            beside |= {f"{name} / vllm, tok/s": ratio(times["vllm"], times[name]) for name in ours}
            step = statistics.median(times["vllm"]) * 1e3
            yield Row(f"decode {batch} x {context}, vLLM left alone", step, "ms/step", beside=beside)


def helpers(bench: Bench) -> Iterator[Row]:
    """What vLLM's helper processes cost where they share the worker's core, and its time at 1 to 4 rows on one core."""
    core = bench.all_cores[:1]
    with ExitStack() as stack:
        sides = {kind: stack.enter_context(bench.vllm(core, helpers=kind)) for kind in ("none", "pinned", "floating")}
        for batch in (1, 2, 3, 4, 8):
            times = decode_pair(sides, batch, 256)
            steps = {kind: statistics.median(found) * 1e3 for kind, found in times.items()}
            yield Row(
                f"vLLM decode {batch} x 256, {label(core)}: helpers floating",
                steps["floating"],
                "ms/step",
                ratio(times["pinned"], times["floating"]),
                beside={"pinned ms": steps["pinned"], "one process ms": steps["none"]},
            )


def prefill(bench: Bench) -> Iterator[Row]:
    """Target 2."""
    for cores in bench.cores:
        sides = bench.pair(cores)
        limits = sides["ours"]("machine")
        for length in PREFILL:
            for side in sides.values():
                side("prefill", length=min(length, 512))
            timed = {n: partial(side, "prefill", length=length) for n, side in sides.items()}
            times = interleaved(timed, 5 if length < 1024 else 3)
            _, faster = against(times)
            beside = {f"{n} tok/s": length / statistics.median(t) for n, t in times.items() if n != "ours"}
            # All layers' weights, and the causal half of both attention products.
            flops = limits["layer_flops"] + limits["attention_flops"] * length / 2
            beside["product limit tok/s"] = limits["flops_per_s"] / flops
            aim = 0.9 if length in (512, 4096) else None
            value = length / statistics.median(times["ours"])
            met = None if aim is None else faster >= aim
            yield Row(f"prefill {length}, {label(cores)}", value, "tok/s", faster, aim, met, beside)


def h2o(bench: Bench) -> Iterator[Row]:
    """Target 3: H2O at 0.2, 8 x 4,096, on the most cores."""
    cores = bench.all_cores[:2]
    budget = {"share": BUDGET, "of": "prompt"}
    vllm = bench.pair(cores)[f"vllm {bench.modes[-1]}"]
    with bench.ours(cores, other_policies={"h2o": {}}, budget=budget, kv_memory_bytes=2 * GIB) as ours:
        groups = {"t0": ("full", 16), "full": ("full", 4096), "h2o": ("h2o", 4096)}
        steps = ROUNDS * STEPS + 4
        held = {g: ours("begin", batch=8, context=n, steps=steps, policy=p, group=g) for g, (p, n) in groups.items()}
        vllm("begin", batch=8, context=4096, steps=steps)
        timed: dict[str, Callable[[], list[float]]] = {
            name: partial(ours, "decode", steps=STEPS, group=name) for name in groups
        }
        timed["vllm"] = partial(vllm, "decode", steps=STEPS)
        times = interleaved(timed, ROUNDS)
        vllm("end")
        step = {name: statistics.median(found) * 1e3 for name, found in times.items()}
        share = held["h2o"]["device"] / held["full"]["device"]
        faster = ratio(times["vllm"], times["h2o"])
        beside = {
            f"vllm {bench.modes[-1]} ms": step["vllm"],
            "full ms": step["full"],
            "t0 ms": step["t0"],
            "bytes / full": share,
        }
        yield Row(f"h2o {BUDGET}, 8 x 4096, {label(cores)}", step["h2o"], "ms/step", faster, 1.7, faster >= 1.7, beside)
        most = share / 0.7 * (step["full"] - step["t0"])
        extra = step["h2o"] - step["t0"]
        beside = {"t(b) ms": step["h2o"], "t(full) ms": step["full"], "t0 ms": step["t0"], "bytes / full": share}
        name = f"h2o {BUDGET}, 8 x 4096: t(b) - t0, {label(cores)}"
        yield Row(name, extra, "ms", extra / most, most, extra <= most, beside)


def infinigen(bench: Bench) -> Iterator[Row]:
    """Target 4: InfiniGen at 0.2 beside the whole cache, both on the host tier, over a paced link and without one."""
    for cores in bench.cores:
        with bench.ours(
            cores,
            other_policies={"offload": {}, "infinigen": {"alpha": 99.0, "skew": f"{bench.model}.skew.safetensors"}},
            budget={"share": BUDGET, "of": "prompt"},
            kv_memory_bytes=3 * GIB,
            host_kv_memory_bytes=2 * GIB,
        ) as ours:
            token_bytes = ours("machine")["token_bytes"]
            steps = 2 * ROUNDS * STEPS + 12
            for policy in ("full", "offload", "infinigen"):
                ours("begin", batch=8, context=4096, steps=steps, policy=policy, group=policy)
            for gbps in (PCIE4, None):
                ours("pace", gbps=gbps)
                ours("split", policy="infinigen")
                timed = {g: partial(ours, "decode", steps=STEPS, group=g) for g in ("full", "offload", "infinigen")}
                times = interleaved(timed, ROUNDS)
                spent = ours("split", policy="infinigen")
                step = {name: statistics.median(found) * 1e3 for name, found in times.items()}
                beside = {"full on the host ms": step["offload"], "full on the device ms": step["full"]}
                beside |= {f"{stage} ms": seconds / (ROUNDS * STEPS) * 1e3 for stage, seconds in spent.items()}
                if gbps:
                    beside["link alone, full ms"] = 8 * 4096 * token_bytes / gbps / 1e6
                faster = ratio(times["offload"], times["infinigen"])
                over = f"{gbps:.0f} GB/s" if gbps else "unpaced"
                aim, met = (1.5, faster >= 1.5) if gbps else (None, None)
                name = f"infinigen {BUDGET}, 8 x 4096, {over}, {label(cores)}"
                yield Row(name, step["infinigen"], "ms/step", faster, aim, met, beside)


def memory(bench: Bench) -> Iterator[Row]:
    """Target 5: KV bytes held, and requests admitted to equal KV memory."""
    prompt, output = 2048, 64
    skew = f"{bench.model}.skew.safetensors"
    with bench.ours(
        bench.all_cores[:2],
        other_policies={"h2o": {}, "streaming": {}, "infinigen": {"alpha": 99.0, "skew": skew}},
        budget={"share": BUDGET, "of": "prompt"},
        host_kv_memory_bytes=16 * GIB,
        fill=False,
    ) as ours:
        kept, entry = int(BUDGET * prompt), ours("machine")["entry_bytes"]
        # Entries of a request after the second of its output tokens, as the policies' docstrings have it.
        formulas = {"full": (prompt + 2) * 30, "h2o": kept * 30, "streaming": kept * 30, "infinigen": (prompt + 2) * 2}
        for policy, entries in formulas.items():
            held = ours("begin", batch=2, context=prompt, steps=output, policy=policy, group=policy)
            ours("end", group=policy)
            want = 2 * entries * entry
            off = held["device"] / want
            beside = {"formula bytes": want, "beside entries, bytes": held["device_beside"], "host bytes": held["host"]}
            yield Row(
                f"KV held, {policy} {BUDGET}, 2 x {prompt}",
                held["device"],
                "bytes",
                off,
                1.0,
                abs(off - 1) < 0.01,
                beside,
            )
        room = {policy: ours("admitted", policy=policy, prompt=prompt, output=output) for policy in formulas}
        for policy, found in room.items():
            more = found["admitted"] / room["full"]["admitted"]
            expected = 1 + (GIB - found["peak_bytes"]) // found["bytes"]
            beside = {"at once, all with their prompts to read": found["at_once"], "by the rule": expected}
            beside["bytes a request past its prompt"] = found["bytes"]
            name = f"admitted to 1 GiB one after another, {policy} {BUDGET}, {prompt} + {output}"
            met = abs(found["admitted"] / expected - 1) < 0.02
            yield Row(name, found["admitted"], "requests", more, expected, met, beside)


def flat(bench: Bench) -> Iterator[Row]:
    """Target 6: at 512 entries H2O's step does not depend on the context."""
    cores = bench.all_cores[:2]
    contexts = [1024, 2048, 4096, 8000]
    with bench.ours(
        cores, policy="h2o", budget={"share": 512, "of": "tokens"}, kv_memory_bytes=GIB, max_prefill_tokens=1024
    ) as ours:
        for context in contexts:
            ours("begin", batch=8, context=context, steps=ROUNDS * STEPS + 4, policy="h2o", group=str(context))
        timed = {str(n): partial(ours, "decode", steps=STEPS, group=str(n)) for n in contexts}
        times = interleaved(timed, ROUNDS + 2)
        for context in contexts[1:]:
            slower = ratio(times[str(context)], times["1024"])
            beside = {"at 1024 ms": statistics.median(times["1024"]) * 1e3}
            step = statistics.median(times[str(context)]) * 1e3
            aim, met = (1.05, slower < 1.05) if context == contexts[-1] else (None, None)
            yield Row(f"h2o 512 entries, 8 x {context}, {label(cores)}", step, "ms/step", slower, aim, met, beside)


def join(bench: Bench) -> Iterator[Row]:
    """A prompt of 4,096 tokens arrives among eight that decode, in chunks of 512 as every study has it, and in smaller.

    In each round the prompt's chunks are also timed alone, by turns before and after. p99 of 40 gaps is next to their
    greatest: a single hiccup of the machine decides a round, so the last of `beside` tells of every chunk instead.
    """
    batch, context, arriving, gaps = 8, 256, 4096, 40
    for cores in bench.cores:
        with bench.ours(cores) as ours:
            ours("join", batch=batch, context=context, arriving=arriving, chunk=512, gaps=gaps, alone_first=True)
            asked = partial(ours, "join", batch=batch, context=context, arriving=arriving, gaps=gaps)
            for chunk, rounds in ((512, ROUNDS), (256, 2), (128, 2)):
                found = [asked(chunk=chunk, alone_first=number % 2 == 0) for number in range(rounds)]
                name = f"{arriving} joins {batch} x {context} in chunks of {chunk}: p99 ITL raised, {label(cores)}"
                row = join_row(name, found, arriving // chunk)
                yield row if chunk == 512 else replace(row, target=None, met=None)


def join_row(name: str, rounds: list[dict[str, list[float]]], chunks: int) -> Row:
    """How much the others' p99 ITL rises, and its ratio to the time of the slowest chunk alone: at most 1."""
    calm, busy = ([float(np.quantile(found[kind], 0.99)) for found in rounds] for kind in ("calm", "busy"))
    raised = [b - a for a, b in zip(calm, busy, strict=True)]
    slowest = [max(found["alone"]) for found in rounds]
    excess = [
        (step - statistics.median(found["calm"])) / chunk
        for found in rounds
        for step, chunk in zip(found["busy"][:chunks], found["alone"], strict=True)
    ]
    beside = {
        "p99 ITL before ms": statistics.median(calm) * 1e3,
        "p99 ITL while it joins ms": statistics.median(busy) * 1e3,
        "slowest chunk alone ms": statistics.median(slowest) * 1e3,
        "first token of the prompt ms": statistics.median(sum(found["busy"][:chunks]) for found in rounds) * 1e3,
        "alone ms": statistics.median(sum(found["alone"]) for found in rounds) * 1e3,
        "a step with a chunk less one without / the chunk alone, median": statistics.median(excess),
    }
    share = ratio(raised, slowest)
    return Row(name, statistics.median(raised) * 1e3, "ms", share, 1.0, share <= 1.0, beside)


def threads(bench: Bench) -> Iterator[Row]:
    """What a second core gives, in the thread that built the engine and in another, which is how a server steps it."""
    if len(bench.all_cores) < 2:
        return
    with bench.ours(bench.all_cores[:1]) as one, bench.ours(bench.all_cores[:2]) as two:
        for batch in (1, 8, 32):
            for side in (one, two):
                side("begin", batch=batch, context=256, steps=3 * ROUNDS * STEPS + 4)
            times = interleaved(
                {
                    "1 core ms": partial(one, "decode", steps=STEPS),
                    "2 cores ms": partial(two, "decode", steps=STEPS),
                    "2 cores, another thread ms": partial(two, "elsewhere", steps=STEPS),
                    "and the builder keeps its workers ms": partial(two, "elsewhere", steps=STEPS, crowded=True),
                },
                ROUNDS,
            )
            for side in (one, two):
                side("end")
            step = {how: statistics.median(found) * 1e3 for how, found in times.items()}
            served = "2 cores, another thread ms"
            name = f"decode {batch} x 256, {label(bench.all_cores[:2])}, another thread"
            yield Row(name, step.pop(served), "ms/step", ratio(times["1 core ms"], times[served]), beside=step)


OTHERS = {
    "opt, 125M": {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "hidden_size": 768,
        "word_embed_proj_dim": 768,
        "ffn_dim": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
    },
    "gpt-oss, 8 experts": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 768,
        "intermediate_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
    },
}
"""Models that run through the library's own layers, with random weights."""


def compiled(bench: Bench) -> Iterator[Row]:
    """Whether `torch.compile` of the library's layers would pay, for models that ours do not replace."""
    for name, shape in OTHERS.items():
        with tempfile.TemporaryDirectory() as folder, bench.process(bench.all_cores[:1]) as ours:
            Path(folder, "config.json").write_text(json.dumps(shape))
            ours("start", model=folder, cores=bench.all_cores[:1], random_weights=True, kv_memory_bytes=GIB)
            for batch in (1, 8):
                ours("begin", batch=batch, context=256, steps=2 * (ROUNDS + 1) * STEPS + 4)

                def decode(on: bool, side: Side = ours) -> list[float]:
                    side("compiled", on=on)
                    found: list[float] = side("decode", steps=STEPS)
                    return found

                decode(True)  # compiles
                times = interleaved({"eager": partial(decode, False), "compiled": partial(decode, True)}, ROUNDS)
                ours("end")
                step = {how: statistics.median(found) * 1e3 for how, found in times.items()}
                row = f"{name}, decode {batch} x 256, compiled, {label(bench.all_cores[:1])}"
                yield Row(
                    row,
                    step["compiled"],
                    "ms/step",
                    ratio(times["eager"], times["compiled"]),
                    beside={"eager ms": step["eager"]},
                )


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "decode": decode,
    "prefill": prefill,
    "h2o": h2o,
    "infinigen": infinigen,
    "memory": memory,
    "flat": flat,
    "join": join,
    "threads": threads,
    "compile": compiled,
    "helpers": helpers,
    "alone": alone,
}
WITHOUT_VLLM = ("infinigen", "memory", "flat", "join", "threads", "compile")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--rows", default=",".join(PARTS), help=f"parts to run, of {', '.join(PARTS)}")
    parser.add_argument("--cores", default="1,2", help="numbers of cores, for the parts that run on each")
    parser.add_argument("--model", type=Path, help="a model's folder; SmolLM2-135M under results/models by default")
    parser.add_argument("--vllm-python", type=Path, help="python of an environment that has vllm")
    parser.add_argument("--vllm-modes", default="eager,compiled", help="which to compare with; the faster one counts")
    options = parser.parse_args()
    options.vllm_modes = options.vllm_modes.split(",")
    options.cores = [int(count) for count in options.cores.split(",")]
    wanted = options.rows.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"no rows {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    options.model = options.model or next(iter((ROOT / "results" / "models").glob("smollm2-135m-instruct-*/")), None)
    if options.model is None:
        parser.error("no SmolLM2-135M under results/models: run 'kvstudy models' or name a folder with --model")
    if options.vllm_python is None:
        options.vllm_python = next((ROOT / "results" / "environments").glob("vllm-cpu-*/bin/python"), None)
    if options.vllm_python is None:
        left_out = [part for part in wanted if part not in WITHOUT_VLLM]
        if left_out:
            parser.error(f"{', '.join(left_out)} need vLLM's environment: 'kvstudy environment vllm' or --vllm-python")
    bench, found = Bench(options), []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends too
    try:
        for part in wanted:
            begin = time.monotonic()
            for row in PARTS[part](bench):
                found.append(row)
                print(line(row), file=sys.stderr, flush=True)  # minutes lie between them
            found.append(Row(f"{part}: took", time.monotonic() - begin, "s"))
    except (KeyboardInterrupt, SystemExit):
        print("stopped: what follows was measured until then", file=sys.stderr)
    finally:
        bench.close()
    emit(found, options.json)


if __name__ == "__main__":
    main()
