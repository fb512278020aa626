"""A cell's load as the client sends it: where to, the bytes of each request, and what a prefix cache should answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvstudy.grid.schema import Cell, Vllm
from kvstudy.load import client, workload
from kvstudy.load.flights import Request
from kvstudy.measure.faults import Fault


def read_drawn(folder: Path, *, warmup: bool = False) -> workload.Drawn:
    """The requests drawn ahead into a workload's folder. Raises `Fault` when it is damaged."""
    try:
        return workload.load_requests(folder, warmup=warmup)
    except (OSError, ValueError, KeyError) as error:
        raise Fault(
            f"the workload {folder} is damaged ({' '.join(str(error).split())[:120]}): delete it and run again; "
            "it is drawn anew, the same"
        ) from None


def path_of(cell: Cell) -> str:
    """The endpoint a workload goes to."""
    return "/v1/chat/completions" if cell.workload.api == "chat" else "/v1/completions"


def build_requests(cell: Cell, drawn: workload.Drawn, count: int, model_name: str) -> list[Request]:
    """The first `count` drawn requests, as the bytes that will be sent."""
    how: dict[str, Any] = {"temperature": cell.workload.temperature, "ignore_eos": cell.workload.ignore_eos}
    requests = []
    for index in range(count):
        tokens = int(drawn.output_tokens[index])
        if drawn.texts is not None:
            body = client.chat_body(model_name, drawn.texts[index], tokens, **how)
        else:
            body = client.completion_body(model_name, drawn.prompts[index], tokens, **how)
        requests.append(Request(index, drawn.length_class[index], int(drawn.prompt_tokens[index]), tokens, body))
    return requests


def expected_hits(cell: Cell, drawn: workload.Drawn, count: int) -> float:
    """Share of prompt tokens that a prefix cache should answer: none unless the deployment has one."""
    framework = cell.framework
    if not isinstance(framework, Vllm) or not framework.prefix_caching:
        return 0.0
    return workload.expected_hit_share(drawn, count, framework.block_size)
