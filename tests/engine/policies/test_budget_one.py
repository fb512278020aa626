"""At budget 1 every policy is off: the tokens, the logits and the entries attended are the full cache's, exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from requests_of_three import PROMPTS
from slow import random_llama

from kvstudy.engine.config import Budget
from kvstudy.engine.fidelity.served import engine_for
from kvstudy.engine.request import SamplingParams

# Switched off, InfiniGen needs no skew.
RULES = [
    *(("h2o", rule) for rule in ("realdrop", "flexgen", "paper", "masked")),
    *(("infinigen", rule) for rule in ("request", "speed", "paper")),
]


@pytest.mark.parametrize(("policy", "rule"), RULES)
def test_budget_one_is_the_full_cache(tmp_path: Path, policy: str, rule: str) -> None:
    llama = random_llama(tmp_path)
    params = SamplingParams(max_tokens=20, ignore_eos=True, return_logits=True)
    mine = engine_for(llama, policy, {"rule": rule}, 13, budget=Budget(share=1.0)).generate(PROMPTS, params)
    full = engine_for(llama, "full", {}, 13).generate(PROMPTS, params)
    for a, b in zip(mine, full, strict=True):
        assert a.output == b.output
        assert torch.equal(torch.stack(a.logits), torch.stack(b.logits))
        assert a.attended_entries == b.attended_entries == b.full_entries
