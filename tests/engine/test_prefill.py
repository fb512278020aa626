"""The three ways to compute a prompt: alike where they must be, different where the paper says, and what they hold."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_tiny import random_prompt

from kvstudy.engine import attention
from kvstudy.engine.attending import Attending, full_matrix, full_matrix_bytes
from kvstudy.engine.core import Engine
from kvstudy.engine.policies.h2o import H2O
from kvstudy.engine.request import Request, SamplingParams

Make = Callable[..., Engine]


@pytest.mark.parametrize("start", [0, 7])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_full_matrix_is_blocked(start: int, with_sinks: bool) -> None:
    torch.manual_seed(0)
    q = torch.randn(20, 4, 16)
    k, v = torch.randn(2, 2, start + 20, 16)
    sinks: list[torch.Tensor | None] = [torch.randn(4) if with_sinks else None]
    found = []
    for variant in ("blocked", "full_matrix"):
        attending = Attending(0.25, sinks, variant)  # type: ignore[arg-type]
        out, lse = torch.empty_like(q), torch.empty(4, 20)
        attending.prefill(0, q, k, v, start, out, lse)
        found.append((out, lse, attending.column_sums(q, k, lse, start)))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert found[0][2].sum() < 20 * 4 if with_sinks else found[0][2].sum() == pytest.approx(20 * 4, rel=1e-5)


@pytest.mark.parametrize("policy", ["full", "h2o", "streaming", "infinigen"])
def test_the_matrix_gives_the_same_tokens(policy: str, engine_of: Make) -> None:
    prompts = [random_prompt(n, seed=n) for n in (70, 33)]
    outputs = []
    for variant in ("blocked", "full_matrix"):
        options = {"skew": "none"} if policy == "infinigen" else {}
        engine = engine_of(
            policy=policy,
            policy_options=options,
            prefill=variant,
            budget={"share": 0.3},
            host_kv_memory_bytes=1 << 20,
            max_prefill_tokens=16,
        )
        engine.trace = trace = []
        outputs.append([r.output for r in engine.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))])
        if variant == "full_matrix":  # whole prompts, one by one
            assert [[length for _, _, length in s.chunks] for s in trace if s.chunks] == [[70], [33]]
    assert outputs[0] == outputs[1]


def heavy_set(engine: Engine, prompt: list[int]) -> list[set[int]]:
    """What H2O keeps of a prompt beside the newest tokens, a layer and KV head."""
    policy = engine.policies["h2o"]
    assert isinstance(policy, H2O)
    kept: list[set[int]] = []

    def look(request: Request) -> None:
        if not kept:
            for layer in range(engine.model.geometry.layers):
                positions, _, _ = policy.contents(request, layer)
                kept.extend({int(p) for p in row if p < len(prompt) - 12} for row in positions)

    policy.look = look
    engine.generate([prompt], SamplingParams(max_tokens=2, ignore_eos=True))
    return kept


def test_lossy_chunks_lose_what_lies_across_them(engine_of: Make) -> None:
    """Within one chunk nothing is lost; across chunks another heavy set is found (C13)."""
    prompt = random_prompt(120, seed=5)
    options = {"policy": "h2o", "budget": {"share": 0.2}}
    whole = heavy_set(engine_of(max_prefill_tokens=512, **options), prompt)
    assert heavy_set(engine_of(max_prefill_tokens=30, **options), prompt) == whole
    assert heavy_set(engine_of(max_prefill_tokens=512, prefill="chunked_lossy", **options), prompt) == whole
    lossy = heavy_set(engine_of(max_prefill_tokens=30, prefill="chunked_lossy", **options), prompt)
    jaccard = [len(a & b) / len(a | b) for a, b in zip(whole, lossy, strict=True)]
    assert len(jaccard) == 6 and sum(jaccard) / len(jaccard) < 0.9


def test_lossy_chunks_are_block_diagonal_attention(engine_of: Make) -> None:
    """Each chunk's queries, and its column sums, see that chunk alone."""
    torch.manual_seed(1)
    q, k, v = torch.randn(24, 4, 16), torch.randn(2, 24, 16), torch.randn(2, 24, 16)
    attending = Attending(0.25, [None], "chunked_lossy")
    for start in (0, 8, 16):
        at = slice(start, start + 8)
        out, lse = torch.empty(8, 4, 16), torch.empty(4, 8)
        attending.prefill(0, q[at], k[:, : start + 8], v[:, : start + 8], start, out, lse)
        want = torch.empty_like(out)
        full_matrix(q[at], k[:, at], v[:, at], 0, 0.25, want)
        assert torch.allclose(out, want, atol=1e-5)
        sums = attending.column_sums(q[at], k[:, : start + 8], lse, start)
        assert (sums[:, :start] == 0).all() and sums.sum() == pytest.approx(8 * 4, rel=1e-5)


# -- memory ----------------------------------------------------------------------------------------------------


def peak_growth(run: Callable[[], object]) -> int:
    """Bytes by which the process grows at most while `run` runs, as the kernel counts its resident pages."""

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    run()
    return status("VmHWM") - before


def test_the_matrix_takes_what_the_formula_says_and_blocks_next_to_nothing() -> None:
    tokens, heads, dim = 3000, 8, 16
    q, k, v = torch.randn(tokens, heads, dim), torch.randn(2, tokens, dim), torch.randn(2, tokens, dim)
    out = torch.zeros_like(q)
    full_matrix(q[:32], k[:, :32], v[:, :32], 0, 0.25, out[:32])  # what the first call loads is not its matrix
    taken = peak_growth(lambda: full_matrix(q, k, v, 0, 0.25, out))
    assert taken == pytest.approx(full_matrix_bytes(tokens, heads, dim, 4), rel=0.05)
    attention.prefill(q[:512], k[:, :512], v[:, :512], 0, 0.25, out[:512])
    blocked = peak_growth(lambda: attention.prefill(q[-512:], k, v, tokens - 512, 0.25, out[-512:]))
    assert blocked < taken / 20


MEASURE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from test_prefill import peak_growth
from kvstudy.engine.config import EngineConfig
from kvstudy.engine.core import Engine
from kvstudy.engine.request import SamplingParams
folder, policy, most = sys.argv[2], sys.argv[3], int(sys.argv[4])
engine = Engine(EngineConfig.model_validate({
    "model_dir": folder, "dtype": "float32", "policy": policy, "budget": {"share": 0.2}, "kv_memory_bytes": 1 << 28,
    "max_prefill_tokens": 512}))
params = SamplingParams(max_tokens=1, ignore_eos=True)
engine.generate([[1] * 600], params)
found = {}
for n in (most // 2, most):
    growth = peak_growth(lambda: engine.generate([[i % 250 for i in range(n)]], params))
    held = engine.device_pool
    found[n] = growth - held.peak_live_bytes - held.peak_aux_bytes
    engine.reset()
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("policy", "most"),
    [
        ("h2o", 8192),
        pytest.param("h2o", 32768, marks=pytest.mark.long),
        pytest.param("full", 32768, marks=pytest.mark.long),
    ],
)
def test_peak_workspace_of_a_prompt_is_linear_in_it(policy: str, most: int, one_layer: Path) -> None:
    """Pages beyond the KV and the sums: twice for twice the tokens, not four times; a matrix would take n x n x 4."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",  # what is freed is given back, so that each prompt is measured from scratch
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
    }
    command = [sys.executable, "-c", MEASURE, str(Path(__file__).parent), str(one_layer), policy, str(most)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    half, whole = json.loads(ended.stdout).values()
    assert whole < 2.6 * max(half, 1 << 20), (half, whole)
    assert whole < most * most * 4 / 8
