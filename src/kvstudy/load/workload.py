"""Workload artefacts: prompts, lengths and unit arrivals, drawn once and replayed against every framework.

An artefact is a folder `results/workloads/<id>/` with `requests.parquet`, `warmup.parquet` and
`workload.json`. Its id depends on what is drawn (workload, load kind, seed, tokenizer, text), never on the
framework, the rate or the duration, so comparisons are paired. Request i is drawn from (seed, i): artefacts
of different size agree on their common part.

How prompts are made. The documents are tokenised once and joined to one stream (it wraps around). A prompt of
n tokens is the passage of n tokens from a random word start. It is refused and drawn again if its *opening*
(its first `OPENING` tokens) was used before, so no two prompts of an artefact share a cached block of that
size or more. Openings are also split by hash among `SEED_CLASSES` seeds and the warm-up, so that prompts of
seeds 0 to 15 never share an opening with each other or with warm-up prompts. When a text has no fresh opening
left, prompts are *recombined*: the first `HEAD` tokens of one passage, then another passage; `workload.json`
counts them. A prompt never occurs twice; a text too small even for that is an error.

Prompts go to `/v1/completions` as token ids, so the length served is the length drawn (a tokenizer's own
first token, such as OPT's `</s>`, counts as one of them). For `api: chat` the drawn length includes the chat
template's tokens, the passage goes as text, and the length it has when tokenised again is recorded.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from kvstudy.grid.schema import (
    Cell,
    EmpiricalLength,
    FixedLength,
    GammaLoad,
    Length,
    LognormalLength,
    NormalLength,
    TraceLength,
    TraceLoad,
    UniformLength,
    digest,
)
from kvstudy.grid.store import Layout, staged, write_json
from kvstudy.load.arrivals import Trace, generator, read_trace, requests_needed, unit_arrivals
from kvstudy.load.text import Text, read_text

REQUESTS_FILE = "requests.parquet"
WARMUP_FILE = "warmup.parquet"
ABOUT_FILE = "workload.json"

#: Raised when the drawing changes, so that old artefacts are not taken for new ones.
DRAWING = 1
#: No two prompts of an artefact share this many tokens from the start.
OPENING = 8
HEAD = 4
SEED_CLASSES = 16
WARMUPS = 64
#: For passages that need no opening of their own.
ANY_OWNER = -1
_TRIES = 64


class WorkloadError(Exception):
    """The workload cannot be drawn; one line that says what to do."""


@dataclass(frozen=True)
class Drawn:
    """An artefact in memory. Arrays are `[count]`; `prompts` are token ids, `texts` only for the chat API.

    `shared` counts a prompt's tokens that some earlier prompt began with, by design of the workload.
    """

    length_class: list[str]
    prompts: list[npt.NDArray[np.int32]]
    texts: list[str] | None
    prompt_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    unit: npt.NDArray[np.float64]
    shared: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.prompts)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def draw_key(cell: Cell) -> dict[str, Any]:
    """What of a cell decides the draws: not its framework, rate, duration or sampling parameters."""
    workload = cell.workload
    load = cell.load
    key: dict[str, Any] = {
        "drawing": DRAWING,
        "text": workload.text.model_dump(mode="json"),
        "prompt": workload.prompt.model_dump(mode="json"),
        "long_prompt": workload.long_prompt.model_dump(mode="json") if workload.long_prompt else None,
        "long_share": workload.long_share,
        "output": workload.output.model_dump(mode="json"),
        "long_output": workload.long_output.model_dump(mode="json") if workload.long_output else None,
        "api": workload.api,
        "shared_prefix": workload.shared_prefix.model_dump(mode="json"),
        "load": load.name,
        "seed": cell.seed,
    }
    if isinstance(load, GammaLoad):
        key["burstiness"] = load.burstiness
    if isinstance(load, TraceLoad):
        key["trace"] = [load.path, load.format, load.sha256, load.start_s]
    return key


def workload_id(cell: Cell, tokenizer_sha: str, text_sha: str) -> str:
    """Name of the artefact a cell needs: readable part, number of requests, and hash of all that decides it."""
    count = requests_needed(cell.load, cell.seed)
    key = {**draw_key(cell), "tokenizer": tokenizer_sha, "text_sha": text_sha, "count": count}
    return f"{cell.workload.name}_{cell.load.name}_s{cell.seed}_n{count}-{digest(key)}"


def prepare(cell: Cell, model_dir: Path, layout: Layout) -> Path:
    """Folder of the cell's workload, drawn now if it is not there. Safe to call from several jobs at once.

    Raises
    ------
    WorkloadError, text.TextError, arrivals.ArrivalError
        Each one line: no tokenizer, no text, text too short, lengths beyond the model.
    """
    tokenizer_file = model_dir / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise WorkloadError(f"the prepared model has no tokenizer: {tokenizer_file}")
    text = read_text(cell.workload.text)
    tokenizer_sha = file_sha256(tokenizer_file)
    folder = layout.workload(workload_id(cell, tokenizer_sha, text.sha256))
    if folder.exists():
        return folder
    count = requests_needed(cell.load, cell.seed)
    source = _passages(tokenizer_file, tokenizer_sha, text)
    source.recombined = 0
    chat = _ChatTemplate(model_dir) if cell.workload.api == "chat" else None
    drawn = draw(cell, source, count, chat)
    warm = draw(cell, source, WARMUPS, chat, warmup=True)
    about = {
        "schema_version": 1,
        **draw_key(cell),
        "count": count,
        "tokenizer_sha256": tokenizer_sha,
        "text_sha256": text.sha256,
        "text_label": text.label,
        "text_tokens": source.size,
        "recombined": source.recombined,
        "prompt_tokens": _quartiles(drawn.prompt_tokens),
        "output_tokens": _quartiles(drawn.output_tokens),
        "long": drawn.length_class.count("long"),
        "shared_tokens": _quartiles(drawn.shared),
    }
    try:
        with staged(folder) as staging:
            _write(drawn, staging / REQUESTS_FILE)
            _write(warm, staging / WARMUP_FILE)
            write_json(staging / ABOUT_FILE, about)
    except OSError:  # another job was faster: its artefact is the same (FileExistsError, or a rename onto its folder)
        if not folder.exists():
            raise
    return folder


@functools.lru_cache(maxsize=2)
def _passages(tokenizer_file: Path, tokenizer_sha: str, text: Text) -> Passages:
    """The text in tokens, kept: the cells of a visit differ in seed and load, hardly ever in text."""
    del tokenizer_sha  # only part of the key: the file may have been made anew
    return Passages(Tokenizer.from_file(str(tokenizer_file)), text)


def load_requests(folder: Path, *, warmup: bool = False) -> Drawn:
    """Read an artefact's requests, or its warm-up prompts."""
    table = pq.read_table(folder / (WARMUP_FILE if warmup else REQUESTS_FILE))
    frame = table.to_pandas()
    texts = None if frame["text"].isna().all() else [str(item) for item in frame["text"]]
    return Drawn(
        length_class=[str(item) for item in frame["length_class"]],
        prompts=[np.asarray(item, dtype=np.int32) for item in frame["prompt"]],
        texts=texts,
        prompt_tokens=frame["prompt_tokens"].to_numpy(dtype=np.int64),
        output_tokens=frame["output_tokens"].to_numpy(dtype=np.int64),
        unit=frame["unit_arrival"].to_numpy(dtype=np.float64),
        shared=frame["shared_tokens"].to_numpy(dtype=np.int64),
    )


