"""`requests.parquet`: how the table of requests is written, by a visit and by an importer."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq


def write_requests(frame: pd.DataFrame, path: Path) -> None:
    """`requests.parquet`, list columns typed even when empty."""
    table = pa.Table.from_pandas(frame.drop(columns=["chunk_s", "chunk_tokens"]), preserve_index=False)
    at = frame.columns.get_loc("chunk_s")
    chunk_s = pa.array([None if item is None else list(item) for item in frame["chunk_s"]], pa.list_(pa.float64()))
    tokens = pa.array([None if item is None else list(item) for item in frame["chunk_tokens"]], pa.list_(pa.int64()))
    assert isinstance(at, int)
    table = table.add_column(at, "chunk_s", chunk_s).add_column(at + 1, "chunk_tokens", tokens)
    pq.write_table(table, path, compression="zstd")
