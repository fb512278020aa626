"""Deployments become the forks' command lines; what the forks print becomes numbers."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstudy.frameworks.upstream.arguments import fork_arguments
from kvstudy.frameworks.upstream.printed import NotPrinted, parse_printed
from kvstudy.grid.schema import Budget, Deployment, FlexGen, Full, H2OUpstream, Hardware, InfiniGenUpstream, Model

FORKS = os.environ.get("KVSTUDY_FORKS")

#: Options that each fork's `add_parser_arguments` takes at its pinned commit: name -> (type, takes several).
COMMON: dict[str, dict[str, Any]] = {
    "--model": {"type": str},
    "--path": {"type": str},
    "--offload-dir": {"type": str},
    "--gpu-batch-size": {"type": int},
    "--num-gpu-batches": {"type": int},
    "--percent": {"type": int, "nargs": "+"},
    "--overlap": {"choices": ["true", "false"], "nargs": "?"},
}
OPTIONS = {
    "flexgen": COMMON,
    "h2o": COMMON | {"--hh-ratio": {"type": float}, "--hh-all": {"choices": ["true", "false"], "nargs": "?"}},
    "infinigen": COMMON
    | {
        "--alpha": {"type": int},
        "--partial-weight-ratio": {"type": float},
        "--max-num-kv": {"type": int},
        "--warmup-input-path": {"type": str},
    },
}


def deployment(framework: Any, share: float = 1.0, **options: Any) -> Deployment:
    return Deployment(
        framework=framework,
        model=Model(
            name="opt-6.7b",
            source="hub",
            hub_id="facebook/opt-6.7b",
            revision="x",
            dtype="float16",
            max_model_len=2048,
        ),
        hardware=Hardware(name="gpu", device="cuda", gpus=1, server_cores=(0,), client_cores=(1,)),
        budget=Budget(share=share),
        kv_memory_mib=1024,
        harness_version=1,
        **options,
    )


CASES = [
    (FlexGen(), 1.0),
    (FlexGen(kv_home="host"), 1.0),
    (H2OUpstream(), 1.0),
    (H2OUpstream(weights="dummy"), 0.2),
    (InfiniGenUpstream(), 1.0),
    (InfiniGenUpstream(alpha=7, partial_ratio=0.3), 0.2),
]


def arguments(framework: Any, share: float) -> list[str]:
    return fork_arguments(deployment(framework, share), Path("/w"), Path("/o"), Path("/c.txt"))


@pytest.mark.parametrize(("framework", "share"), CASES)
def test_the_arguments_are_ones_that_the_fork_has(framework: Any, share: float) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    for name, spec in OPTIONS[framework.environment].items():
        parser.add_argument(name, **spec)
    parsed = parser.parse_args(arguments(framework, share))
    assert len(parsed.percent) == 6 and parsed.gpu_batch_size == 8 and parsed.overlap == "false"


def test_a_budget_becomes_the_authors_knobs() -> None:
    def value(words: list[str], name: str) -> str:
        return words[words.index(name) + 1]

    half = arguments(H2OUpstream(), 0.2)
    assert value(half, "--hh-ratio") == "0.1" and "--hh-all" in half
    whole = arguments(H2OUpstream(), 1.0)
    assert value(whole, "--hh-ratio") == "1" and "--hh-all" not in whole
    assert value(arguments(H2OUpstream(weights="dummy"), 0.2), "--path") == "_DUMMY_"
    capped = arguments(InfiniGenUpstream(), 0.2)
    assert value(capped, "--max-num-kv") == str(int(0.2 * 2048) - 1) and value(capped, "--alpha") == "4"
    assert capped[capped.index("--percent") + 3 : capped.index("--percent") + 5] == ["0", "100"]  # cache on the host
    with pytest.raises(TypeError, match="not served by an author's fork"):
        arguments(Full(), 1.0)


@pytest.mark.skipif(FORKS is None, reason="KVSTUDY_FORKS names no folder of built fork environments")
@pytest.mark.parametrize(("framework", "share"), CASES)
def test_the_forks_own_parsers_take_them(framework: Any, share: float) -> None:
    name = framework.environment
    package = "flexllmgen" if name == "flexgen" else "flexgen"
    (python,) = Path(str(FORKS)).glob(f"{name}-cpu-*/bin/python")
    code = (
        f"import argparse, sys; from {package} import flex_opt as f; p = argparse.ArgumentParser();"
        "f.add_parser_arguments(p); a = p.parse_args(sys.argv[1:]); print(a.percent, a.overlap, a.gpu_batch_size)"
    )
    done = subprocess.run([str(python), "-c", code, *arguments(framework, share)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.endswith("False 8\n")


FLEXGEN = (
    "model size: 12.386 GB\tcache size: 2.000 GB\thidden size (p): 0.031 GB\n"
    "peak gpu mem: 14.250 GB\tprojected: {projected}\n"
    "prefill latency: 0.512 s\tprefill throughput: 4000.000 token/s\n"
    "decode latency: 12.750 s\tdecode throughput: 160.314 token/s\n"
    "total latency: 13.262 s\ttotal throughput: 154.426 token/s\n"
)
INFINIGEN = (
    "+++++++++++++++++++++++++++++++++++++++++++++++++\nInfiniGen (Ours)\ninput: 1920 output: 128 bsz: 20\n"
    "+++++++++++++++++++++++++++++++++++++++++++++++++\nTotal: 64.0 Prefill: 12.5 Decode: 51.5\n"
    "=================================================\n"
)


def test_what_flexgen_and_h2o_print() -> None:
    found = parse_printed("used: 3 GB\n" + FLEXGEN.format(projected="True") + FLEXGEN.format(projected="False"))
    assert (found.prefill_s, found.decode_s, found.total_s) == (0.512, 12.75, 13.262)
    assert (found.throughput, found.peak_gpu_gb, found.full_cache_gb) == (154.426, 14.25, 2.0)
    assert found.projected is False


def test_what_infinigen_prints() -> None:
    found = parse_printed("a log\n" + INFINIGEN)
    assert found.banner == "InfiniGen (Ours)"
    assert (found.prompt_tokens, found.output_tokens, found.batch) == (1920, 128, 20)
    assert (found.prefill_s, found.decode_s, found.total_s) == (12.5, 51.5, 64.0)
    assert found.throughput == 128 * 20 / 64.0 and found.peak_gpu_gb is None


def test_no_result_is_said() -> None:
    with pytest.raises(NotPrinted, match="prefill latency"):
        parse_printed("Traceback (most recent call last):\n")


def test_the_batch_server_runs_on_old_python() -> None:
    """The forks' Python: nothing newer than 3.9 in the syntax of what runs there."""
    import ast

    import kvstudy.frameworks.upstream as package

    folder = Path(package.__file__).parent / "batch_server"
    assert len(list(folder.glob("*.py"))) >= 6
    for path in folder.glob("*.py"):
        tree = ast.parse(path.read_text(), feature_version=(3, 9))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom | ast.Import):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                assert (isinstance(node, ast.ImportFrom) and node.level) or not any(
                    n.startswith("kvstudy") for n in names
                )
    assert sys.version_info >= (3, 11)
