"""InfiniGen as it serves: fetches as a slow second implementation chooses, pool rules, bytes counted."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from driver import Driver, Tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from requests_of_three import OUTPUTS, PROMPTS, ids
from slow import SlowInfiniGen, random_llama

from kvstudy.engine import attention
from kvstudy.engine.config import Budget
from kvstudy.engine.fidelity.plain import PlainModel
from kvstudy.engine.fidelity.served import Fetches, engine_for, forced, model_folder
from kvstudy.engine.link import Link
from kvstudy.engine.policies import WrongOptions, infinigen_rules
from kvstudy.engine.policies.infinigen import WHOLE_LAYERS, Fetched, InfiniGen
from kvstudy.engine.policies.infinigen_kernel import kernel
from kvstudy.engine.request import SamplingParams
from kvstudy.engine.skew import SkewMissing, calibrate, load_skew, main, write_skew


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = random_llama(tmp_path_factory.mktemp("gqa"))
    write_skew(calibrate(folder, ids(96, 0)), folder / "skew.st")
    return folder


def options(folder: Path, **more: object) -> dict[str, object]:
    return {"skew": folder / "skew.st", "partial_ratio": 0.5, "alpha": 2.0} | more


@pytest.mark.parametrize("rule", ["request", "paper"])
@pytest.mark.parametrize("alpha", [0.0, 2.0, "none"])
def test_grouped_heads_and_unequal_lengths_fetch_as_the_slow_reference(
    llama: Path, rule: str, alpha: float | str
) -> None:
    """alpha = 0 fetches nothing: the threshold is strict, and the greatest score is not above itself."""
    budget = Budget(share=0.4)
    engine = engine_for(llama, "infinigen", options(llama, rule=rule, alpha=alpha), 13, budget=budget, block_size=4)
    fetches = Fetches(engine)
    requests = forced(engine, PROMPTS, OUTPUTS)
    model, skew = PlainModel.load(llama), load_skew(llama / "skew.st", "", 4, 2, 8)
    for request, prompt, output in zip(requests, PROMPTS, OUTPUTS, strict=True):
        cap = budget.entries(len(prompt)) - 1
        within = math.inf if alpha == "none" else alpha
        slow = SlowInfiniGen(model, skew, 0.5, within, lambda at, cap=cap: min(cap, at), paper=rule == "paper")
        want = slow.run(prompt + output[:-1], len(prompt))
        mine = fetches.sets(request)
        for step, layers in enumerate(slow.attended):
            for layer in range(WHOLE_LAYERS, 4):
                for head, positions in enumerate(layers[layer]):
                    assert mine[step, layer, head] == set(positions[:-1]), (step, layer, head)
                    assert len(positions) <= cap + 1 and (alpha or len(positions) == 1)
                    assert alpha != "none" or len(positions) == cap + 1
        assert (torch.stack(request.logits) - want).abs().max() < 1e-3


@pytest.mark.parametrize("rule", ["request", "paper"])
def test_a_request_alone_and_in_a_batch_is_the_same(llama: Path, rule: str) -> None:
    params = [SamplingParams(max_tokens=len(o), ignore_eos=True, return_logits=True) for o in OUTPUTS]
    budget = Budget(share=0.3)
    together = engine_for(llama, "infinigen", options(llama, rule=rule), 13, budget=budget).generate(PROMPTS, params)
    for one, prompt, own in zip(together, PROMPTS, params, strict=True):
        alone = engine_for(llama, "infinigen", options(llama, rule=rule), 64, budget=budget).generate([prompt], own)[0]
        assert one.output == alone.output
        assert torch.allclose(torch.stack(one.logits), torch.stack(alone.logits), atol=1e-4)


def test_speed_couples_the_requests_of_a_batch(llama: Path) -> None:
    """Same columns (the first request's) and one number for all; that is what `request` undoes."""
    engine = engine_for(llama, "infinigen", options(llama, rule="speed", max_num_kv=20), 64, scheduler="static")
    policy = engine.policies["infinigen"]
    assert isinstance(policy, InfiniGen)
    seen: list[tuple[list[int], list[int]]] = []

    def watch(fetched: Fetched) -> None:
        states = [request.kv for request in fetched.rows.requests]
        assert all(torch.equal(state.columns, states[0].columns) for state in states)
        seen.append((fetched.numbers.tolist(), [state.held for state in states]))

    policy.watch = watch
    forced(engine, PROMPTS, OUTPUTS)
    for numbers, held in seen:
        assert numbers == [min(max(numbers), most) for most in held]


def test_everything_within_alpha_and_no_cap_is_the_full_cache(llama: Path) -> None:
    """Through the host pool, the staging buffer and back: nothing is lost on the way."""
    params = SamplingParams(max_tokens=20, ignore_eos=True, return_logits=True)
    all_of_it = options(llama, alpha=1e9, max_num_kv=10_000)
    mine = engine_for(llama, "infinigen", all_of_it, 13).generate(PROMPTS, params)
    full = engine_for(llama, "full", {}, 13).generate(PROMPTS, params)
    for a, b in zip(mine, full, strict=True):
        assert a.output == b.output
        assert torch.allclose(torch.stack(a.logits), torch.stack(b.logits), atol=1e-4)


def test_alpha_is_the_authors_for_the_family(llama: Path) -> None:
    opt = Path(__file__).parents[2] / "fidelity" / "data" / "infinigen_opt"
    knobs, budget = {"skew": "none"}, Budget(share=0.5)
    with model_folder(opt) as folder:
        assert engine_for(folder, "infinigen", knobs, 8, budget=budget).policies["infinigen"].alpha == 4
    assert engine_for(llama, "infinigen", knobs, 8, budget=budget).policies["infinigen"].alpha == 5
    assert engine_for(llama, "infinigen", knobs | {"alpha": 0}, 8, budget=budget).policies["infinigen"].alpha == 0


def test_knobs_are_checked(llama: Path) -> None:
    with pytest.raises(SkewMissing, match=r"python -m kvstudy\.engine\.skew --model"):
        engine_for(llama, "infinigen", {}, 8, budget=Budget(share=0.5))
    with pytest.raises(SkewMissing, match="nowhere"):
        engine_for(llama, "infinigen", {"skew": "nowhere.st"}, 8, budget=Budget(share=0.5))
    with pytest.raises(ValueError, match="not both"):
        engine_for(llama, "infinigen", options(llama, max_num_kv=8), 8, budget=Budget(share=0.5))
    with pytest.raises(WrongOptions):
        engine_for(llama, "infinigen", options(llama, rule="accuracy"), 8, budget=Budget(share=0.5))


# -- skewing -------------------------------------------------------------------------------------------------------


def test_skewing_keeps_every_score_and_gathers_the_weight(llama: Path) -> None:
    model, skew = PlainModel.load(llama), load_skew(llama / "skew.st", "", 4, 2, 8)
    assert torch.allclose(skew @ skew.mT, torch.eye(8).expand_as(skew), atol=1e-5)
    queries: list[torch.Tensor] = []

    def attend(layer, x, q, k, v):
        queries.append(q)
        k, v = (t.repeat_interleave(3, dim=0) for t in (k, v))
        mask = torch.ones(q.shape[1], q.shape[1]).tril().log()
        return (q @ k.mT * model.scale + mask).softmax(-1) @ v

    model.forward(torch.tensor(ids(96, 0)), attend)
    for layer, q in enumerate(queries):
        turned = q.reshape(2, -1, 8) @ skew[layer]
        energy = turned.square().sum(dim=1)
        # Columns come in falling order of what the queries have in them; the first has more than any plain column.
        assert (energy.diff(dim=1) <= 1e-3).all()
        assert (energy[:, 0] >= q.reshape(2, -1, 8).square().sum(dim=1).amax(dim=1) - 1e-3).all()


def test_skew_command(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tmp_path), "--out", str(tmp_path / "x")]) == 2
    assert "config.json is missing" in capsys.readouterr().err
    write_skew(torch.zeros(1, 1, 2, 2), tmp_path / "other.st")
    with pytest.raises(ValueError, match="made for a model of shape"):
        load_skew(tmp_path / "other.st", "", 4, 2, 8)
    with pytest.raises(ValueError, match="at least head_dim"):
        calibrate(llama, ids(2, 0))


