"""What the forks' own commands print, read back: so that a run of theirs by hand can stand beside the batch server's.

Two shapes: FlexGen's and H2O's log (`prefill latency: 1.234 s` ...), and InfiniGen's banner with one line of totals.
FlexGen's "cache size" is its formula for the whole cache, whatever H2O keeps.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any


class NotPrinted(ValueError):
    """The text holds no result of a fork; the message says what was looked for."""


@dataclass(frozen=True)
class Printed:
    """A run as the fork reports it. Seconds are the batch's; None is what that fork does not print."""

    prefill_s: float
    decode_s: float
    total_s: float
    throughput: float | None = None  # output tokens a second, prefill included
    peak_gpu_gb: float | None = None
    full_cache_gb: float | None = None
    projected: bool | None = None  # decode time extrapolated from fewer steps (--cut-gen-len)
    banner: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    batch: int | None = None

    def as_json(self) -> dict[str, Any]:
        """For a record."""
        return asdict(self)


_LATENCY = r"{} latency: ([\d.]+) s"
_TOTALS = re.compile(r"^Total: ([\d.e+-]+) Prefill: ([\d.e+-]+) Decode: ([\d.e+-]+)", re.M)
_SHAPE = re.compile(r"^\+{5,}\n(.+)\ninput: (\d+) output: (\d+) bsz: (\d+)\n", re.M)


def parse_printed(text: str) -> Printed:
    """The last result in what a fork printed.

    Raises
    ------
    NotPrinted
        There is none.
    """
    totals = _TOTALS.findall(text)
    if totals:
        total, prefill, decode = map(float, totals[-1])
        shapes = _SHAPE.findall(text)
        if not shapes:
            return Printed(prefill, decode, total)
        banner, prompt, output, batch = shapes[-1]
        throughput = int(output) * int(batch) / total if total else None
        return Printed(
            prefill,
            decode,
            total,
            throughput,
            banner=banner.strip(),
            prompt_tokens=int(prompt),
            output_tokens=int(output),
            batch=int(batch),
        )

    def last(pattern: str) -> str | None:
        found = re.findall(pattern, text)
        return found[-1] if found else None

    latencies = [last(_LATENCY.format(part)) for part in ("prefill", "decode", "total")]
    if any(value is None for value in latencies):
        raise NotPrinted(
            "no result of a fork: neither 'prefill latency: ... s' nor 'Total: ... Prefill: ... Decode: ...'"
        )
    prefill_s, decode_s, total_s = (float(str(value)) for value in latencies)
    throughput_text, peak = last(r"total throughput: ([\d.]+) token/s"), last(r"peak gpu mem: ([\d.]+) GB")
    cache, projected = last(r"cache size: ([\d.]+) GB"), last(r"projected: (True|False)")
    return Printed(
        prefill_s,
        decode_s,
        total_s,
        float(throughput_text) if throughput_text else None,
        peak_gpu_gb=float(peak) if peak else None,
        full_cache_gb=float(cache) if cache else None,
        projected=projected == "True" if projected else None,
    )
