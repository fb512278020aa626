"""The fidelity check is worth something only if a wrong rule fails it: each mutation of the sources must."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kvstudy.engine import attention
from kvstudy.engine.fidelity import h2o as h2o_check
from kvstudy.engine.fidelity import infinigen as infinigen_check
from kvstudy.engine.fidelity import served
from kvstudy.engine.fidelity.check import check
from kvstudy.engine.fidelity.report import Case
from kvstudy.engine.policies import h2o_rules, infinigen_rules
from kvstudy.engine.policies.infinigen import InfiniGen

DATA = Path(__file__).parent / "data"

H2O, INFINIGEN = h2o_rules, infinigen_rules
# ruff: noqa: E501
MUTATIONS = [
    # (name, module, source, mutated source, folder whose check must fail, part of the name of the cases that are run)
    ("realdrop: window shorter by one", H2O, '"realdrop": recent,', '"realdrop": recent - 1,', "h2o_llama", "realdrop"),
    ("realdrop: window longer by one", H2O, '"realdrop": recent,', '"realdrop": recent + 1,', "h2o_llama", "realdrop"),
    ("flexgen: leaving token competes", H2O, '"flexgen": recent + 1', '"flexgen": recent', "flexgen_h2o", "flexgen"),
    ("window: > for >=", H2O, "positions > newest - protected", "positions >= newest - protected", "flexgen_h2o", "flexgen"),
    ("prompt: window by one", H2O, "older = scores[..., : size - recent]", "older = scores[..., : size - recent - 1]", "flexgen_h2o", "flexgen"),
    ("prompt: least for most", H2O, "older.topk(heavy, dim=-1)", "older.topk(heavy, dim=-1, largest=False)", "flexgen_h2o", "flexgen"),
    ("masked: window longer by one", H2O, "keys + 1 - self.recent :", "keys - self.recent :", "h2o_opt", "masked"),
    ("masked: no hole", H2O, "older = acc[:, : keys - self.recent]", "older = acc[:, : keys + 1 - self.recent]", "h2o_opt", "masked"),
    ("masked: nothing forgotten", H2O, "if self.recent:", "if False:", "h2o_opt", "masked"),
    ("masked: mean for sum over queries", H2O, "probs.sum(dim=1)", "probs.mean(dim=1)", "h2o_llama", "masked"),
    ("lm-eval: heavy by one", H2O, "topk(heavy - 1, dim=-1)", "topk(heavy, dim=-1)", "h2o_opt", "lmeval"),
    ("lm-eval: band by one", H2O, "distance <= recent", "distance < recent", "h2o_llama", "lmeval"),
    ("infinigen: sum for mean", INFINIGEN, "mean = counts.float().mean(", "mean = counts.float().sum(", "flexgen_infinigen", "a1"),
    ("infinigen: up for down", INFINIGEN, "mean.long()", "mean.ceil().long()", "flexgen_infinigen", "a1"),
    ("infinigen: no cap", INFINIGEN, "torch.as_tensor(most,", "torch.as_tensor(10**6 + 0 * most,", "flexgen_infinigen", "a1"),
    ("accuracy: own threshold a head", INFINIGEN, "if head_zero:", "if False:", "infinigen_llama/fp32", "accuracy"),
    ("accuracy: pool by one", INFINIGEN, "if row < self.store", "if row <= self.store", "infinigen_llama/fp32", "accuracy"),
    ("accuracy: younger half too", INFINIGEN, "newest // 2", "newest", "infinigen_opt/fp32", "accuracy"),
    ("accuracy: keys' columns left out", INFINIGEN, "for magnitudes in (query_magnitudes, key_magnitudes)", "for magnitudes in (query_magnitudes,)", "infinigen_opt/fp32", "partial"),
    ("skew: columns of U", INFINIGEN, ".Vh.mT\n", ".Vh\n", "infinigen_llama/fp16", "skew"),
]  # fmt: skip


def mutate(monkeypatch: pytest.MonkeyPatch, module: ModuleType, old: str, new: str) -> None:
    """Put what the module would define with `new` for `old` in the place of what it defines, wherever it is imported."""
    source = inspect.getsource(module)
    assert old in source, f"{module.__name__} no longer has {old!r}: mend the mutation"
    mutant = ModuleType(module.__name__)
    mutant.__dict__["__file__"] = module.__file__
    # Dataclasses look their module up by name.
    exec(compile(source.replace(old, new), str(module.__file__), "exec"), mutant.__dict__)
    for name in module.__all__:
        for holder in (module, h2o_check, infinigen_check):
            if hasattr(holder, name):
                monkeypatch.setattr(holder, name, getattr(mutant, name))


def disagreeing(folder: str, part: str) -> Iterator[Case]:
    for case in check(DATA / folder):
        if part in case.name and not case.ok:
            yield case


@pytest.fixture(autouse=True)
def one_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "chunk_sizes", lambda prompt: (7,))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize(("name", "module", "old", "new", "folder", "part"), MUTATIONS, ids=[m[0] for m in MUTATIONS])
def test_mutant_is_found(
    name: str, module: ModuleType, old: str, new: str, folder: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch, module, old, new)
    # The first case that disagrees is enough; one that cannot even run (an index out of range) is found as well.
    try:
        found = next(disagreeing(folder, part), None)
    except (IndexError, RuntimeError):
        return
    assert found is not None, f"nothing in {folder} notices: {name}"


def mean_over_queries(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda q, *rest: original(q, *rest) / q.shape[0]


def test_mean_for_sum_in_the_served_column_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "column_sums", mean_over_queries(attention.column_sums))
    assert next(disagreeing("flexgen_h2o", "flexgen"), None) is not None


def fetched_at(alpha: float, *, compiled: bool = False) -> int:
    """Entries that the served `request` fetches of a prompt at most, in one decode step, with or without our C."""
    source = DATA / "infinigen_opt"
    with served.model_folder(source) as model:
        engine = served.engine_for(model, "infinigen", {"skew": "none", "alpha": alpha, "max_num_kv": 99}, 7)
        policy = engine.policies["infinigen"]
        assert isinstance(policy, InfiniGen)
        policy.kernel = policy.kernel if compiled else None
        numbers: list[int] = []
        policy.watch = lambda fetched: numbers.append(int(fetched.numbers.max()))
        served.forced(engine, [list(range(3, 33))], [[3, 4]])
    return max(numbers)


def test_served_threshold_must_be_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two of the authors' scores are alpha apart to the last bit; at alpha = 0 the greatest is its own threshold."""
    assert fetched_at(0.0) == fetched_at(0.0, compiled=True) == 0
    mutate(monkeypatch, infinigen_rules, "scores > floor if strict", "scores >= floor if strict")
    assert fetched_at(0.0) == 1


def test_accuracy_threshold_must_not_be_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.tensor([[[0.0, 0.0], [4.0, 0.0]]])
    knobs = {"alpha": 4.0, "budget": 1.0, "capacity": 1.0, "pool": "fifo"}
    assert infinigen_rules.WholeSequenceRule(scores, **knobs).numbers.tolist() == [1, 2]
    mutate(monkeypatch, infinigen_rules, "else scores >= floor", "else scores > floor")
    assert infinigen_rules.WholeSequenceRule(scores, **knobs).numbers.tolist() == [1, 1]
