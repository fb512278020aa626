"""How long a plan will take: wall time and GPU-hours, from what its loads last and allowances for all else.

The loads are the plan's own seconds. The allowances are deliberately plain: a bring-up, which on a GPU is reading the
weights at `READ_GB_S` and capturing graphs, and for each cell its warm-up and the drain of what is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstudy.grid.plan import Plan
from kvstudy.grid.schema import Cell, KneeLoad, Visit

#: Seconds to bring a server up on a CPU: vLLM is three processes that import torch and compile, our engine is one.
CPU_BRING_UP_S = {"vllm": 38.0}
OWN_BRING_UP_S = 12.0
#: On a GPU: start and graph capture, and the weights in 16 bits read from disk.
GPU_BRING_UP_S = 90.0
READ_GB_S = 1.0
#: Warm-up, drain and writing of a cell, as a share of its load and at least so many seconds.
AROUND = 0.1
AROUND_S = 2.5


@dataclass(frozen=True)
class Estimate:
    """Seconds that the cells that are still to be measured will take."""

    cells: int
    wall_s: float
    gpu_s: float

    def text(self, gpus: int = 0) -> str:
        """One line; `gpus` is how many the machine has, kept busy together."""
        if not self.cells:
            return "nothing to measure"
        if not self.gpu_s:
            return f"about {_hours(self.wall_s)} to measure {self.cells} cells (loads, bring-ups, drains)"
        return (
            f"about {self.gpu_s / 3600:,.0f} GPU-hours to measure {self.cells} cells (loads, bring-ups, drains), "
            f"{_hours(self.gpu_s / max(gpus, 1))} on {gpus} GPUs at best"
        )


def _hours(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:,.0f} h"


def estimate(plan: Plan, measured: frozenset[str] = frozenset()) -> Estimate:
    """What a plan's visits take, but for the cells whose ids are in `measured`."""
    wall = gpu = 0.0
    cells = 0
    for visit in plan.visits:
        todo = [cell for cell in visit.cells if cell.cell_id not in measured]
        if not todo:
            continue
        seconds = _bring_up(visit) + sum(_cell(cell) for cell in todo)
        cells += len(todo)
        wall += seconds
        gpu += seconds * visit.gpus
    return Estimate(cells, wall, gpu)


def _bring_up(visit: Visit) -> float:
    deployment = visit.deployment
    if deployment.hardware.device == "cuda":
        return GPU_BRING_UP_S + 2e-9 * (deployment.model.parameters or 0) / READ_GB_S
    return CPU_BRING_UP_S.get(deployment.framework.name, OWN_BRING_UP_S)


def _cell(cell: Cell) -> float:
    load = cell.load
    seconds = load.duration_s * (load.probes if isinstance(load, KneeLoad) else 1)
    return seconds + max(AROUND_S, AROUND * seconds)