def _write(drawn: Drawn, path: Path) -> None:
    count = len(drawn)
    table = pa.table(
        {
            "index": pa.array(range(count), pa.int64()),
            "length_class": pa.array(drawn.length_class, pa.string()),
            "prompt_tokens": pa.array(drawn.prompt_tokens, pa.int64()),
            "output_tokens": pa.array(drawn.output_tokens, pa.int64()),
            "unit_arrival": pa.array(drawn.unit, pa.float64()),
            "shared_tokens": pa.array(drawn.shared, pa.int64()),
            "prompt": pa.array([item.tolist() for item in drawn.prompts], pa.list_(pa.int32())),
            "text": pa.array(drawn.texts if drawn.texts is not None else [None] * count, pa.string()),
        }
    )
    pq.write_table(table, path, compression="zstd")


def _quartiles(values: npt.NDArray[np.int64]) -> dict[str, float]:
    return {
        "min": int(values.min()),
        "p50": float(np.median(values)),
        "mean": float(values.mean()),
        "max": int(values.max()),
    }


# --- lengths -------------------------------------------------------------------------------------


def draw_lengths(
    length: Length, uniform: npt.NDArray[np.float64], trace: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.int64]:
    """Lengths from uniform draws by the inverse of the distribution, `[n]` to `[n]` (so that they are coupled)."""
    if isinstance(length, FixedLength):
        return np.full(len(uniform), length.tokens, dtype=np.int64)
    if isinstance(length, UniformLength):
        span = length.high - length.low + 1
        return length.low + np.minimum((uniform * span).astype(np.int64), span - 1)
    if isinstance(length, TraceLength | EmpiricalLength):
        if trace is None:
            raise WorkloadError("lengths of kind 'trace' need load=trace")
        return np.minimum(trace, length.high)
    normal = NormalDist()
    z = np.array([normal.inv_cdf(min(max(float(u), 1e-12), 1 - 1e-12)) for u in uniform])
    if isinstance(length, LognormalLength):
        values = np.exp(math.log(length.median) + length.sigma * z)
    elif isinstance(length, NormalLength):
        values = length.mean + length.sd * z
    else:  # pragma: no cover - the union is closed
        raise TypeError(type(length))
    return np.clip(np.rint(values), length.low, length.high).astype(np.int64)


