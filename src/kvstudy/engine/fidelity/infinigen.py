"""InfiniGen's teacher-forced cases: the offline steps (skew, partial columns) and the `accuracy` rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..policies.infinigen_rules import HIDDEN, WholeSequenceRule, column_mask, skew_matrix
from .h2o import causal, unpack
from .plain import PlainModel, softmax
from .report import Case, margin

SKEW_TOLERANCE = 2e-3
"""Largest difference between our skew and the authors', both rounded to float16: a float16 step at 1 is 1e-3."""


def _augment(x: Tensor) -> Tensor:
    """Append a 1 to each row: the authors fold the bias into an extra input row."""
    return torch.cat([x, x.new_ones(x.shape[0], 1)], dim=-1)


class SkewedModel:
    """A model with the authors' `setup.safetensors`.

    For OPT that is skewed weights, for Llama skewing matrices and column masks.
    """

    def __init__(self, model: PlainModel, setup: dict[str, Tensor]) -> None:
        self.model = model
        self.opt = model.kind == "opt"
        self.setup = setup
        self.dtype = model.dtype

    def weight(self, name: str) -> Tensor:
        """A tensor of the setup, in the model's dtype."""
        return self.setup[name].to(self.dtype)

    def skewed(self, layer: int, which: str, x: Tensor) -> Tensor:
        """OPT: q or k [H, n, d] by the skewed weights, q already scaled."""
        name = f"skewed.model.decoder.layers.{layer}.self_attn.{which}_proj.weight"
        return self.model.split(_augment(x) @ self.weight(name), self.model.heads)

    def logits_of(self, layer: int, x: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Attention logits [H, n, n], not yet masked."""
        if self.opt:
            logits: Tensor = self.skewed(layer, "q", x) @ self.skewed(layer, "k", x).mT
            return logits
        plain: Tensor = q @ k.mT / self.model.head_dim**0.5
        return plain

    def speculate(self, layer: int, before: Tensor, x: Tensor, k: Tensor) -> Tensor:
        """Speculated scores [H, n, n]: layer - 1's attention input `before` against this layer's keys."""
        if self.opt:
            partial = self.model.split(_augment(before) @ self.weight(f"partial_weight_q.{layer}"), self.model.heads)
            keys = self.skewed(layer, "k", x)
            scores: Tensor = partial @ keys.mT
            return scores
        skew = self.weight(f"skewing_matrix.{layer}")
        positions = torch.arange(before.shape[0])
        mask = self.weight(f"partial_weight_q.{layer}").view(self.model.heads, 1, -1)
        partial = (self.model.queries(layer, before, positions) @ skew) * mask
        scores = partial @ (k @ skew).mT / self.model.head_dim**0.5
        return scores

    def sparse_layers(self) -> range:
        """Layers 0 and 1 use everything."""
        return range(2, self.model.layers)


def plain_attention(model: PlainModel, layer: int, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Full causal attention, [H, n, d]."""
    return softmax(causal(q @ k.mT / model.head_dim**0.5, 0)) @ v


def setup_cases(folder: str, model: PlainModel, setup: dict[str, Tensor], meta: dict[str, Any]) -> Iterator[Case]:
    """Our skew and our partial columns against the authors' `setup.safetensors`.

    `model` is to be in float16, as theirs was.
    """
    skewed = SkewedModel(model, setup)
    heads, dim = model.heads, model.head_dim

    skew = Case(folder, "skew (SVD of the calibration text)", "offline", tolerance=SKEW_TOLERANCE)
    ours: dict[int, Tensor] = {}

    def collect(layer: int, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ours[layer] = skew_matrix(q * model.scale if skewed.opt else q).half()
        return plain_attention(model, layer, x, q, k, v)

    model.forward(torch.tensor(meta["ids"]["calib"]), collect)
    for layer, matrix in ours.items():
        if skewed.opt:
            base = f"model.decoder.layers.{layer}.self_attn."
            for which, factor in (("q", model.scale), ("k", 1.0)):
                weight = model.weights[f"{base}{which}_proj.weight"]
                bias = model.weights[f"{base}{which}_proj.bias"]
                plain = torch.cat([weight.T, bias[None]]) * factor
                mine = (plain.view(-1, heads, dim).transpose(0, 1) @ matrix).float()
                theirs = setup[f"skewed.{base}{which}_proj.weight"].float().view(-1, heads, dim).transpose(0, 1)
                skew.number(*_aligned(mine, theirs), f"layer {layer} {which}", logits=False)
        elif f"skewing_matrix.{layer}" in setup:
            skew.number(
                *_aligned(matrix.float(), setup[f"skewing_matrix.{layer}"].float()),
                f"layer {layer}",
                logits=False,
            )
    yield skew

    case = Case(folder, "partial columns (accuracy)", "offline")

    def compare(layer: int, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        stored = setup[f"partial_weight_q.{layer}"]
        if skewed.opt:
            sq, sk = skewed.skewed(layer, "q", x), skewed.skewed(layer, "k", x)
            want = (stored != 0).any(dim=0).view(heads, dim)
        else:
            # Layers without a skewing matrix are not speculated; theirs is stored all the same, unskewed.
            matrix = setup.get(f"skewing_matrix.{layer}")
            turn = torch.eye(dim).expand(heads, dim, dim) if matrix is None else matrix
            turn = turn.to(x.dtype)
            sq, sk = q @ turn, k @ turn
            want = stored.bool().view(heads, dim)
        sums = sq.abs().sum(dim=1), sk.abs().sum(dim=1)
        kept = int(dim * meta["partial_weight_ratio"])
        gap = torch.minimum(margin(sums[0], kept), margin(sums[1], kept))
        got = column_mask(*sums, meta["partial_weight_ratio"])
        if layer in skewed.sparse_layers():
            case.select(got, want, gap, f"layer {layer}")
        attention = causal(skewed.logits_of(layer, x, q, k), 0)
        return softmax(attention) @ v

    model.forward(torch.tensor(meta["ids"]["partial"]), compare)
    yield case


def _aligned(mine: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Bring the columns of `mine` [H, m, d] into the order and signs of `theirs`: neither matters to the method."""
    like = torch.nn.functional.normalize(mine, dim=1).mT @ torch.nn.functional.normalize(theirs, dim=1)
    order = like.abs().argmax(dim=1)
    sign = like.gather(1, order[:, None]).sign()
    return mine.gather(2, order[:, None].expand_as(mine)) * sign, theirs


def accuracy_cases(
    folder: str,
    model: PlainModel,
    setup: dict[str, Tensor],
    meta: dict[str, Any],
    expected: dict[str, Tensor],
) -> Iterator[Case]:
    """Every case of one precision: fetch sets of every layer, head and row, and the logits."""
    skewed = SkewedModel(model, setup)
    ids = expected["eval_ids"][0]
    half = model.dtype == torch.float16
    name = "fp16 " if half else ""

    full = Case(folder, f"{name}full, skewed weights", "teacher-forced")

    def whole(layer: int, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softmax(causal(skewed.logits_of(layer, x, q, k), 0)) @ v

    full.number(model.forward(ids, whole), expected["logits_full"], "logits")
    yield full

    for knobs in meta["cases"]:
        yield _accuracy(Case(folder, f"{name}accuracy {knobs['tag']}", "teacher-forced"), skewed, knobs, expected)


def _accuracy(case: Case, skewed: SkewedModel, knobs: dict[str, Any], expected: dict[str, Tensor]) -> Case:
    ids, tag = expected["eval_ids"][0], knobs["tag"]
    fetch = unpack(expected[f"fetch_{tag}"], len(ids))
    spec = expected.get(f"spec_score_{tag}")
    before: list[Tensor] = []

    def attend(layer: int, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = skewed.logits_of(layer, x, q, k)
        if layer in skewed.sparse_layers():
            scores = skewed.speculate(layer, before[-1], x, k)
            if spec is not None and layer == 2:
                case.number(scores, spec, "speculated scores", logits=False)
            how = (knobs["alpha"], knobs["budget"], knobs["capacity"], knobs["policy"])
            rule = WholeSequenceRule(scores, *how, head_zero=not skewed.opt)
            allowed = torch.stack(list(_rows(case, rule, fetch[layer - 2], knobs["alpha"], layer)), dim=1)
            # Adding -10000, as they do, leaves a row with an empty set what it was: full attention.
            logits = torch.where(allowed, logits, logits + HIDDEN)
        before.append(x)
        return softmax(causal(logits, 0)) @ v

    case.number(skewed.model.forward(ids, attend), expected[f"logits_{tag}"], "logits")
    return case


def _rows(case: Case, rule: WholeSequenceRule, want: Tensor, alpha: float, layer: int) -> Iterator[Tensor]:
    """Walk the rule; where a row differs by a near-tie only, go on with the authors' set, so later rows compare."""
    for row in range(rule.size):
        got, theirs = rule.row(row), want[:, row]
        if not torch.equal(got, theirs):
            visible = rule.visible(row)
            floor = visible.amax(dim=-1, keepdim=True) - alpha
            gap = torch.minimum(margin(visible, int(rule.numbers[row])), (visible - floor).abs().min())
            case.select(got, theirs, gap, f"layer {layer}, row {row}")
            if bool((gap[(got != theirs).any(dim=-1)] < case.near_tie).all()):
                got, case.tainted = theirs, False
        else:
            case.selections += len(got)
        rule.commit(row, got)
        yield got
