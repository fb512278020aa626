"""The machine as the study wants it used, and what a job asks of a cluster."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from kvstudy.grid.schema.base import Strict


class Cluster(Strict):
    """What a job asks of a cluster beside its devices. Nothing here changes what is measured."""

    partition: str | None = None
    gpu_model: str | None = None  # as SLURM's gres names it
    cpus_per_gpu: PositiveInt = 4
    spare_memory_mib: PositiveInt = 4096  # client, Python, the framework's own code
    spare_minutes: PositiveInt = 10  # imports, drawing the workload, a restart of the server


class Hardware(Strict):
    """The machine as the study wants it used. `server_cores` and `client_cores` are disjoint CPU ids, empty: any.

    With `gpus`, a deployment holds `model.gpus` of them for as long as it is up.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    title: str = Field(default="")
    device: Literal["cpu", "cuda"]
    gpus: int = Field(default=0, ge=0)
    server_cores: tuple[NonNegativeInt, ...]
    client_cores: tuple[NonNegativeInt, ...]
    memory_limit_gib: PositiveFloat | None = None
    link_gbps: PositiveFloat | None = None
    cluster: Cluster = Cluster()

    @model_validator(mode="after")
    def _cuda_has_gpus(self) -> Hardware:
        if self.device == "cuda" and not self.gpus:
            raise ValueError("device 'cuda' needs gpus, the number that the machine has")
        return self