# -- what must hold for any shape ----------------------------------------------------------------------------------

shapes = st.fixed_dictionaries(
    {
        "rule": st.sampled_from(["request", "speed", "paper"]),
        "of": st.sampled_from(["prompt", "current", "tokens"]),
        "share": st.sampled_from([0.1, 0.2, 0.35, 0.5, 0.8]),
        "alpha": st.sampled_from([0.0, 1.0, 3.0, 99.0]),
        "pool_rule": st.sampled_from(["fifo", "lru", "counter"]),
        "pool_capacity": st.sampled_from([0.3, 0.6, 1.0]),
        "layers": st.integers(1, 4),
        "kv_heads": st.integers(1, 3),
        "group": st.integers(1, 3),
        "block_size": st.sampled_from([1, 3, 4, 16]),
        "chunk": st.integers(1, 17),
        "lengths": st.lists(st.tuples(st.integers(1, 30), st.integers(1, 14)), min_size=1, max_size=4),
        "seed": st.integers(0, 1 << 16),
    }
)


def in_pool(driver: Driver, tokens: Tokens, layer: int) -> list[list[int]]:
    """Positions in a host layer's entries, by KV head."""
    state = tokens.request.kv
    if state.positions.shape[2]:
        return state.positions[layer - WHOLE_LAYERS, :, : state.held].tolist()
    return [list(range(state.held))] * driver.kv_heads


