"""The serving rules through the served path: scheduler, KV pool, prefill by chunks, one decode step a token."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvstudy.engine.config import EngineConfig
from kvstudy.engine.core import Engine, Output
from kvstudy.engine.policies.h2o import H2O, Dropped
from kvstudy.engine.policies.infinigen import WHOLE_LAYERS, Fetched, InfiniGen
from kvstudy.engine.request import Request, SamplingParams
from kvstudy.engine.skew import calibrate, write_skew

from .h2o import unpack
from .report import Case, margin

POOL_BYTES = 64 << 20


@contextmanager
def model_folder(source: Path) -> Iterator[Path]:
    """The folder's model under the file names that the library reads."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(source / "config.json", folder / "config.json")
        weights = sorted(source.glob("model*.safetensors"))
        if len(weights) != 1:
            raise FileNotFoundError(f"{source}: expected one model*.safetensors, found {len(weights)}")
        shutil.copy(weights[0], folder / "model.safetensors")
        yield folder


def chunk_sizes(prompt: int) -> tuple[int, int, int]:
    """Three ways to cut a prompt: whole, in odd pieces with a short last one, and in pieces smaller than a block."""
    return prompt, max(1, prompt // 3 + 2), 7


def engine_for(folder: Path, policy: str, options: dict[str, Any], chunk: int, **more: Any) -> Engine:
    """A float32 engine on the CPU with one policy and a chunk of `chunk` prompt tokens."""
    fields = {
        "model_dir": folder,
        "dtype": "float32",
        "policy": policy,
        "policy_options": options,
        "max_prefill_tokens": chunk,
        "kv_memory_bytes": POOL_BYTES,
        "host_kv_memory_bytes": POOL_BYTES,
    }
    config = EngineConfig.model_validate(fields | more)
    return Engine(config)


def forced(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    on_step: Callable[[list[Output]], None] | None = None,
) -> list[Request]:
    """Serve prompts whose outputs are given, all submitted at once; each output token's logits are kept."""
    params = [
        SamplingParams(max_tokens=len(tokens), forced_tokens=tuple(int(t) for t in tokens), return_logits=True)
        for tokens in outputs
    ]
    return engine.generate([[int(t) for t in prompt] for prompt in prompts], params, on_step=on_step)


def masked_cases(folder: str, source: Path, meta: dict[str, Any], expected: dict[str, Tensor]) -> Iterator[Case]:
    """Every `hh{h}_r{r}` of the generation scripts: the mask that each step leaves for the next, and the logits."""
    ids, prompt = expected["input_ids"][0].tolist(), meta["prompt_len"]
    with model_folder(source) as model:
        for knobs in meta["cases"]:
            tag = knobs["tag"]
            if f"mask_next_{tag}" not in expected:
                continue
            chunk = chunk_sizes(prompt)[-1]
            case = Case(folder, f"masked {tag}, prefill by {chunk}", "served")
            options = {
                "rule": "masked",
                "heavy_ratio": knobs["heavy_ratio"],
                "recent_ratio": knobs["recent_ratio"],
            }
            engine = engine_for(model, "h2o", options, chunk)
            policy = engine.policies["h2o"]
            assert isinstance(policy, H2O)
            masks: list[list[tuple[Tensor, Tensor]]] = []
            policy.look = lambda request, masks=masks: masks.append(
                [(mask, rule.gap) for rule, mask in request.kv.masked]
            )
            request = forced(engine, [ids[:prompt]], [[*ids[prompt:], 0]])[0]
            want = unpack(expected[f"mask_next_{tag}"], len(ids) + 1)
            for step, (layers, logits) in enumerate(zip(masks, request.logits, strict=True)):
                for layer, (mask, gap) in enumerate(layers):
                    case.select(mask, want[step, layer, :, : mask.shape[-1]], gap, f"step {step}, layer {layer}")
                theirs = expected["logits_full"][prompt - 1] if step == 0 else expected[f"logits_{tag}"][step - 1]
                case.number(logits, theirs, f"step {step}")
            yield case


def realdrop_cases(folder: str, source: Path, meta: dict[str, Any], expected: dict[str, Tensor]) -> Iterator[Case]:
    """Every `realdrop_hh{H}_r{R}`: decode logits, and the keys and values left at the end, in order of position."""
    ids, prompt = expected["input_ids"][0].tolist(), meta["prompt_len"]
    with model_folder(source) as model:
        for knobs in meta["cases"]:
            tag = knobs["tag"]
            if not tag.startswith("realdrop_"):
                continue
            for chunk in chunk_sizes(prompt):
                case = Case(folder, f"{tag}, prefill by {chunk}", "served")
                options = {
                    "rule": "realdrop",
                    "hh_size": knobs["hh_size"],
                    "recent_size": knobs["recent_size"],
                }
                engine = engine_for(model, "h2o", options, chunk)
                _realdrop(case, engine, ids, prompt, expected, tag)
                yield case


def _realdrop(case: Case, engine: Engine, ids: list[int], prompt: int, expected: dict[str, Tensor], tag: str) -> None:
    policy = engine.policies["h2o"]
    assert isinstance(policy, H2O)
    left: list[tuple[Tensor, Tensor, Tensor]] = []
    gaps: list[Tensor] = []

    def watch(dropped: Dropped) -> None:
        gaps.append(victim_margin(dropped)[:, 0])

    def look(request: Request) -> None:
        left[:] = [policy.contents(request, layer) for layer in range(engine.model.geometry.layers)]

    policy.watch, policy.look = watch, look
    request = forced(engine, [ids[:prompt]], [[*ids[prompt:], 0]])[0]
    # The margin of every choice so far: one that was a near-tie may have gone the other way.
    tied = torch.stack(gaps).amin(dim=0).min() < case.near_tie if gaps else False
    for step, logits in enumerate(request.logits):
        want = expected["logits_full"][prompt - 1] if step == 0 else expected[f"logits_{tag}"][step - 1]
        case.number(logits, want, f"step {step}")
    want_k, want_v = expected[f"k_cache_final_{tag}"], expected[f"v_cache_final_{tag}"]
    for layer, (_, k, v) in enumerate(left):
        if k.shape != want_k[layer].shape:
            case.selections += k.shape[0]
            case.mismatches += k.shape[0]
            case.first = case.first or f"layer {layer}: {k.shape[1]} entries left, not {want_k.shape[2]}"
            continue
        differ = torch.maximum((k - want_k[layer]).abs().amax(-1), (v - want_v[layer]).abs().amax(-1)) > case.tolerance
        gap = torch.full((k.shape[0],), 0.0 if tied else torch.inf)
        case.select(differ, torch.zeros_like(differ), gap, f"layer {layer}, final cache")
        case.number(k, want_k[layer], f"layer {layer}, keys", logits=False)
        case.number(v, want_v[layer], f"layer {layer}, values", logits=False)


def victim_margin(dropped: Dropped) -> Tensor:
    """[layers, rows, kv_heads]: by how much the dropped entry's score was below the next candidate's."""
    newest = dropped.rows.positions[None, :, None, None]
    exempt = dropped.positions > newest - dropped.protected[None, :, None, None]
    scores = dropped.scores.masked_fill(exempt, torch.inf)
    if scores.shape[-1] < 2:
        return scores.new_full(scores.shape[:-1], torch.inf)
    low = scores.topk(2, dim=-1, largest=False).values
    return (low[..., 1] - low[..., 0]).nan_to_num(torch.inf)


def flexgen_h2o_cases(folder: str, source: Path, meta: dict[str, Any], expected: dict[str, Tensor]) -> Iterator[Case]:
    """Every `hh{r}` of the authors' FlexGen: the heavy slot that each step empties, and the logits."""
    prompts = expected["prompt_ids"]
    prompt = prompts.shape[1]
    with model_folder(source) as model:
        for knobs in meta["cases"]:
            if not knobs.get("hh_all", True):
                continue
            tag = knobs["tag"]
            outputs = expected[f"out_ids_{tag}"][:, prompt:]
            for chunk in chunk_sizes(prompt):
                case = Case(folder, f"flexgen {tag}, prefill by {chunk}", "served")
                engine = engine_for(model, "h2o", {"rule": "flexgen", "hh_ratio": knobs["hh_ratio"]}, chunk)
                policy = engine.policies["h2o"]
                assert isinstance(policy, H2O)
                slots = _FlexGenSlots(case, expected[f"evict_slot_{tag}"], prompt, knobs["hh_k"])
                policy.watch, policy.look = slots.watch, slots.look
                requests = forced(engine, prompts.tolist(), outputs.tolist())
                for row, request in enumerate(requests):
                    for step, logits in enumerate(request.logits):
                        case.number(logits, expected[f"logits_{tag}"][step, row], f"request {row}, step {step}")
                yield case


class _FlexGenSlots:
    """The authors' numbering of slots, kept beside ours: theirs moves the leaving token into the emptied heavy slot."""

    def __init__(self, case: Case, want: Tensor, prompt: int, k: int) -> None:
        self.case, self.want, self.prompt, self.k = case, want.long(), prompt, k
        self.slots: dict[int, Tensor] = {}
        """By request: int64 [layers, kv_heads, 2k - 1], the position in each of their slots."""
        self.order: list[int] = []

    def look(self, request: Request) -> None:
        """After the prompt: heavy hitters by falling score, then the window by age."""
        if request.id in self.slots:
            return
        state, k = request.kv, self.k
        heavy = state.scores[:, :, :k].argsort(dim=-1, descending=True, stable=True)
        kept = state.positions[:, :, : state.size].long()
        self.slots[request.id] = torch.cat([kept[:, :, :k].gather(2, heavy), kept[:, :, k:]], dim=-1)
        self.order = sorted(self.slots)

    def watch(self, dropped: Dropped) -> None:
        gaps = victim_margin(dropped)
        gone = dropped.positions.gather(3, dropped.victims[..., None]).long()
        for row, request in enumerate(dropped.rows.requests):
            step, slots, k = request.computed - self.prompt, self.slots[request.id], self.k
            heads = slots.shape[1]
            same = slots == gone[:, row]
            emptied = same.int().argmax(dim=-1)
            column = self.order.index(request.id) * heads
            want = self.want[step, :, column : column + heads]
            got = torch.where(same.any(dim=-1), emptied, -1)
            pair = torch.stack([got, want], dim=-1).view(-1, 2)
            one_hot = torch.nn.functional.one_hot(pair + 1, 2 * k + 1).bool()
            self.case.select(
                one_hot[:, 0],
                one_hot[:, 1],
                gaps[:, row].flatten(),
                f"request {column // heads}, step {step}",
            )
            oldest = k + step % (k - 1)
            slots.scatter_(2, emptied[..., None], slots[:, :, oldest : oldest + 1].clone())
            slots[:, :, oldest] = request.computed


def speed_cases(folder: str, source: Path, meta: dict[str, Any], expected: dict[str, Tensor]) -> Iterator[Case]:
    """InfiniGen's speed code: the entries that each layer >= 2 fetches at each step, and the logits.

    Then rule `request`: each request of the batch alone, which has to fetch what `speed` fetches with that request
    alone.
    """
    prompts = expected["prompt_ids"]
    batch, prompt = prompts.shape
    with model_folder(source) as model:
        skew = model / "skew.safetensors"
        # Their SVD sees request 0 of the warm-up batch only.
        write_skew(calibrate(model, expected["calib_ids"][0].tolist()), skew)
        for knobs in meta["cases"]:
            tag = knobs["tag"]
            outputs = expected[f"out_ids_{tag}"][:, prompt:].tolist()
            options = {
                "skew": skew,
                "alpha": knobs["alpha"],
                "partial_ratio": knobs["partial_weight_ratio"],
                "max_num_kv": knobs["max_num_kv"],
            }
            for chunk in chunk_sizes(prompt):
                case = Case(folder, f"speed {tag}, prefill by {chunk}", "served")
                engine = engine_for(model, "infinigen", {"rule": "speed", **options}, chunk, scheduler="static")
                fetches = Fetches(engine)
                requests = forced(engine, prompts.tolist(), outputs)
                fetches.compare(case, requests, _prefetch(expected[f"prefetch_{tag}"], batch))
                for row, request in enumerate(requests):
                    for step, logits in enumerate(request.logits):
                        case.number(logits, expected[f"logits_{tag}"][step, row], f"request {row}, step {step}")
                yield case
            for row in range(batch):
                name = "the authors' speed code" if batch == 1 else "our speed at batch 1"
                case = Case(folder, f"request {tag}, request {row} alone", "served", note=f"against {name}")
                alone = []
                for rule, chunk in (("speed", prompt), ("request", 7)):
                    engine = engine_for(model, "infinigen", {"rule": rule, **options}, chunk)
                    fetches = Fetches(engine)
                    requests = forced(engine, prompts[row : row + 1].tolist(), outputs[row : row + 1])
                    alone.append((fetches, requests[0]))
                (speed, one), (own, two) = alone
                theirs = _prefetch(expected[f"prefetch_{tag}"], batch) if batch == 1 else speed.sets(one)
                own.compare(case, [two], theirs)
                case.number(torch.stack(two.logits), torch.stack(one.logits), "logits")
                yield case


Sets = dict[tuple[int, int, int], set[int]]
"""(step, layer, head of the batch) -> the entries fetched."""


def _prefetch(stored: Tensor, batch: int) -> Sets:
    """`prefetch_*` [steps, layers - 2, most, batch * heads], padded with -1."""
    steps, layers, _, heads = stored.shape
    assert heads % batch == 0
    return {
        (step, layer + WHOLE_LAYERS, head): {i for i in stored[step, layer, :, head].tolist() if i >= 0}
        for step in range(steps)
        for layer in range(layers)
        for head in range(heads)
    }


class Fetches:
    """Records what an engine's `infinigen` fetches, by request and step of its own."""

    def __init__(self, engine: Engine) -> None:
        policy = engine.policies["infinigen"]
        assert isinstance(policy, InfiniGen)
        self.alpha = policy.alpha
        self.seen: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        """(request id, step, layer) -> the chosen [heads, m], each head's margin [heads]."""
        policy.watch = self.watch

    def watch(self, fetched: Fetched) -> None:
        """Take down one layer's choice."""
        # How far any score of the batch is from its threshold: `speed` couples the counts.
        best = fetched.scores.amax(dim=-1, keepdim=True)
        brink = (fetched.scores - (best - self.alpha)).abs().min()
        for row, request in enumerate(fetched.rows.requests):
            scores, number = fetched.scores[row], int(fetched.numbers[row])
            scores = scores[:, : request.computed]
            gap = torch.minimum(margin(scores, number), brink)
            step = request.computed - request.prompt_tokens
            self.seen[request.id, step, fetched.layer] = fetched.entries[row].clone(), gap

    def sets(self, request: Request) -> Sets:
        """One request's own, with its heads from 0."""
        return {
            (step, layer, head): set(entries.tolist())
            for (owner, step, layer), (chosen, _) in self.seen.items()
            if owner == request.id
            for head, entries in enumerate(chosen)
        }

    def compare(self, case: Case, requests: list[Request], want: Sets) -> None:
        """Compare with the authors' sets, heads of the batch one request after another."""
        row_of = {request.id: row for row, request in enumerate(requests)}
        compared = 0
        for (owner, step, layer), (chosen, gap) in sorted(self.seen.items(), key=lambda item: item[0][1:]):
            heads = chosen.shape[0]
            for head, entries in enumerate(chosen):
                got = set(entries.tolist())
                theirs = want.get((step, layer, row_of[owner] * heads + head), set())
                size = max(got | theirs, default=0) + 1
                pair = torch.zeros(2, size, dtype=torch.bool)
                pair[0, list(got)] = True
                pair[1, list(theirs)] = True
                case.select(
                    pair[0, None],
                    pair[1, None],
                    gap[head : head + 1],
                    f"step {step}, layer {layer}, request {row_of[owner]}",
                )
                compared += 1
        if compared != len(want):
            case.mismatches += abs(len(want) - compared)
            case.first = case.first or f"{compared} selections made, {len(want)} expected"