def recorded(
    length: Length, uniform: npt.NDArray[np.float64], column: int, own: npt.NDArray[np.int64] | None
) -> npt.NDArray[np.int64] | None:
    """Lengths of a trace for each request: the load's `own`, or rows of an empirical length's file drawn by `uniform`.

    `column` is 1 for prompts, 2 for outputs. Other lengths have none.
    """
    if not isinstance(length, EmpiricalLength):
        return own
    trace = read_trace(TraceLoad(path=length.path, format=length.format, sha256=length.sha256, duration_s=1.0))
    tokens = trace.prompt_tokens if column == 1 else trace.output_tokens
    return tokens[(uniform * len(tokens)).astype(np.int64)]


def longest(length: Length) -> int:
    """The longest length a distribution can give."""
    return length.tokens if isinstance(length, FixedLength) else length.high


def draw(cell: Cell, source: Passages, count: int, chat: _ChatTemplate | None = None, *, warmup: bool = False) -> Drawn:
    """Draw `count` requests of a cell, or warm-up requests of the same shape with prompts of their own."""
    workload = cell.workload
    pairs = [(workload.prompt, workload.output)]
    if workload.long_prompt is not None and workload.long_share > 0:
        pairs.append((workload.long_prompt, workload.long_output or workload.output))
    most = max(longest(prompt) + longest(output) for prompt, output in pairs)
    if most > cell.model.max_model_len:
        raise WorkloadError(
            f"workload '{workload.name}' asks for up to {most} tokens, model '{cell.model.name}' serves "
            f"{cell.model.max_model_len} (model.max_model_len)"
        )
    purpose = "warmup" if warmup else "requests"
    uniform = generator("lengths", purpose, cell.seed).random((count, 3))
    trace: Trace | None = None
    if isinstance(cell.load, TraceLoad):
        trace = read_trace(cell.load)
        if len(trace.times) < count:  # warm-up of a very short trace
            trace = Trace(
                np.resize(trace.times, count),
                np.resize(trace.prompt_tokens, count),
                np.resize(trace.output_tokens, count),
            )
    asked = trace.prompt_tokens[:count] if trace else None
    given = trace.output_tokens[:count] if trace else None
    is_long = uniform[:, 0] < workload.long_share
    prompt_tokens, output_tokens = (
        draw_lengths(length, uniform[:, column], recorded(length, uniform[:, 1], column, own))
        for length, column, own in ((workload.prompt, 1, asked), (workload.output, 2, given))
    )
    if len(pairs) > 1:
        long_prompts, long_outputs = (
            draw_lengths(length, uniform[:, column], recorded(length, uniform[:, 1], column, own))
            for length, column, own in ((pairs[1][0], 1, asked), (pairs[1][1], 2, given))
        )
        prompt_tokens = np.where(is_long, long_prompts, prompt_tokens)
        output_tokens = np.where(is_long, long_outputs, output_tokens)

    owner = SEED_CLASSES if warmup else cell.seed % SEED_CLASSES
    lead = source.first_token if chat is None else ()
    overhead = len(lead) if chat is None else chat.overhead
    used: set[bytes] = set()
    prompts: list[npt.NDArray[np.int32]] = []
    shared = np.zeros(count, dtype=np.int64)
    texts: list[str] | None = [] if chat else None
    start = np.array(lead, dtype=np.int32)
    prefixes = _Prefixes(cell, source, owner, used, warmup=warmup)
    blocks = _TraceBlocks(cell, source, trace.shared) if trace is not None and trace.shared and not warmup else None
    for index in range(count):
        wanted = int(prompt_tokens[index]) - overhead
        if wanted < 1:
            raise WorkloadError(
                f"workload '{workload.name}' draws a prompt of {prompt_tokens[index]} tokens, of which the "
                f"{'chat template' if chat else 'tokenizer'} takes {overhead}: ask for longer prompts"
            )
        if blocks is not None:
            ids, shared[index] = blocks.prompt(index, wanted)
            prompts.append(np.concatenate([start, ids]).astype(np.int32))
            continue
        before, repeated = prefixes.before(index, wanted, prompts, output_tokens)
        own = wanted - len(before) if prefixes.within else wanted
        ids = source.passage(generator("prompt", purpose, cell.seed, index), own, owner, used)
        if chat is not None and texts is not None:
            ids, text = source.as_text(ids)
            texts.append(text)
        # A session's earlier prompt has the tokenizer's own first token already.
        head = before if prefixes.continues(index) else np.concatenate([start, before])
        prompts.append(np.concatenate([head, ids]).astype(np.int32))
        shared[index] = repeated + len(lead) if repeated and prefixes.within else repeated
        if not prefixes.within:
            prompt_tokens[index] = len(prompts[-1])
    if prefixes.longest(prompts, output_tokens) > cell.model.max_model_len:
        raise WorkloadError(
            f"workload '{workload.name}': sessions of {workload.shared_prefix.turns} turns grow beyond the "
            f"{cell.model.max_model_len} tokens of model '{cell.model.name}' (workload.shared_prefix.turns)"
        )
    unit = np.full(count, np.nan) if warmup else unit_arrivals(cell.load, cell.seed, count)
    return Drawn(
        length_class=["long" if flag else "short" for flag in is_long],
        prompts=prompts,
        texts=texts,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        unit=unit,
        shared=shared,
    )