@settings(max_examples=40, deadline=None)
@given(shapes)
def test_whatever_the_shape(shape: dict) -> None:
    share = 2 + round(shape["share"] * 10) if shape["of"] == "tokens" else shape["share"]
    names = ("rule", "alpha", "pool_rule", "pool_capacity")
    driver = Driver(
        "infinigen",
        {name: shape[name] for name in names} | {"skew": "none", "partial_ratio": 0.5},
        Budget(share=share, of=shape["of"]),
        layers=shape["layers"],
        heads=shape["kv_heads"] * shape["group"],
        kv_heads=shape["kv_heads"],
        block_size=shape["block_size"],
        seed=shape["seed"],
    )
    policy = driver.policy
    assert isinstance(policy, InfiniGen)
    chosen: dict[tuple[int, int], list[list[int]]] = {}

    def watch(fetched: Fetched) -> None:
        for row, request in enumerate(fetched.rows.requests):
            chosen[request.id, fetched.layer] = fetched.entries[row].tolist()

    policy.watch = watch
    batch = [driver.open(*lengths) for lengths in shape["lengths"]]
    needs = [policy.reserve(*lengths) for lengths in shape["lengths"]]
    waiting, running = list(batch), []
    gone: dict[tuple[int, int, int], set[int]] = {}
    while waiting or running:
        chunks = []
        if waiting:
            first = waiting[0]
            left = first.request.prompt_tokens - first.request.computed
            chunks = [(first, min(shape["chunk"], left))]
        pools = {
            (id(t), layer): in_pool(driver, t, layer) for t in running for layer in range(WHOLE_LAYERS, driver.layers)
        }
        driver.step(running, chunks)
        device, host = driver.held()
        assert host <= sum(need.host_bytes for need in needs)
        # Requests that need less than the widest have staging places they do not use.
        slack = policy.staging.nbytes
        assert device <= sum(need.device_peak_bytes for need in needs) + slack
        for tokens in running:
            at, request = tokens.request.computed - 1, tokens.request
            k = min(policy.context.budget.entries(request.prompt_tokens, at + 1), at + 1)
            for layer in range(driver.layers):
                if policy.off or layer < WHOLE_LAYERS:
                    positions = [list(range(at + 1))] * driver.kv_heads
                else:
                    pool, picks = pools[id(tokens), layer], chosen[request.id, layer]
                    positions = [[*(pool[h][e] for e in picks[h]), at] for h in range(driver.kv_heads)]
                    for head, own in enumerate(positions):
                        assert 1 <= len(own) <= k and len(set(own)) == len(own)
                        lost = gone.setdefault((id(tokens), layer, head), set())
                        assert not lost & set(own)
                        now = set(in_pool(driver, tokens, layer)[head])
                        assert len(now) == request.kv.held and at in now
                        lost |= set(range(at + 1)) - now
                assert torch.allclose(tokens.out[layer, at], driver.dense(tokens, layer, at, positions), atol=1e-4)
        if chunks and not chunks[0][0].request.in_prefill:
            running.append(waiting.pop(0))
        for tokens in list(running):
            if tokens.request.computed == tokens.request.prompt_tokens + tokens.request.params.max_tokens - 1:
                running.remove(tokens)
                driver.close(tokens)
    assert driver.held() == (0, 0)
    assert driver.device.live_entries == driver.host.live_entries == 0
    assert (policy.counted.attended <= policy.counted.full).all()


