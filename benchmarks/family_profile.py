"""Where a step's time goes on the device: kernels by class, and the longest of them."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# The first that matches a kernel's name, in small letters, is its class.
_CLASSES = (
    ("attention backward", r"(flash|fmha|sdpa|attention|attn).*(bprop|bwd|backward|grad)"),
    ("attention forward", r"flash|fmha|sdpa|attention|attn"),
    ("optimizer", r"adam|multi_tensor|foreach|lpnorm"),
    ("grouped matmul", r"group(ed)?_?(gemm|mm|problem)|moe"),
    ("copies", r"memcpy|copy|catarray|chunk_cat|split_with_sizes"),
    ("matmul", r"gemm|nvjet|cutlass|cublas|splitk|xmma|_mm_|swiglu_quack|quack"),
    ("elementwise", r"triton|elementwise|reduce|norm|softmax|index|scatter|gather|sort|scan|fill"),
)
_TOP = 24
_NAME = 90


def read_kernels(trace: Path) -> dict[str, Any]:
    """Milliseconds of a step by class, over all streams, and those of the longest kernels."""
    data = json.loads(gzip.decompress(trace.read_bytes()))
    steps = max(1, sum(_is_step(event) for event in data["traceEvents"]))
    return summed(data["traceEvents"], steps)


def summed(events: Iterable[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """The same from the trace's events."""
    classes: Counter[str] = Counter()
    names: Counter[str] = Counter()
    spans: list[tuple[float, float]] = []
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        took_ms = event["dur"] / 1e3 / steps
        classes[class_of(event["name"], event["cat"])] += took_ms  # type: ignore[assignment]
        names[event["name"][:_NAME]] += took_ms  # type: ignore[assignment]
        spans.append((event["ts"], event["ts"] + event["dur"]))
    return {
        "idle_ms": round(_idle_us(spans) / 1e3 / steps, 2),
        "classes_ms": {name: round(ms, 2) for name, ms in classes.most_common()},
        "top_ms": {name: round(ms, 2) for name, ms in names.most_common(_TOP)},
    }


def _idle_us(spans: list[tuple[float, float]]) -> float:
    """Between the first kernel and the end of the last, how long none ran on any stream."""
    idle, busy_until = 0.0, min((start for start, _ in spans), default=0.0)
    for start, end in sorted(spans):
        idle += max(0.0, start - busy_until)
        busy_until = max(busy_until, end)
    return idle


def class_of(name: str, category: str = "kernel") -> str:
    """What a kernel is for."""
    if category == "gpu_memset":
        return "memset"
    if category == "gpu_memcpy":
        return "copies"
    found = (kind for kind, pattern in _CLASSES if re.search(pattern, name.lower()))
    return next(found, "other")


def show_kernels(row: str, found: Mapping[str, Any]) -> str:
    """The classes in one line, and the longest kernels below."""
    classes = ", ".join(f"{name} {ms:.1f}" for name, ms in found["classes_ms"].items())
    idle = f"; idle {found['idle_ms']:.1f}" if "idle_ms" in found else ""
    lines = [f"{row}: ms of a step by class, all streams: {classes}{idle}"]
    return "\n".join([*lines, *(f"  {ms:8.2f}  {name}" for name, ms in found["top_ms"].items())])


def _is_step(event: Mapping[str, Any]) -> bool:
    """On the host; the device's copy of a label has a category of its own."""
    return event.get("cat") == "user_annotation" and str(event.get("name")).startswith("step ")