class _Prefixes:
    """What a prompt begins with, by `workload.shared_prefix`."""

    def __init__(self, cell: Cell, source: Passages, owner: int, used: set[bytes], *, warmup: bool) -> None:
        self._spec = cell.workload.shared_prefix
        self._seed = cell.seed
        self._source = source
        self._owner = owner
        self._used = used
        self._sessions = self._spec.kind == "sessions" and not warmup
        self._share = 0.0 if self._spec.kind == "sessions" else self._spec.share
        self._purpose = "warmup" if warmup else "requests"
        self._most = cell.model.max_model_len
        self._common: dict[int, npt.NDArray[np.int32]] = {}
        self._given: dict[int, int] = {}  # longest part of each group's prefix sent so far

    @property
    def within(self) -> bool:
        """Whether the prefix is part of the drawn length (else the drawn length is added to it)."""
        return not self._sessions

    def continues(self, index: int) -> bool:
        """Whether the prompt goes on with an earlier one."""
        return self._sessions and (index // self._spec.active) % self._spec.turns > 0

    def before(
        self, index: int, wanted: int, prompts: list[npt.NDArray[np.int32]], output_tokens: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int32], int]:
        """(prefix of prompt `index`, how many of its tokens were sent before)."""
        nothing = np.empty(0, dtype=np.int32)
        if self._sessions:
            if not self.continues(index):
                return nothing, 0
            earlier = index - self._spec.active
            answer = self._source.passage(
                generator("answer", self._purpose, self._seed, earlier), int(output_tokens[earlier]), ANY_OWNER, set()
            )
            return np.concatenate([prompts[earlier], answer]).astype(np.int32), len(prompts[earlier])
        tokens = min(round(self._share * wanted), wanted - 1)
        if tokens < 1:
            return nothing, 0
        group = int(generator("group", self._purpose, self._seed, index).integers(self._spec.groups))
        if group not in self._common:
            random = generator("prefix", self._purpose, self._seed, group)
            self._common[group] = self._source.passage(random, self._most, self._owner, self._used)
        repeated = min(tokens, self._given.get(group, 0))
        self._given[group] = max(tokens, self._given.get(group, 0))
        return self._common[group][:tokens], repeated

    def longest(self, prompts: list[npt.NDArray[np.int32]], output_tokens: npt.NDArray[np.int64]) -> int:
        """The most tokens a request of a session takes; 0 where lengths were checked before."""
        if not self._sessions:
            return 0
        return max(len(prompt) + int(output) for prompt, output in zip(prompts, output_tokens, strict=True))