@pytest.mark.parametrize("capacity", [1.0, 0.5])
@pytest.mark.parametrize("budget", [Budget(share=0.2), Budget(share=0.2, of="current"), Budget(share=50, of="tokens")])
def test_reserve_is_what_is_held(budget: Budget, capacity: float) -> None:
    knobs = {"skew": "none", "pool_capacity": capacity, "partial_ratio": 0.25, "alpha": 3.0}
    driver = Driver("infinigen", knobs, budget, layers=4, head_dim=16, block_size=16)
    tokens = driver.open(700, 60)
    need = driver.policy.reserve(700, 60)
    driver.prefill(tokens, 256)
    assert driver.peak == pytest.approx(need.device_prefill_bytes, rel=0.01)
    driver.peak = 0
    host = driver.host.used_blocks * driver.host.block_bytes
    while tokens.request.computed < 759:
        driver.step([tokens], [])
        host = max(host, driver.held()[1])
    assert driver.peak == pytest.approx(need.device_bytes, rel=0.01)
    peak = max(host, driver.host.bytes_for(700, 2)) if capacity < 1 else host
    assert peak == pytest.approx(need.host_bytes, rel=0.01)


# -- the pool and the link ----------------------------------------------------------------------------------------


def test_pool_rules() -> None:
    positions = torch.tensor([[6, 1, 3, 4, 5]])
    history = torch.tensor([[0, 9, 5, 5, 0]])
    # Only the older half of a sequence of 10 (positions 1, 3, 4) may go; of equals the earlier one.
    assert infinigen_rules.pool_victim("counter", history, positions, 10).item() == 2
    assert infinigen_rules.pool_victim("lru", torch.tensor([[0, 2, 5, 5, 0]]), positions, 10).item() == 1
    assert infinigen_rules.pool_victim("fifo", history, positions, 10).item() == 1
    # Nothing of the older half is left: the oldest.
    assert infinigen_rules.pool_victim("counter", history, positions + 10, 10).item() == 1
    counters = torch.tensor([[255, 8, 1], [3, 2, 1]])
    infinigen_rules.halve_saturated(counters)
    assert counters.tolist() == [[127, 4, 0], [3, 2, 1]]


def test_threshold_is_strict_and_numbers_are_means() -> None:
    scores = torch.tensor([[5.0, 1.0, 0.0], [5.0, 4.0, 3.0]])
    assert infinigen_rules.qualifying(scores, 4.0).tolist() == [1, 3]
    assert infinigen_rules.qualifying(scores, 4.0, strict=False).tolist() == [2, 3]
    assert infinigen_rules.qualifying(torch.tensor([[9.0, 1.0], [5.0, 4.0]]), 4.0, head_zero=True).tolist() == [1, 0]
    counts = torch.tensor([[1, 4], [3, 3]])
    assert infinigen_rules.fetch_number(counts, 99).tolist() == [2, 3]
    assert infinigen_rules.fetch_number(counts, torch.tensor([1, 9])).tolist() == [1, 3]
    assert infinigen_rules.fetch_number(counts, 99, over=2).item() == 2


