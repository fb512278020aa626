"""Standard tasks: EleutherAI's `lm-eval` against a served deployment (the extra `quality`).

It is `lm-eval`'s own `local-completions` model, told to say where a context ends: `lm-eval` sends context and
continuation as one prompt, and what is to be scored under the compressed cache must be decoded. The boundary is put one
token before the continuation, so that its first token too is predicted by a decode step and not by the prompt: where
answers are single words (BoolQ), it is all there is. Unmodified clients get a guess (`kvstudy.engine.echo`). vLLM
ignores the field; its cache is whole.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvstudy.frameworks.base import Unavailable
from kvstudy.grid.schema import Tasks
from kvstudy.quality.measures import chance_corrected
from kvstudy.quality.score import Row

#: Requests in flight; `lm-eval` scores are independent of it.
IN_FLIGHT = 4


def completions_model(url: str, model: str, tokenizer: Path, max_length: int) -> Any:
    """`lm-eval`'s `local-completions` over a server, that names each request's boundary. Raises `Unavailable`."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        api = importlib.import_module("lm_eval.models.openai_completions")
    except ImportError as error:
        raise Unavailable(f"quality.tasks needs lm-eval: pip install 'kvstudy[quality]' ({error})") from error

    class Completions(api.LocalCompletionsAPI):  # type: ignore[misc, name-defined]
        """Remembers how long each request's context is, and says so when it is sent."""

        def batch_loglikelihood_requests(self, chunks: Any) -> Any:
            inputs, lengths, keys = super().batch_loglikelihood_requests(chunks)
            self._contexts = getattr(self, "_contexts", {})
            self._contexts |= {tuple(ids): length for ids, length in zip(inputs, lengths, strict=True)}
            return inputs, lengths, keys

        def _create_payload(self, messages: Any, generate: bool = False, **kwargs: Any) -> dict[str, Any]:
            payload: dict[str, Any] = super()._create_payload(messages, generate=generate, **kwargs)
            if not generate:
                (ids,) = messages
                payload["kvstudy_context_tokens"] = max(1, self._contexts[tuple(ids)] - 1)
            return payload

    return Completions(
        base_url=f"{url}/v1/completions",
        model=model,
        tokenizer=str(tokenizer),
        tokenizer_backend="huggingface",
        max_length=max_length,
        num_concurrent=IN_FLIGHT,
        batch_size=1,
    )


def evaluate(lm: Any, tasks: Tasks, root: Path, seed: int) -> dict[str, list[Mapping[str, Any]]]:
    """`lm-eval`'s samples by task. `root` is what `include_path` is relative to."""
    evaluator = importlib.import_module("lm_eval")
    manager = importlib.import_module("lm_eval.tasks").TaskManager(
        include_path=str(root / tasks.include_path) if tasks.include_path else None
    )
    found = evaluator.simple_evaluate(
        model=lm,
        tasks=list(tasks.names),
        num_fewshot=tasks.fewshot,
        limit=tasks.limit,
        task_manager=manager,
        bootstrap_iters=0,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
    )
    samples: dict[str, list[Mapping[str, Any]]] = found["samples"]
    return samples


def rows_of(
    samples: Mapping[str, list[Mapping[str, Any]]], full: Mapping[str, list[Mapping[str, Any]]], base: Row
) -> Iterator[Row]:
    """`accuracy:TASK` and, where a document has choices, `accuracy_corrected:TASK`, beside the full cache's."""
    for task, mine in samples.items():
        theirs = {sample["doc_id"]: sample for sample in full[task]}
        for sample in mine:
            item = base | {"item": int(sample["doc_id"])}
            own, reference = float(sample["acc"]), float(theirs[sample["doc_id"]]["acc"])
            yield item | {"measure": f"accuracy:{task}", "value": own, "reference": reference}
            choices = len(sample["filtered_resps"])
            if choices > 1:
                yield item | {
                    "measure": f"accuracy_corrected:{task}",
                    "value": chance_corrected(own, choices),
                    "reference": chance_corrected(reference, choices),
                }


def base_row(attended: float, kept: float) -> Row:
    """What holds of every row of a deployment's tasks: they have lengths of their own (context 0)."""
    return {
        "context": 0,
        "depth": math.nan,
        "weight": 1.0,
        "kept": kept,
        "attended": attended,
        "kv_device_bytes": math.nan,
        "kv_host_bytes": math.nan,
    }