class _TraceBlocks:
    """Prompts of a trace that says which prefixes were shared (Mooncake): a block of 512 tokens for each hash id.

    Equal ids are equal blocks, as in the trace, so requests of equal ids may have equal prompts.
    """

    SIZE = 512

    def __init__(self, cell: Cell, source: Passages, shared: tuple[tuple[int, ...], ...]) -> None:
        if cell.workload.api == "chat":
            raise WorkloadError("a trace with shared prefixes needs workload.api=completions")
        self._seed = cell.seed
        self._source = source
        self._ids = shared
        self._sent: set[tuple[int, ...]] = set()

    def prompt(self, index: int, wanted: int) -> tuple[npt.NDArray[np.int32], int]:
        """(prompt of `wanted` tokens, how many of them an earlier prompt began with)."""
        ids = self._ids[index][: -(-wanted // self.SIZE)]
        parts = [
            self._source.passage(generator("block", self._seed, item), self.SIZE, ANY_OWNER, set()) for item in ids
        ]
        missing = wanted - self.SIZE * len(ids)
        if missing > 0:  # fewer ids than the length needs: the rest is the request's own
            random = generator("prompt", "requests", self._seed, index)
            parts.append(self._source.passage(random, missing, ANY_OWNER, set()))
        repeated = 0
        for end in range(1, len(ids) + 1):
            if ids[:end] not in self._sent:
                break
            repeated = min(end * self.SIZE, wanted)
        self._sent.update(ids[:end] for end in range(1, len(ids) + 1))
        return np.concatenate(parts)[:wanted], repeated


def expected_hit_share(drawn: Drawn, count: int, block_size: int) -> float:
    """Share of prompt tokens that a prefix cache of whole blocks, never short of room, would answer."""
    shared = drawn.shared[:count] // block_size * block_size
    total = int(sum(len(prompt) for prompt in drawn.prompts[:count]))
    return float(shared.sum()) / total if total else 0.0


# --- passages ------------------------------------------------------------------------------------


class Passages:
    """A text as one stream of tokens, from which passages are cut."""

    def __init__(self, tokenizer: Tokenizer, text: Text) -> None:
        self._tokenizer = tokenizer
        encoded = tokenizer.encode_batch([document + "\n\n" for document in text.documents], add_special_tokens=False)
        self._tokens = np.fromiter((token for item in encoded for token in item.ids), dtype=np.int32)
        self.size = len(self._tokens)
        if self.size < 2 * OPENING:
            raise WorkloadError(f"{text.label} has only {self.size} tokens: too short to draw prompts from")
        self._starts = self._word_starts()
        self.recombined = 0
        # What the tokenizer itself puts before a text (OPT: </s>), so that ids equal what a text would
        # become.
        plain = tokenizer.encode("a", add_special_tokens=False).ids
        special = tokenizer.encode("a", add_special_tokens=True).ids
        self.first_token: tuple[int, ...] = tuple(special[: special.index(plain[0])]) if plain[0] in special else ()

    def _word_starts(self) -> npt.NDArray[np.int64]:
        """Positions where a word begins (byte-level and sentencepiece marks); all, for tokenizers without marks."""
        ids = np.unique(self._tokens)
        marked = [i for i in ids.tolist() if (self._tokenizer.id_to_token(i) or "").startswith(("Ġ", "▁"))]
        positions = np.flatnonzero(np.isin(self._tokens, marked))
        return positions if len(positions) >= OPENING else np.arange(self.size)

    def _cut(self, start: int, length: int) -> npt.NDArray[np.int32]:
        return np.take(self._tokens, np.arange(start, start + length), mode="wrap")

    def passage(self, random: np.random.Generator, length: int, owner: int, used: set[bytes]) -> npt.NDArray[np.int32]:
        """A passage of `length` tokens whose opening is the owner's and not in `used` (it is added).

        Raises
        ------
        WorkloadError
            There is none left, recombined ones included.
        """
        starts = self._starts
        # Half the tries at least are in vain by design: an opening belongs to one owner in SEED_CLASSES + 1.
        for attempt in range(_TRIES * (SEED_CLASSES + 1)):
            start = int(starts[random.integers(len(starts))])
            fresh = attempt < _TRIES * (SEED_CLASSES + 1) // 2
            if fresh:
                opening = self._cut(start, min(length, OPENING))
            else:
                other = int(starts[random.integers(len(starts))])
                head = min(HEAD, length)
                opening = np.concatenate([self._cut(other, head), self._cut(start, min(length, OPENING) - head)])
            key = opening.tobytes()
            if owner != ANY_OWNER:
                kind = hashlib.sha1(key, usedforsecurity=False).digest()[0] % (SEED_CLASSES + 1)
                if key in used or kind != owner:
                    continue
                used.add(key)
            if fresh:
                return self._cut(start, length)
            self.recombined += 1
            return np.concatenate([opening[:head], self._cut(start, length - head)])
        raise WorkloadError(
            f"the text is too short for so many different prompts ({len(used)} drawn from {self.size} tokens): "
            "name a longer text (workload.text), ask for longer prompts, or a shorter load"
        )

    def as_text(self, ids: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], str]:
        """The passage as text that tokenises to as many tokens where that can be had, and its tokens."""
        wanted = len(ids)
        text = self._tokenizer.decode(ids.tolist())
        again = self._tokenizer.encode(text, add_special_tokens=False).ids
        for _ in range(4):
            if len(again) <= wanted:
                break
            text = self._tokenizer.decode(again[:wanted])
            again = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.array(again, dtype=np.int32), text


class _ChatTemplate:
    """How many tokens the model's chat template adds around one user message."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoTokenizer  # slow to import, and only chat needs it

        tokenizer: Any = AutoTokenizer.from_pretrained(str(model_dir))
        if not tokenizer.chat_template:
            raise WorkloadError(f"workload.api is 'chat' and the model in {model_dir} has no chat template")
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True
        )
        whole: Sequence[int] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        self.overhead = len(whole) - len(tokenizer("x", add_special_tokens=False)["input_ids"])


def describe(folder: Path) -> pd.Series[Any]:
    """`workload.json` of an artefact as a series, for people."""
    return pd.Series(json.loads((folder / ABOUT_FILE).read_text(encoding="utf-8")))
