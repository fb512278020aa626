"""Sampling at the ends of its range: no request may take the engine down."""

from __future__ import annotations

import pytest
import torch

from kvstudy.engine.request import Request, SamplingParams
from kvstudy.engine.sampling import sample


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-40, 1e-20, 1e-6, 1e-4, 10.0])
@pytest.mark.parametrize("top_p", [1.0, 0.5, 1e-7, 1e-300])
def test_every_accepted_temperature_and_top_p_draws_a_token(temperature: float, top_p: float) -> None:
    logits = torch.randn(1, 64, generator=torch.Generator().manual_seed(0)) * 30
    params = SamplingParams(max_tokens=1, temperature=temperature, top_p=top_p, seed=1)
    (token,) = sample(logits, [Request(prompt=[1], params=params, policy="full")])
    assert 0 <= token < 64
    if temperature < 1e-4 or top_p < 1e-3:
        assert token == int(logits.argmax())
