"""Random eviction: as many entries as the budget says, a different lot each, the same whoever shares the batch."""

from __future__ import annotations

import torch
from driver import Driver

from kvstudy.engine.config import Budget
from kvstudy.engine.policies.random import Random


def kept(driver: Driver, tokens: object, layer: int) -> list[list[int]]:
    policy = driver.policy
    assert isinstance(policy, Random)
    positions, _, _ = policy.contents(tokens.request, layer)  # type: ignore[attr-defined]
    return positions.tolist()  # type: ignore[no-any-return]


def test_it_keeps_the_budget_at_random_and_attends_to_what_it_keeps() -> None:
    driver = Driver("random", {"seed": 3}, Budget(share=0.25), layers=3)
    tokens = driver.open(64, 40)
    driver.prefill(tokens, 24)
    sets = [kept(driver, tokens, layer) for layer in range(3)]
    assert all(len(head) == 15 and head == sorted(set(head)) for layer in sets for head in layer)
    assert len({tuple(head) for layer in sets for head in layer}) == 6
    for _ in range(38):
        before = [kept(driver, tokens, layer) for layer in range(3)]
        at = tokens.request.computed
        driver.step([tokens], [])
        for layer in range(3):
            seen = [[*head, at] for head in before[layer]]
            assert torch.allclose(tokens.out[layer, at], driver.dense(tokens, layer, at, seen), atol=1e-4)
    late = [p for layer in range(3) for head in kept(driver, tokens, layer) for p in head]
    assert len(late) == 6 * 15
    # A uniform choice of 15 of 102 tokens has 0.37 of them beyond the prompt on average.
    assert 0.15 < sum(p >= 64 for p in late) / len(late) < 0.65


def test_prompt_tokens_survive_evenly() -> None:
    counts = torch.zeros(32)
    for seed in range(60):
        driver = Driver("random", {"seed": seed}, Budget(share=0.5))
        tokens = driver.open(32, 2)
        driver.prefill(tokens, 32)
        for layer in range(2):
            for head in kept(driver, tokens, layer):
                counts[head] += 1
        driver.close(tokens)
    expected = 60 * 4 * 15 / 32
    assert counts.sum() == 60 * 4 * 15
    assert ((counts - expected).abs() < 5 * expected**0.5).all()


def test_the_lots_do_not_depend_on_the_batch_or_the_chunks() -> None:
    alone = Driver("random", {}, Budget(share=0.3))
    tokens = alone.open(40, 12)
    alone.prefill(tokens, 40)
    for _ in range(8):
        alone.step([tokens], [])
    shared = Driver("random", {}, Budget(share=0.3))
    mine, other = shared.open(40, 12), shared.open(30, 12)
    other.request.prompt[:] = range(30)
    shared.prefill(mine, 7)
    shared.prefill(other, 16)
    for _ in range(8):
        shared.step([other, mine], [])
    assert [kept(alone, tokens, layer) for layer in range(2)] == [kept(shared, mine, layer) for layer in range(2)]
    assert kept(shared, other, 0) != kept(shared, mine, 0)
