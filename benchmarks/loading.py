"""Host memory while a model is loaded from sharded safetensors files, and quantised on the way.

    python benchmarks/loading.py [--model llama-3.1-70b] [--base nf4] [--shards 30]
        [--seconds 100] [--json FILE]

The files have real headers and an index, and their data is a hole of zeros, so 141 GB of weights
take no place on a disk. A process of its own loads them as training does. Another process looks at
its memory every 10 ms: `anonymous` is what it holds, `file` what it has mapped of the files, which
the system may take back at any time. What was read when the time was up is said too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from family_forks import Call, run_calls
from forked_measures import import_ahead, import_torch, plan_of
from gpu import driver, versions
from shardwise.facts.allocator import ALLOCATOR
from shardwise.facts.cluster import parse_cluster
from shardwise.facts.presets import PRESETS
from shardwise.units import GIB

_LOOK_S = 0.01
_MOST_S = 600.0
_STATUS = {"VmHWM": "peak", "RssAnon": "anonymous", "RssFile": "file"}
Tensors = dict[str, tuple[int, ...]]


def write_files(place: Path, fields: Mapping[str, Any], shards: int) -> int:
    """A model's directory whose weights are holes; returns the bytes of the weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors = {name: tuple(each.shape) for name, each in model.named_parameters()}
    sizes = {name: 2 * each.numel() for name, each in model.named_parameters()}
    total, behind, files = sum(sizes.values()), 0, [Tensors() for _ in range(shards)]
    for name, shape in tensors.items():
        files[min(shards - 1, behind * shards // total)][name] = shape
        behind += sizes[name]
    where = {}
    for number, held in enumerate(files, start=1):
        file = f"model-{number:05}-of-{shards:05}.safetensors"
        where |= dict.fromkeys(held, file)
        _write_hole(place / file, held, sizes)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    (place / "config.json").write_text(json.dumps(dict(fields)))
    return total


def _write_hole(path: Path, held: Tensors, sizes: Mapping[str, int]) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, shape in held.items():
        start, end = end, end + sizes[name]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def load(given: argparse.Namespace, place: Path, record: Path) -> dict[str, Any]:
    """Build the model as training does, watched."""
    import torch

    from shardwise.parallel.mesh import build_mesh
    from shardwise.training.session import build_model
    from shardwise.tunnel.world import rank_zero_of

    on_cpu = given.device == "cpu"
    adapter = {"method": "lora", "rank": 16, "targets": ["all-linear"], "base": given.base}
    plan = plan_of(
        parse_cluster(f"1x{'CPU' if on_cpu else given.gpu}"),
        {
            "model": {"name": str(place)},
            "adapter": adapter,
            "data": {"seq_len": 64 if on_cpu else 4096},
            "memory": {"compile": False} if on_cpu else {},
            "train": {"micro_batch": 1, "accumulation": 1},
        },
    )
    if given.device == "cuda":
        # The driver's own memory belongs to what was there before.
        torch.zeros(1, device="cuda")
    with rank_zero_of(1), _watched(record) as watch:
        build_model(plan, build_mesh(plan), print)
        if given.device == "cuda":
            torch.cuda.synchronize()
        watch(all_read=True)
    return dict(json.loads(record.read_text()))


@contextmanager
def _watched(record: Path) -> Iterator[Any]:
    """Count what is read from the files, and let another process look at this one's memory."""
    from shardwise.model import stored

    context = multiprocessing.get_context("fork")
    num_bytes, is_over = context.Value("q", 0), context.Value("b", 0)
    read = stored._Safetensors.read

    def counted(self: Any, *what: Any) -> Any:
        found = read(self, *what)
        num_bytes.value += found.nbytes
        return found

    looks = context.Process(target=_look, args=(os.getpid(), record, num_bytes, is_over))
    looks.start()

    def watch(*, all_read: bool) -> None:
        is_over.value = all_read
        looks.join()

    with mock.patch.object(stored._Safetensors, "read", counted):
        yield watch


def _look(pid: int, record: Path, num_bytes: Any, is_over: Any) -> None:
    """Until all is read: the most of each kind of memory, written down twice a second."""
    most: dict[str, float] = {}
    before, started, written = _memory_of(pid), time.monotonic(), 0.0
    while True:
        last = bool(is_over.value)
        for name, size in _memory_of(pid).items():
            most[name] = max(most.get(name, 0.0), size)
        now = time.monotonic()
        if last or now - written > 0.5:
            written = now
            found = {f"{name}_gib": size for name, size in most.items()}
            found |= {f"{name}_before_gib": size for name, size in before.items()}
            found |= {"read_gib": num_bytes.value / GIB, "seconds": now - started}
            _replace(record, json.dumps(found | {"is_whole": last}))
        if last:
            return
        time.sleep(_LOOK_S)


def _memory_of(pid: int) -> dict[str, float]:
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in _STATUS:
            found[_STATUS[name]] = int(value.split()[0]) * 1024 / GIB
    return found


def _replace(path: Path, text: str) -> None:
    """Write a file that is never half there."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def main() -> None:
    given = parse()
    os.environ.setdefault(*ALLOCATOR)
    ends = time.monotonic() + given.seconds
    import_torch()
    fields = {**PRESETS[given.model], "use_cache": False}
    if given.device == "cuda":
        import_ahead({fields["model_type"]})
    given.log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.place) as folder:
        place, record = Path(folder), Path(folder) / "record.json"
        whole = write_files(place, fields, given.shards) / GIB
        call = Call(partial(load, given, place, record), given.log)
        ((_, answer),) = run_calls([call], limit_s=_MOST_S, ends=ends)
        found = json.loads(record.read_text()) if record.exists() else {}
    found |= {"whole_gib": whole, "problem": answer.problem}
    machine = {"gpu": given.gpu, "driver": driver(), **versions()}
    results = {"machine": machine, "model": given.model, "base": given.base, **found}
    if given.json:
        given.json.write_text(f"{json.dumps(results, indent=1)}\n", encoding="utf-8")
    print(said_of(results))


def said_of(found: Mapping[str, Any]) -> str:
    """In a few words."""
    if "read_gib" not in found:
        return str(found["problem"])
    share, rate = found["read_gib"] / found["whole_gib"], found["read_gib"] / found["seconds"]
    held = ", ".join(
        f"{name} {found[f'{name}_gib']:.2f} GiB ({found[f'{name}_before_gib']:.2f} before)"
        for name in _STATUS.values()
    )
    text = f"{found['model']} as {found['base']}: {found['read_gib']:.1f} GiB read, {share:.0%}, "
    text += f"{rate:.2f} GiB/s; host memory at most: {held}"
    return f"{text}; {found['problem']}" if found["problem"] else text


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-70b", choices=PRESETS)
    parser.add_argument("--base", default="nf4", choices=("nf4", "float8", "param"))
    parser.add_argument("--shards", type=int, default=30, help="files of the weights")
    parser.add_argument("--place", help="a directory for them, on a file system with holes")
    parser.add_argument("--seconds", type=float, default=600, help="after which nothing is read")
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--log", type=Path, default=Path("runs/loading.log"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args()


if __name__ == "__main__":
    main()
