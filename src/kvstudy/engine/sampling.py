"""The next token from a row of logits: greedy, or temperature and top-p with a seed a request."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstudy.engine.request import Request


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """One token a request, from logits `[requests, vocab]` of any float type.

    A forced token is taken whatever the logits. Appends to `request.logprobs` and `request.logits` what was asked
    for. Greedy ties go to the lower id.
    """
    logits = logits.float()  # torch's argmax is four times slower in bfloat16
    tokens: list[int] = logits.argmax(-1).tolist()
    for row, request in enumerate(requests):
        params = request.params
        if (forced := request.forced_token) is not None:
            tokens[row] = forced
        elif params.temperature > GREEDY_BELOW:
            tokens[row] = _draw(logits[row], request)
        if params.return_logits:
            request.logits.append(logits[row].cpu().clone())
        if params.logprobs is not None:
            request.logprobs.append(_logprobs(logits[row], tokens[row], params.logprobs))
    return tokens


#: Colder than this, the likeliest token has all the probability that float32 can hold.
GREEDY_BELOW = 1e-5


def _draw(logits: torch.Tensor, request: Request) -> int:
    """Sample at the request's temperature from the smallest set of tokens whose probability reaches top_p."""
    params = request.params
    if request.generator is None:
        request.generator = torch.Generator(logits.device)
        seed = params.seed if params.seed is not None else torch.seed()
        request.generator.manual_seed(seed % (1 << 63))
    p = ((logits - logits.max()) / params.temperature).softmax(-1)
    if params.top_p < 1.0:
        ordered, index = p.sort(descending=True)
        before = ordered.cumsum(-1) - ordered
        ordered[1:][before[1:] >= params.top_p] = 0.0  # the likeliest token stays, however small top_p is
        return int(index[torch.multinomial(ordered, 1, generator=request.generator)])
    return int(torch.multinomial(p, 1, generator=request.generator))


def _logprobs(logits: torch.Tensor, token: int, top: int) -> tuple[float, list[tuple[int, float]]]:
    logp = logits.log_softmax(-1)
    best = logp.topk(top) if top else None
    pairs = list(zip(best.indices.tolist(), best.values.tolist(), strict=True)) if best else []
    return float(logp[token]), pairs


def read_prompt(logits: torch.Tensor, request: Request, start: int) -> None:
    """Append the log probabilities of prompt tokens from `start` on, one a row of `logits [tokens, vocab]`."""
    logits = logits.float()
    for row, token in enumerate(request.prompt[start : start + len(logits)]):
        request.prompt_logprobs.append(_logprobs(logits[row], token, request.params.logprobs or 0))
