"""Tiny models: one thread is faster than two that wait for one another, and what is imported is no garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from transformers.utils import logging


@pytest.fixture(autouse=True, scope="session")
def quick() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    # Each engine collects garbage when it is made.
    gc.freeze()
    yield
    torch.set_num_threads(before)
    gc.unfreeze()