def test_bytes_moved_are_counted_and_paced() -> None:
    link = Link(gbps=0.001)
    driver = Driver("infinigen", {"skew": "none", "alpha": 99.0, "max_num_kv": 10}, Budget(), layers=4, link=link)
    tokens = driver.open(30, 3)
    entry = driver.host.entry_bytes
    driver.prefill(tokens, 20)
    # Two host layers; the second chunk looks back at 20 entries.
    assert link.moved_bytes == {"d2h": 2 * 30 * entry, "h2d": 2 * 20 * entry}
    begin = time.perf_counter()
    driver.step([tokens], [])
    assert link.moved_bytes == {"d2h": 2 * 31 * entry, "h2d": 2 * 30 * entry}
    # 2 layers x 10 entries over a link of a megabyte a second, behind what the prompt still has on its way.
    assert time.perf_counter() - begin >= 2 * 10 * entry / 1e6 * 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_loops_are_the_plain_ones(dtype: torch.dtype) -> None:
    compiled = kernel()
    if compiled is None:
        pytest.skip("no compiler")
    random = torch.Generator().manual_seed(0)
    rows, heads, group, columns, dim, size = 3, 2, 3, 5, 8, 4
    held, room, numbers = np.array([700, 1, 523]), np.array([701, 9, 640]), np.array([70, 1, 523])
    q = torch.randn(rows, heads * group, dim, generator=random).to(dtype)
    turn = torch.randn(rows, heads, dim, columns, generator=random).to(dtype)
    partial = [torch.randn(heads, columns, n, generator=random).to(dtype) for n in room]
    scores = torch.full((rows, heads, 700), -torch.inf)
    addresses = np.array([p.data_ptr() for p in partial])
    counts = compiled.scores(q, turn, 0.5, addresses, held, room, 4.0, scores)
    assert torch.equal(counts, infinigen_rules.qualifying(scores, 4.0)) and 1 < counts.max() < 700
    assert compiled.scores(q, turn, 0.5, addresses, held, room, math.inf, scores)[:, 0].tolist() == held.tolist()
    assert not compiled.scores(q, turn, 0.5, addresses, held, room, 0.0, scores).any(), "strict, as the rule is"
    turned = (q.view(rows, heads, group, dim) @ turn * 0.5).float()
    for row, keys in enumerate(partial):
        want = turned[row] @ keys.float()[:, :, : held[row]]
        want = infinigen_rules.group_max(want.flatten(0, 1), heads)
        assert torch.allclose(scores[row, :, : held[row]], want, atol=1e-5)
        assert (scores[row, :, held[row] :] == -torch.inf).all()
    kv = torch.randn(400, 2, heads, size, dim, generator=random).to(dtype)
    tables = torch.randperm(400, generator=random)[: rows * 130].view(rows, 130).int()
    # Ties, negative zeros and negative numbers are ranked as well.
    scores[0, 0, :100] = torch.tensor([0.0, -0.0]).repeat(50)
    scores[2] = -scores[2].abs()
    staged = torch.empty(rows, 2, heads, int(numbers.max()) + 1, dim, dtype=dtype)
    tables = torch.cat([tables, tables], dim=1)[:, :176]
    entries = compiled.select(scores, held, numbers, staged.shape[3])
    compiled.gather(entries, numbers, tables, kv, staged)
    for row, number in enumerate(numbers.tolist()):
        for head in range(heads):
            own, mine = scores[row, head, : held[row]], entries[row, head, :number]
            assert len(set(mine.tolist())) == number and (mine.diff() > 0).all()
            assert torch.equal(own[mine].sort().values, own.topk(number).values.sort().values)
            blocks, offsets = tables[row].long()[mine // size], mine % size
            assert torch.equal(staged[row, 0, head, :number], kv[blocks, 0, head, offsets])
            assert torch.equal(staged[row, 1, head, :number], kv[blocks, 1, head, offsets])


def test_without_the_compiled_loops(llama: Path) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, return_logits=True)
    with_c, plain = (
        engine_for(llama, "infinigen", options(llama), 13, budget=Budget(share=0.3), use_kernels=use).generate(
            PROMPTS, params
        )
        for use in (True, False)
    )
    attention.use_kernels(True)
    for a, b in zip(with_c, plain, strict=True):
        assert a.output == b.output
        assert torch.allclose(torch.stack(a.logits), torch.stack(b.logits), atol=1e-3)
