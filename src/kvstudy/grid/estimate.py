"""How long a plan will take: wall time and GPU-hours, from what its loads last and allowances for all else.

The loads are the plan's own seconds. The allowances are deliberately plain: a bring-up, which on a GPU is reading the
weights at `READ_GB_S` and capturing graphs, and for each cell its warm-up and the drain of what is in flight. Quality
offers no load: its items are prefilled once for all deployments that share them, then decoded under each.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstudy.grid.plan import Plan
from kvstudy.grid.schema import Cell, Deployment, KneeLoad, Quality, QualityCell

#: Seconds to bring a server up on a CPU: vLLM is three processes that import torch and compile, our engine is one.
CPU_BRING_UP_S = {"vllm": 38.0}
OWN_BRING_UP_S = 12.0
#: On a GPU: start and graph capture, and the weights in 16 bits read from disk.
GPU_BRING_UP_S = 90.0
READ_GB_S = 1.0
#: Warm-up, drain and writing of a cell, as a share of its load and at least so many seconds.
AROUND = 0.1
AROUND_S = 2.5
#: Scoring on two CPU cores, as `study=sparsity` took it with SmolLM2-135M (ten parts of ours over 41 deployments in 885
#: s, vLLM's in 469 s): seconds a prompt token and, for attention, a squared one; a decoded token of each deployment,
#: ours in one batch, a served one's alone. Larger models take as many times longer as they are larger.
SCORED_PARAMETERS = 134.5e6
CPU_PREFILL_S, CPU_ATTEND_S = 1.0e-3, 6.5e-7
CPU_STEP_S, CPU_SERVED_STEP_S = 1.9e-3, 9.0e-3
#: On a GPU, where none was timed: operations a second of a prefill, and a decoding step of all deployments.
GPU_PREFILL_FLOPS = 1e14
GPU_STEP_S = 0.05


@dataclass(frozen=True)
class Estimate:
    """Seconds that what is still to be done will take: cells to measure, and to score; `tasks` of these ask `lm-eval`.

    How many questions a task of `lm-eval` has the plan does not know: they are not in the seconds.
    """

    cells: int
    wall_s: float
    gpu_s: float
    scored: int = 0
    tasks: int = 0

    def text(self, gpus: int = 0) -> str:
        """One line; `gpus` is how many the machine has, kept busy together."""
        if not (self.cells or self.scored):
            return "nothing to measure"
        cells = [f"measure {self.cells} cells"] if self.cells else []
        cells += [f"score {self.scored} for quality"] if self.scored else []
        todo = f"{' and '.join(cells)} (loads, bring-ups, drains{', items' if self.scored else ''})"
        todo += f", and what lm-eval's tasks take in {self.tasks} of them" if self.tasks else ""
        if not self.gpu_s:
            return f"about {_hours(self.wall_s)} to {todo}"
        at_best = f"{_hours(self.gpu_s / max(gpus, 1))} on {gpus} GPUs at best"
        return f"about {self.gpu_s / 3600:,.0f} GPU-hours to {todo}, {at_best}"


def _hours(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:,.0f} h"


def estimate(plan: Plan, done: frozenset[str] = frozenset()) -> Estimate:
    """What a plan's visits take, but for the cells whose ids are in `done`, measured or scored."""
    wall = gpu = 0.0
    cells = scored = tasks = 0
    for visit in plan.visits:
        todo = [cell for cell in visit.cells if cell.cell_id not in done]
        if not todo:
            continue
        seconds = _bring_up(visit.deployment) + sum(_cell(cell) for cell in todo)
        cells += len(todo)
        wall += seconds
        gpu += seconds * visit.gpus
    for asked in plan.quality:
        missing = [cell for cell in asked.cells if cell.cell_id not in done]
        if not missing:
            continue
        seconds = _scoring(missing)
        scored += len(missing)
        tasks += len(missing) if missing[0].quality.tasks is not None else 0
        wall += seconds
        gpu += seconds * max(cell.devices for cell in missing)
    return Estimate(cells, wall, gpu, scored, tasks)


def _bring_up(deployment: Deployment) -> float:
    if deployment.hardware.device == "cuda":
        return GPU_BRING_UP_S + 2e-9 * (deployment.model.parameters or 0) / READ_GB_S
    return CPU_BRING_UP_S.get(deployment.framework.name, OWN_BRING_UP_S)


def _cell(cell: Cell) -> float:
    load = cell.load
    seconds = load.duration_s * (load.probes if isinstance(load, KneeLoad) else 1)
    return seconds + max(AROUND_S, AROUND * seconds)


def _scoring(cells: list[QualityCell]) -> float:
    """Seconds of one quality visit: the model, its items, and the deployments that are served as a check."""
    first = cells[0]
    served = first.framework.environment is not None
    checked = {cell.framework.name: cell for cell in cells}.values()
    seconds = _bring_up(first.deployment)
    if not served:
        seconds += first.quality.spot_checks * sum(_bring_up(cell.deployment) for cell in checked)
    parameters = first.model.parameters or SCORED_PARAMETERS
    for context, items, steps in _items(first.quality):
        if first.hardware.device == "cuda":
            prefill, decode = 2 * parameters * context / GPU_PREFILL_FLOPS, steps * GPU_STEP_S
        else:
            larger = parameters / SCORED_PARAMETERS
            step = CPU_SERVED_STEP_S if served else CPU_STEP_S * len(cells)
            prefill, decode = larger * (CPU_PREFILL_S + CPU_ATTEND_S * context) * context, larger * steps * step
        seconds += items * (prefill + decode)
    return seconds


def _items(asked: Quality) -> list[tuple[int, int, int]]:
    """(tokens of context, items, tokens decoded of each) of each part."""
    found = []
    if asked.perplexity is not None:
        one = asked.perplexity
        found += [(context, one.items, one.continuation) for context in one.contexts]
    if asked.greedy is not None:
        found += [(context, asked.greedy.items, asked.greedy.output) for context in asked.greedy.contexts]
    if asked.retention is not None:
        told = asked.retention
        found += [(context, told.items * len(told.depths), told.output) for context in told.contexts]
    return found
