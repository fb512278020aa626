"""What is brought up and what is measured of it: deployments, cells, and the visits that measure them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from kvstudy.grid.schema.base import Strict, content_hash, digest, identity, number
from kvstudy.grid.schema.framework import (
    Budget,
    Framework,
)
from kvstudy.grid.schema.lengths import (
    TraceLength,
)
from kvstudy.grid.schema.load import (
    Load,
    TraceLoad,
    load_label,
)
from kvstudy.grid.schema.machine import Hardware
from kvstudy.grid.schema.model import Model
from kvstudy.grid.schema.quality import Quality
from kvstudy.grid.schema.workload import Workload, workload_label


class Deployment(Strict):
    """What is brought up: a framework with a model on hardware under a KV budget and memory."""

    framework: Framework
    model: Model
    hardware: Hardware
    budget: Budget = Budget()
    kv_memory_mib: PositiveFloat
    sweep: Literal["deployment", "cell"] = "deployment"
    harness_version: int

    @property
    def slug(self) -> str:
        """Readable part of its name."""
        share = f"{self.budget.tokens}t" if self.budget.of == "tokens" else number(self.budget.share)
        parts = [self.framework.label, self.model.name, f"b{share}", f"kv{number(self.kv_memory_mib)}"]
        return "_".join(parts)

    @cached_property
    def id(self) -> str:
        """Readable name and content hash; the same deployment has the same id in every study."""
        return f"{self.slug}-{content_hash(self)}"

    @property
    def devices(self) -> int:
        """GPUs that it holds while it is up; 0: it has a machine without GPUs to itself."""
        return self.model.gpus if self.hardware.gpus else 0

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy that works out its own names: pydantic's would keep the original's."""
        copy = super().model_copy(update=update, deep=deep)
        for name in ("id", "cell_id", "deployment"):
            copy.__dict__.pop(name, None)
        return copy


class _Asked(Deployment):
    """A deployment and what is asked of it: what a folder of the store holds."""

    @cached_property
    def deployment(self) -> Deployment:
        """The part of the cell that is brought up; the same of cells that measure its speed and its quality."""
        return Deployment(**{name: getattr(self, name) for name in Deployment.model_fields})

    @property
    def cell_slug(self) -> str:
        """Readable part of the cell's name."""
        raise NotImplementedError

    @cached_property
    def cell_id(self) -> str:
        """Readable name and hash of the resolved config: the cell's folder in the store."""
        return f"{self.cell_slug}-{content_hash(self)}"


class Cell(_Asked):
    """A deployment under a load with a seed: one row of the study."""

    workload: Workload
    load: Load
    seed: int = Field(ge=0)

    @model_validator(mode="after")
    def _trace_lengths_have_a_trace(self) -> Cell:
        lengths = (self.workload.prompt, self.workload.output, self.workload.long_prompt, self.workload.long_output)
        if any(isinstance(length, TraceLength) for length in lengths) and not isinstance(self.load, TraceLoad):
            raise ValueError(f"workload '{self.workload.name}' takes its lengths from a trace: it needs load=trace")
        return self

    @property
    def cell_slug(self) -> str:
        """Readable part of the cell's name."""
        return f"{self.slug}_{workload_label(self.workload)}_{self.load.name}-{load_label(self.load)}_s{self.seed}"


class QualityCell(_Asked):
    """A deployment's quality: what is asked, and the seed that items are drawn by."""

    quality: Quality
    seed: int = Field(ge=0)

    @property
    def cell_slug(self) -> str:
        """Readable part of the cell's name."""
        return f"{self.slug}_q-{self.quality.name}_s{self.seed}"

    @property
    def items_key(self) -> str:
        """What the items and their prefill depend on: cells that share it are scored in one go, on the same items."""
        parts = {"model": self.model, "hardware": self.hardware, "quality": self.quality}
        dumped = {name: identity(part.model_dump(mode="json")) for name, part in parts.items()}
        own = self.framework.environment is None
        how = ("block_size", "max_prefill_tokens", "prefill") if own else ()
        chunk = [getattr(self.framework, name, None) for name in how]
        return digest([dumped, self.seed, chunk, self.harness_version, "" if own else self.cell_id])


class QualityVisit(Strict):
    """Cells that are scored together."""

    id: str
    study: str
    cells: tuple[QualityCell, ...]


CELL_ID = re.compile(r"^[a-z0-9][a-z0-9._-]*-[0-9a-f]{10}$")


class Visit(Strict):
    """One bring-up: a deployment and the cells it serves, in the order in which they are served."""

    id: str
    study: str
    deployment: Deployment
    cells: tuple[Cell, ...]
    priority: int = 0
    gpus: int = 0
