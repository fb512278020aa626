"""A deployment as the command line of a fork's `flex_opt`: what its authors would type, for its own parser.

Where the authors' scripts name a value it is theirs: no overlap, one GPU batch, the cache on the device for H2O and on
the host for InfiniGen. A budget b of the prompt becomes `--hh-ratio b/2 --hh-all` (H2O keeps that share twice, heavy
and recent) and a cap on InfiniGen's fetches; at b = 1 H2O prunes nothing and InfiniGen's alpha lets everything through.
"""

from __future__ import annotations

from pathlib import Path

from kvstudy.grid.schema import Deployment, FlexGen, H2OUpstream, InfiniGenUpstream, Upstream

DUMMY = "_DUMMY_"
#: In logits: every entry is within it of the best.
EVERYTHING = 10_000

_ON_DEVICE = ("100", "0", "100", "0", "100", "0")
_ON_HOST = ("100", "0", "0", "100", "100", "0")


def upstream_of(deployment: Deployment) -> Upstream:
    """Its framework, which is a fork. Raises TypeError where it is not."""
    framework = deployment.framework
    if not isinstance(framework, FlexGen | H2OUpstream | InfiniGenUpstream):
        raise TypeError(f"{framework.name} ({framework.implementation}) is not served by an author's fork")
    return framework


def on_host(framework: Upstream) -> bool:
    """Whether the fork's cache lies on the host."""
    return isinstance(framework, InfiniGenUpstream) or (isinstance(framework, FlexGen) and framework.kv_home == "host")


def fork_arguments(deployment: Deployment, weights: Path, offload: Path, calibration: Path) -> list[str]:
    """The arguments.

    Parameters
    ----------
    deployment
        Its framework is a fork.
    weights
        The converted model (`kvstudy convert`).
    offload
        A folder for what the fork puts on disk.
    calibration
        The text of InfiniGen's warm-up.
    """
    framework, budget = upstream_of(deployment), deployment.budget
    arguments = [
        *("--model", deployment.model.hub_id or f"facebook/{deployment.model.name}"),
        *("--path", DUMMY if framework.weights == "dummy" else str(weights)),
        *("--offload-dir", str(offload)),
        *("--percent", *(_ON_HOST if on_host(framework) else _ON_DEVICE)),
        *("--gpu-batch-size", str(framework.max_batch), "--num-gpu-batches", "1", "--overlap", "false"),
    ]
    off = budget.of == "prompt" and budget.share >= 1.0
    if isinstance(framework, H2OUpstream):
        arguments += ["--hh-ratio", "1"] if off else ["--hh-ratio", f"{budget.share / 2:.12g}", "--hh-all"]
    if isinstance(framework, InfiniGenUpstream):
        longest = deployment.model.max_model_len
        entries = budget.tokens if budget.tokens is not None else int(budget.share * longest + 1e-9)
        arguments += [
            *("--alpha", str(EVERYTHING if off else framework.alpha)),
            *("--partial-weight-ratio", f"{framework.partial_ratio:g}"),
            *("--max-num-kv", str(max(1, longest if off else entries - 1))),
            *("--warmup-input-path", str(calibration)),
        ]
    return arguments
