"""What a visit asks of a cluster: memory of the host, time, CPUs. Bounds: only a job that went wrong is killed.

A retry asks for more: Snakemake counts attempts, and a job that SLURM ended for want of memory or time gets it.
"""

from __future__ import annotations

from kvstudy.grid.schema import Cell, ClosedLoad, Deployment, KneeLoad, Model, Visit

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_MIB = 1 << 20


def parameters(model: Model) -> int:
    """Number of parameters: as its option says, or from its shape (random weights); 0 where neither does."""
    if model.parameters is not None:
        return model.parameters
    shape = model.shape
    if shape is None:
        return 0
    head = shape.hidden_size // shape.num_attention_heads
    attention = shape.hidden_size * head * 2 * (shape.num_attention_heads + shape.num_key_value_heads)
    gates = 3 if shape.architecture == "llama" else 2
    layer = attention + gates * shape.hidden_size * shape.intermediate_size
    vocabulary = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
    positions = shape.max_position_embeddings * shape.hidden_size if shape.architecture == "opt" else 0
    return shape.num_hidden_layers * layer + vocabulary + positions


def host_memory_mib(deployment: Deployment, attempt: int = 1) -> int:
    """Memory of the host: weights (they pass through it on their way to a GPU too), KV that lies there, what runs them.

    Each further attempt asks for half as much again.
    """
    weights = parameters(deployment.model) * _BYTES[deployment.model.dtype] / _MIB
    kv = deployment.kv_memory_mib if deployment.hardware.device == "cpu" else 0.0
    host = float(getattr(deployment.framework, "host_kv_memory_mib", 0.0))
    # Twice the weights: a loader may hold the file's pages and the tensors at once.
    need = deployment.hardware.cluster.spare_memory_mib + 2.0 * weights + 1.2 * kv + host
    return int(need * (1.0 + 0.5 * (attempt - 1)))


def cell_seconds(cell: Cell) -> float:
    """The longest that a cell's load can take: window, drain, and every probe of a search."""
    load = cell.load
    last = load.timeout_s if isinstance(load, ClosedLoad) else 0.0
    once = load.duration_s + load.drain_s + last
    return once * (load.probes if isinstance(load, KneeLoad) else 1)


def minutes(visit: Visit, attempt: int = 1) -> int:
    """Time limit of a visit: its bring-up and every cell at their bounds, and some to spare; twice that on a retry."""
    seconds = visit.deployment.framework.bring_up_s + sum(cell_seconds(cell) for cell in visit.cells)
    return int((seconds / 60 + visit.deployment.hardware.cluster.spare_minutes) * attempt) + 1


def cpus(visit: Visit) -> int:
    """CPUs of a visit's job."""
    hardware = visit.deployment.hardware
    if visit.gpus:
        return visit.gpus * hardware.cluster.cpus_per_gpu
    return max(1, len({*hardware.server_cores, *hardware.client_cores}))
