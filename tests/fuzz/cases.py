"""One case: files that were changed in one place, an environment, and a command to run on them."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from case import Case
from corpus import OTHERS, RUN, STEPS
from foreign import FOREIGN
from launches import job_files, launched
from mutators import (
    NASTY,
    mutate_bytes,
    mutate_json,
    mutate_lines,
    mutate_tree,
    spell_json,
)

from shardwise.checkpoint.durable_files import fingerprint_of
from shardwise.checkpoint.manifest import MANIFEST_NAME, Damaged, read_manifest
from shardwise.config.schema_text import field_path, field_types

Rng = random.Random


def build_case(
    seed: int, number: int, home: Path, scratch: Path, kinds: Sequence[str] = ()
) -> tuple[str, Case]:
    """The same for the same numbers: (kind, case); of all kinds, or of those that are named."""
    rng = Rng(f"{seed}/{number}")
    among = kinds or list(KINDS)
    kind = among[number % len(among)]
    os.symlink(home / "data.jsonl", scratch / "data.jsonl")
    return kind, KINDS[kind](rng, home, scratch)


def _train_words(*changes: str) -> list[str]:
    return ["train", "run.yaml", *changes]


def _write_run(scratch: Path, **sections: Any) -> None:
    (scratch / "run.yaml").write_text(yaml.safe_dump({**RUN, **sections}))


def _copy(home: Path, scratch: Path, name: str) -> Path:
    return Path(shutil.copytree(home / name, scratch / name, symlinks=True))


def _verb(rng: Rng) -> str:
    return rng.choice(("train", "train", "plan"))


# ---- what users write --------------------------------------------------------------------------


def _yaml(rng: Rng, home: Path, scratch: Path) -> Case:
    in_text = rng.random() < 0.5
    text = yaml.safe_dump(RUN).encode()
    text = mutate_bytes(rng, text) if in_text else spell_json(mutate_tree(rng, RUN))
    if rng.random() < 0.03:
        rows = [b"a0: &a0 [x, x, x, x, x, x, x, x, x]"]
        rows += [
            b"a%d: &a%d [%s]" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 12)
        ]
        text = b"\n".join(rows)
    (scratch / "run.yaml").write_bytes(text)
    return Case([_verb(rng), "run.yaml"])


def _toml_or_json(rng: Rng, home: Path, scratch: Path) -> Case:
    if rng.random() < 0.5:
        (scratch / "run.json").write_bytes(mutate_json(rng, json.dumps(RUN, indent=1).encode()))
        return Case([_verb(rng), "run.json"])
    tables = [
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in section.items()
                                if not isinstance(value, dict))
        for name, section in RUN.items() if isinstance(section, dict)
    ]  # fmt: skip
    (scratch / "run.toml").write_bytes(mutate_bytes(rng, "\n".join(tables).encode()))
    return Case([_verb(rng), "run.toml"])


def _override(rng: Rng, home: Path, scratch: Path) -> Case:
    _write_run(scratch)
    names = [field_path(section, name) for section, row in field_types().items() for name in row]
    words = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice(names)
        value = rng.choice(NASTY)
        text = value if isinstance(value, str) else spell_json(value).decode()
        word = f"{name}{rng.choice(('=', '=', '=', '=', '', '.x=', ' = '))}{text}"
        words.append(_as_argument(word))
    return Case([_verb(rng), "run.yaml", *words])


def _as_argument(word: str) -> str:
    """As a process gets it: no NUL, and no half of a pair but an escaped byte."""
    return os.fsdecode(word.replace("\0", "").encode("utf-8", "replace"))


def _argument(rng: Rng, home: Path, scratch: Path) -> Case:
    _write_run(scratch)
    run = str(home / "runs" / "run")
    path = rng.choice(
        ("x" * 300, "a/" * 3000, "", ".", "/", "~nobody/x", "/proc/self/mem", "/dev/null",
         "run.yaml", "missing.yaml", "\udcff.yaml", "data.jsonl", run, str(home), "*", "\x1b[2J")
    )  # fmt: skip
    number = rng.choice(("-1", "0", "x", "1e400", "9" * 5000, "", "nan", "6"))
    commands: list[list[str]] = [
        *([verb, path] for verb in ("train", "plan", "verify", "report", "tunnel", "profile")),
        *(["checkpoint", verb, path] for verb in ("ls", "verify")),
        ["checkpoint", "verify", run, "--step", number],
        ["checkpoint", "prune", path, "--keep", number],
        ["export", path, "--to", "out"],
        ["export", run, "--to", path],
        ["export", run, "--to", "out", "--step", number],
        ["export", run, "--to", "out", "--max-shard-size", number],
        ["config", "cp", path, "out.yaml"],
        ["config", "cp", "demo", path],
        ["config", "schema", path],
        ["report", run, "--to", path],
        ["verify", "--parity", run, path],
        ["verify", "--parity", run, run, "--tolerance", number],
        ["plan", "run.yaml", "--cluster", path],
        ["plan", "run.yaml", "--tokens", number, "--top", number],
        ["plan", "run.yaml", "--set", f"optim.lr={number}"],
        ["plan", "run.yaml", "--for", path],
        ["observe", path],
        ["migrate", path],
        ["migrate", "run.yaml", "--to", "accelerate", "--out", path],
        [path],
    ]
    return Case([_as_argument(word) for word in rng.choice(commands)])


def _foreign(rng: Rng, home: Path, scratch: Path) -> Case:
    """A file of another tool, or a script, for `shardwise migrate`."""
    name, tree = rng.choice(list(FOREIGN.items()))
    if isinstance(tree, str):
        (scratch / name).write_bytes(mutate_bytes(rng, tree.encode()))
    else:
        (scratch / name).write_bytes(mutate_json(rng, json.dumps(tree, indent=1).encode()))
    words = ["migrate", name, *rng.choice(([], ["model=tiny-llama", "cluster=2xCPU"]))]
    return Case([*words, *rng.choice(([], [], ["--from", "axolotl"], ["--to", "accelerate"]))])


# ---- what models and data bring ----------------------------------------------------------------


def _config_json(rng: Rng, home: Path, scratch: Path) -> Case:
    name = rng.choice(("model", "model", *(f"others/{other}" for other in OTHERS)))
    place = _copy(home, scratch, name)
    file = place / "config.json"
    file.write_bytes(mutate_json(rng, file.read_bytes()))
    _write_run(scratch, model={"name": str(place)})
    return Case([_verb(rng), "run.yaml"])


def _tokenizer(rng: Rng, home: Path, scratch: Path) -> Case:
    place = _copy(home, scratch, "model")
    file = place / rng.choice(("tokenizer.json", "tokenizer.json", "tokenizer_config.json"))
    file.write_bytes(mutate_json(rng, file.read_bytes()))
    _write_run(scratch, model={"name": str(place)})
    return Case(_train_words())


def _weights(rng: Rng, home: Path, scratch: Path) -> Case:
    place = _copy(home, scratch, rng.choice(("model", "sharded")))
    _write_run(scratch, model={"name": str(place)})
    index = place / "model.safetensors.index.json"
    if index.exists() and rng.random() < 0.5:
        index.write_bytes(mutate_json(rng, index.read_bytes()))
        return Case(_train_words())
    file = rng.choice(sorted(place.glob("*.safetensors")))
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    if rng.random() < 0.5:
        header = mutate_json(rng, data[8 : 8 + size])
        length = len(header) if rng.random() < 0.9 else rng.getrandbits(64)
        file.write_bytes(length.to_bytes(8, "little") + header + data[8 + size :])
    else:
        file.write_bytes(mutate_bytes(rng, data))
    return Case(_train_words())


def _jsonl(rng: Rng, home: Path, scratch: Path) -> Case:
    _write_run(scratch)
    file = scratch / "data.jsonl"
    data = file.read_bytes()
    file.unlink()
    lines = data.splitlines(keepends=True)[: rng.choice((1, 2, 12, 20))]
    file.write_bytes(mutate_lines(rng, b"".join(lines)))
    return Case(_train_words(f"data.max_corrupt={rng.choice((0, 10))}"))


def _dataset(rng: Rng, home: Path, scratch: Path) -> Case:
    place = _copy(home, scratch, rng.choice(("saved", "parquet")))
    file = rng.choice(sorted(path for path in place.rglob("*") if path.is_file()))
    change = mutate_json if file.suffix == ".json" else mutate_bytes
    file.write_bytes(change(rng, file.read_bytes()))
    _write_run(scratch, data={"source": "datasets", "path": str(place), "seq_len": 32})
    return Case(_train_words())


# ---- what runs leave ---------------------------------------------------------------------------


def _commands_on_a_run(rng: Rng) -> list[str]:
    return rng.choice(
        (
            *(["checkpoint", verb, "runs/run"] for verb in ("ls", "verify")),
            ["checkpoint", "prune", "runs/run", "--keep", "2"],
            ["verify", "runs/run"],
            ["verify", "runs/run", "--json"],
            ["verify", "--parity", "runs/run", "runs/run"],
            ["report", "runs/run"],
            ["export", "runs/run", "--to", "out"],
            ["train", "runs/run/config.yaml", "runs_dir=runs"],
        )
    )


def _checkpoint(rng: Rng, home: Path, scratch: Path) -> Case:
    return _with_broken(rng, home, scratch, rng.choice(("tensors.json", "rank-00000.bin")))


def _with_broken(rng: Rng, home: Path, scratch: Path, name: str) -> Case:
    """A run in which one file of one checkpoint is changed."""
    run = _copy(home, scratch, "runs") / "run"
    folders = [run / "checkpoints" / f"step-{step:08d}" for step in STEPS]
    broken = rng.choice(folders)
    file = broken / name
    file.write_bytes(
        (mutate_bytes if name.endswith(".bin") else mutate_json)(rng, file.read_bytes())
    )
    if name in ("tensors.json", "plan.json") and rng.random() < 0.6:
        _seal(broken, name)
    words = _commands_on_a_run(rng)
    # One of those that are whole must stay, whatever the command; all where nothing is pruned.
    whole = [folder for folder in folders if folder != broken]
    return Case(words, {}, whole[-1:] if "prune" in words else whole)


def _seal(folder: Path, name: str) -> None:
    """Make the manifest agree with what the file says now, as an enemy would."""
    try:
        manifest = read_manifest(folder)
    except Damaged:
        return
    manifest.files[name] = fingerprint_of(folder / name)
    (folder / MANIFEST_NAME).write_bytes(manifest.to_bytes())


def _manifest(rng: Rng, home: Path, scratch: Path) -> Case:
    return _with_broken(rng, home, scratch, MANIFEST_NAME)


def _events(rng: Rng, home: Path, scratch: Path) -> Case:
    run = _copy(home, scratch, "runs") / "run"
    file = run / "events.jsonl"
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        file.write_bytes(mutate_lines(rng, file.read_bytes() or b"{}"))
    return _on_a_whole_run(rng, run)


def _plan(rng: Rng, home: Path, scratch: Path) -> Case:
    """plan.json of the run, or of a checkpoint, which may be sealed again."""
    if rng.random() < 0.4:
        return _with_broken(rng, home, scratch, "plan.json")
    run = _copy(home, scratch, "runs") / "run"
    name, change = rng.choice((("plan.json", mutate_json),) * 4 + (("config.yaml", mutate_bytes),))
    (run / name).write_bytes(change(rng, (run / name).read_bytes()))
    return _on_a_whole_run(rng, run)


def _on_a_whole_run(rng: Rng, run: Path) -> Case:
    words = _commands_on_a_run(rng)
    whole = sorted((run / "checkpoints").glob("step-*"))
    return Case(words, {}, whole[-1:] if "prune" in words else whole)


def _odd_file(rng: Rng, home: Path, scratch: Path) -> Case:
    """Something that is no plain file in the place of one."""
    run = _copy(home, scratch, "runs") / "run"
    place = _copy(home, scratch, "model")
    newest = run / "checkpoints" / f"step-{STEPS[-1]:08d}"
    _write_run(scratch, model={"name": str(place)})
    on_run = [run / "events.jsonl", run / "plan.json", newest / MANIFEST_NAME, newest / "plan.json"]
    on_run += [newest / "rank-00000.bin", newest / "tensors.json", newest, run / "checkpoints"]
    on_run += [run / "config.yaml", run / "report.html"]
    on_model = [place / "config.json", place / "model.safetensors", place / "tokenizer.json"]
    on_model += [place / "tokenizer_config.json", place / "pytorch_model.bin"]
    on_model += [scratch / "data.jsonl", scratch / "run.yaml"]
    file = rng.choice(on_run + on_model)
    if file.is_dir():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)
    rng.choice((os.mkfifo, os.mkdir, _loop, _dangle, _device, lambda path: None))(file)
    words = _train_words() if file in on_model else _commands_on_a_run(rng)
    return Case(words)


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _dangle(path: Path) -> None:
    path.symlink_to("/nowhere/at/all")


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


# As torchrun sets them for the first of two ranks.
_LAUNCHER = {
    **{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
}
_VARIABLES = (
    *("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "SHARDWISE_CACHE", "HOME", "PATH", "TMPDIR"),
    *("SHARDWISE_RENDEZVOUS", "PYTORCH_ALLOC_CONF", "LANG", "TERM", "NO_COLOR", "XDG_CACHE_HOME"),
    *("HF_HOME", "COLUMNS", *_LAUNCHER),
)
_VALUES = (
    *("", " ", "0", "-1", "x", "9" * 5000, "/proc", "/dev/null", "/nowhere", "~nobody", "a:b"),
    *("\udcff", "../..", "1e9", "data.jsonl", "x" * 300, "[", "GPU-x", "0,0,0", "1,x", "1", "3"),
)


def _environment(rng: Rng, home: Path, scratch: Path) -> Case:
    _write_run(scratch)
    environment = {
        rng.choice(_VARIABLES): rng.choice(_VALUES) for _ in range(rng.choice((1, 1, 2)))
    }
    if rng.random() < 0.4:
        # A launcher's variables, of which some are changed or missing.
        environment = _LAUNCHER | environment
        for name in rng.sample(list(_LAUNCHER), rng.choice((0, 1, 2))):
            environment[name] = rng.choice(_VALUES)
        for name in rng.sample(list(_LAUNCHER), rng.choice((0, 0, 1))):
            del environment[name]
    words = rng.choice(
        (_train_words(), ["plan", "run.yaml", "cluster.name=local"], ["config", "ls"])
    )
    return Case(list(words), environment)


KINDS: dict[str, Callable[[Rng, Path, Path], Case]] = {
    "yaml": _yaml,
    "toml and json": _toml_or_json,
    "override": _override,
    "argument": _argument,
    "foreign": _foreign,
    "config.json": _config_json,
    "tokenizer": _tokenizer,
    "weights": _weights,
    "jsonl": _jsonl,
    "dataset": _dataset,
    "checkpoint": _checkpoint,
    "manifest": _manifest,
    "events": _events,
    "plan": _plan,
    "odd file": _odd_file,
    "environment": _environment,
    "launch": launched,
    "job files": job_files,
}
