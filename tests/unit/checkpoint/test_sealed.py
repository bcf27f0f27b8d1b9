"""Checkpoints that were altered by one who recomputed every hash: no code of theirs is run, and
nothing is loaded that is not the model.

A sample runs always; 2,000 where SHARDWISE_CHAOS is set.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from trained import TINY, open_saver, save, start_session

from shardwise.checkpoint.durable_files import fingerprint_of
from shardwise.checkpoint.index import read_index
from shardwise.checkpoint.manifest import Damaged, Manifest, read_manifest
from shardwise.checkpoint.may_resume import validate_resume
from shardwise.checkpoint.restore import find_good, restore_checkpoint
from shardwise.checkpoint.signature import sign, why_not_signed
from shardwise.checkpoint.state import model_tensors
from shardwise.checkpoint.store import list_entries
from shardwise.cli.checkpoint_verdict import judge
from shardwise.cli.main import main
from shardwise.errors import UserError
from shardwise.parallel.mesh import World
from shardwise.training.session import Session

sys.path.insert(0, str(Path(__file__).parents[2] / "fuzz"))
from mutators import mutate_json

CASES = range(2000) if os.environ.get("SHARDWISE_CHAOS") else range(30)
KEY = bytes(range(32))
CODE = """
import os
os.makedirs({canary!r}, exist_ok=True)
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class Own(LlamaForCausalLM):
    config_class = OwnConfig
"""
AUTO_MAP = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
Dice = random.Random
Tree = dict[str, Any]


# ---- a sound run, and a directory of code that must not be run ---------------------------------


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    session = start_session(tmp_path_factory.mktemp("sealed"))
    saver = open_saver(session)
    assert save(session, saver, 1).error is None
    saver.close()
    yield session
    dist.destroy_process_group()


@pytest.fixture
def path(session: Session) -> Iterator[Path]:
    """The checkpoint of the run, to be altered; a sound one is put back."""
    root = session.plan.run_dir / "checkpoints"
    sound = root.with_name("sound")
    shutil.copytree(root, sound)
    yield root / "step-00000001"
    shutil.rmtree(root)
    sound.rename(root)


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Is there if the code beside it was run."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    write_code(tmp_path / "code", tmp_path / "canary")
    return tmp_path / "canary"


def write_code(folder: Path, canary: Path) -> None:
    folder.mkdir()
    (folder / "modeling_own.py").write_text(CODE.format(canary=str(canary)))
    config = {"model_type": "own", "auto_map": AUTO_MAP, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps({**TINY, **config}))


def change(path: Path, name: str, alter: Callable[[Tree], Any]) -> None:
    """Alter what a JSON file of a checkpoint says, and seal it."""
    tree = json.loads((path / name).read_text())
    tree = alter(tree) or tree
    (path / name).write_text(json.dumps(tree))
    seal(path)


def seal(path: Path, **changes: Any) -> None:
    values = {name: getattr(read_manifest(path), name) for name in Manifest.__dataclass_fields__}
    values["files"] = {name: fingerprint_of(path / name) for name in values["files"]}
    (path / "manifest.json").write_bytes(Manifest(**{**values, **changes}).to_bytes())


def trust(plan: Tree, code: Path) -> None:
    plan["config"]["model"]["trust_remote_code"] = True
    plan["model_dir"] = plan["config"]["model"]["name"] = str(code)
    plan["hf_config"] |= {"model_type": "own", "auto_map": AUTO_MAP}


def run_command(*words: object) -> int:
    sys.argv = ["shardwise", *map(str, words)]
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


# ---- code ------------------------------------------------------------------------------------


def test_export_runs_no_code_that_a_checkpoint_names(
    path: Path, canary: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    change(path, "plan.json", lambda plan: trust(plan, canary.with_name("code")))
    out = canary.with_name("out")
    assert run_command("checkpoint", "verify", path) == 0
    assert "not compared with its model: its model has code of its own" in capfd.readouterr().out
    assert run_command("export", path, "--to", out) == 2
    said = capfd.readouterr().err
    assert "no code is run on a checkpoint's word" in said and "--code DIR" in said
    assert not canary.exists() and not out.exists()


def test_code_is_run_where_the_command_line_says_so_and_from_there_alone(
    path: Path, canary: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    foreign = canary.with_name("foreign")
    write_code(foreign, canary.with_name("foreign canary"))

    def alter(plan: Tree) -> None:
        trust(plan, foreign)
        classes = {name: f"{foreign}--{place}" for name, place in AUTO_MAP.items()}
        plan["hf_config"] |= {"auto_map": classes, "_name_or_path": str(foreign)}

    change(path, "plan.json", alter)
    out = canary.with_name("out")
    assert run_command("export", path, "--to", out, "--code", canary.with_name("code")) == 0
    assert canary.exists(), "the code is real"
    assert not canary.with_name("foreign canary").exists()
    assert json.loads((out / "config.json").read_text())["auto_map"] == AUTO_MAP
    assert (out / "modeling_own.py").read_text() == CODE.format(canary=str(canary))


def test_an_export_names_no_code_of_a_checkpoint(path: Path, tmp_path: Path) -> None:
    change(path, "plan.json", lambda plan: plan["hf_config"].update(auto_map=AUTO_MAP))
    assert run_command("export", path, "--to", tmp_path / "out") == 0
    assert "auto_map" not in json.loads((tmp_path / "out/config.json").read_text())


def test_code_that_is_not_there_is_told(
    path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("export", path, "--to", tmp_path / "out", "--code", tmp_path)
    assert run_command(*words) == 2
    assert "has no config.json" in capfd.readouterr().err


# ---- tensors ---------------------------------------------------------------------------------

HEAD, NORM = "model.lm_head.weight", "model.model.norm.weight"


def drop_head(index: Tree) -> None:
    del index[HEAD]


def swap(index: Tree) -> None:
    index[HEAD], index[NORM] = index[NORM], index[HEAD]


def reshape(index: Tree) -> None:
    index[HEAD] |= {"shape": [512], "pieces": [[[0], [512], *index[HEAD]["pieces"][0][2:]]]}


def retype(index: Tree) -> None:
    index[HEAD]["dtype"] = "int32"


def rename(index: Tree) -> None:
    index["model.head.weight"] = index.pop(HEAD)


def share(index: Tree) -> None:
    first, second = (
        "model.model.layers.0.mlp.up_proj.weight",
        "model.model.layers.1.mlp.up_proj.weight",
    )
    index[first]["pieces"] = index[second]["pieces"]


@pytest.mark.parametrize(
    ("alter", "says"),
    [
        (drop_head, "lm_head.weight is missing"),
        (swap, "lm_head.weight has shape [8], the model's is [64, 8]"),
        (reshape, "lm_head.weight has shape [512], the model's is [64, 8]"),
        (retype, "lm_head.weight is int32, the model's is float32"),
        (rename, "model.head.weight is no tensor of the model"),
        (share, "share bytes of rank-00000.bin"),
    ],
)
def test_other_tensors_than_the_models_are_refused_by_name(
    session: Session,
    path: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    alter: Callable[[Tree], None],
    says: str,
) -> None:
    change(path, "tensors.json", alter)
    assert run_command("checkpoint", "verify", path) == 5
    assert says in capfd.readouterr().out
    assert run_command("export", path, "--to", tmp_path / "out") == 5
    assert says in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
    said = resume(session)
    assert said is None or says in said.what or says in str(said)


def resume(session: Session) -> UserError | None:
    """As a rank does: what refuses it, and None where nothing is found to go on from."""
    try:
        validate_resume(session.plan)
        root = session.plan.run_dir / "checkpoints"
        found = find_good(root, World.joined(), verify=True, tell=lambda path, why: None)
        if found is None:
            return None
        for param in session.model.parameters():
            param.data.fill_(float("nan"))
        restore_checkpoint(found, session.plan, session.model, session.optimizer, World.joined())
    except UserError as error:
        return error
    assert all(torch.isfinite(param).all() for param in session.model.parameters())
    live = {name: (tuple(t.shape), t.dtype) for name, t in model_tensors(session.model).items()}
    stored = read_index(found.path)
    kept = {name: (t.shape, t.dtype) for name, t in stored.items() if name.startswith("model.")}
    assert kept == live
    return None


def test_a_sealed_sound_checkpoint_goes_on(session: Session, path: Path) -> None:
    seal(path, tokens=17)
    assert resume(session) is None
    assert path.exists()


def test_what_only_a_signature_tells(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    key = path.parent / "key"
    key.write_bytes(KEY)
    assert run_command("checkpoint", "verify", path, "--key", key) == 5
    assert "is not signed" in capfd.readouterr().out
    assert run_command("checkpoint", "sign", path, "--key", key) == 0
    assert run_command("checkpoint", "sign", path, "--key", key) == 0
    assert run_command("checkpoint", "verify", path, "--key", key) == 0

    def alter(index: Tree) -> None:
        first, second = (f"model.model.layers.{n}.mlp.up_proj.weight" for n in (0, 1))
        index[first], index[second] = index[second], index[first]

    change(path, "tensors.json", alter)
    out = path.parents[1] / "exported"
    capfd.readouterr()
    assert run_command("checkpoint", "verify", path) == 0
    assert run_command("checkpoint", "verify", path, "--key", key) == 5
    assert "the checkpoint was altered after it was signed" in capfd.readouterr().out
    assert run_command("export", path, "--to", out, "--key", key) == 5
    assert "is not the one that was signed" in capfd.readouterr().err
    assert not out.exists()
    assert run_command("checkpoint", "sign", path, "--key", key) == 2
    assert f"rm {path / 'manifest.hmac'}" in capfd.readouterr().err
    key.write_bytes(b"short")
    assert run_command("checkpoint", "verify", path, "--key", key) == 2
    assert "a key needs at least 32" in capfd.readouterr().err


# ---- many ------------------------------------------------------------------------------------


def alter_at_random(dice: Dice, path: Path, code: Path) -> str:
    """One sealed change; returns its kind."""
    kind = dice.choice(list(ALTERATIONS))
    ALTERATIONS[kind](dice, path, code)
    # Where the manifest itself was altered it may be none any more.
    with suppress(Damaged):
        seal(path, **dice.choice([{}, {}, {"position": 0}, {"tokens": 0}]))
    return kind


def _trust(dice: Dice, path: Path, code: Path) -> None:
    def alter(plan: Tree) -> None:
        trust(plan, code)
        if dice.random() < 0.5:
            plan["config"]["model"]["trust_remote_code"] = dice.choice([False, None, 1, "yes"])
        if dice.random() < 0.5:
            plan["hf_config"]["model_type"] = "llama"
        if dice.random() < 0.3:
            plan["hf_config"]["_attn_implementation"] = "someone/kernel"
        plan["weights_dir"] = plan["config"]["data"]["tokenizer"] = str(code)

    rewrite(path / "plan.json", alter)


def _other_model(dice: Dice, path: Path, code: Path) -> None:
    fields = ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size", "head_dim",
              "num_key_value_heads", "tie_word_embeddings", "model_type")  # fmt: skip
    values = (1, 2, 3, 7, 16, 64, 10**6, -1, 0, None, "gpt2", "mixtral", True, 1e300, [], {})

    def alter(plan: Tree) -> None:
        plan["hf_config"][dice.choice(fields)] = dice.choice(values)

    rewrite(path / "plan.json", alter)


def _mutate(name: str) -> Callable[[Dice, Path, Path], None]:
    def alter(dice: Dice, path: Path, code: Path) -> None:
        (path / name).write_bytes(mutate_json(dice, (path / name).read_bytes()))

    return alter


def _tensors(dice: Dice, path: Path, code: Path) -> None:
    def alter(index: Tree) -> None:
        first, second = dice.sample(sorted(index), 2)
        how = dice.choice(("drop", "swap", "rename", "copy", "dtype", "shape", "start", "extra"))
        if how == "drop":
            del index[first]
        elif how == "swap":
            index[first], index[second] = index[second], index[first]
        elif how == "rename":
            index[first + dice.choice(("x", ".weight", "\x1b[2J"))] = index.pop(first)
        elif how == "copy":
            index[first] = dict(index[second])
        elif how == "dtype":
            index[first]["dtype"] = dice.choice(("float16", "bfloat16", "int32", "bool", "float64"))
        elif how == "shape":
            index[first]["shape"] = dice.choice(([], [1], [0], [8, 64], [64, 8, 1], [2**40]))
        elif how == "start":
            index[first]["pieces"][0][3] = dice.choice((0, 1, 64, 10**5, 2**40))
        else:
            index[dice.choice(("y", "model.y", "optim.state.y.step"))] = dict(index[first])

    rewrite(path / "tensors.json", alter)


def rewrite(file: Path, alter: Callable[[Tree], None]) -> None:
    tree = json.loads(file.read_text())
    alter(tree)
    file.write_text(json.dumps(tree))


ALTERATIONS: dict[str, Callable[[Dice, Path, Path], None]] = {
    "trust": _trust,
    "other model": _other_model,
    "tensors": _tensors,
    "plan.json": _mutate("plan.json"),
    "tensors.json": _mutate("tensors.json"),
    "manifest.json": _mutate("manifest.json"),
}


def tensors_of(folder: Path) -> dict[str, list[int]]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def test_sealed_and_altered_checkpoints_run_nothing_and_load_nothing_else(
    session: Session, canary: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = session.plan.run_dir / "checkpoints"
    sound = Path(shutil.copytree(root, tmp_path / "sound"))
    sign(sound / "step-00000001", KEY)
    manifest = (sound / "step-00000001/manifest.json").read_bytes()
    model = {name: list(t.shape) for name, t in session.model.state_dict().items()}
    seen: Counter[tuple[str, str]] = Counter()
    for number in CASES:
        shutil.rmtree(root)
        path = Path(shutil.copytree(sound, root)) / "step-00000001"
        dice, out = Dice(f"24/{number}"), tmp_path / f"out-{number}"
        kind = alter_at_random(dice, path, canary.with_name("code"))
        if (path / "manifest.json").read_bytes() != manifest:
            assert why_not_signed(path, KEY) is not None, number
        (entry,) = list_entries(root)
        verdict = judge(entry).state
        code = run_command("export", path, "--to", out)
        said = capfd.readouterr()
        assert code == 0 or "fix: " in said.err, (number, said)
        assert "Traceback" not in said.err, (number, said)
        if code == 0:
            assert tensors_of(out) == model, number
            assert verdict == "good", number
            shutil.rmtree(out)
        refused = resume(session)
        assert refused is None or refused.fix, (number, refused)
        assert not canary.exists(), number
        seen[kind, "exported" if code == 0 else f"{verdict}, {code}"] += 1
    shutil.rmtree(root)
    shutil.move(sound, root)
    (root / "step-00000001/manifest.hmac").unlink()
    for (kind, outcome), count in sorted(seen.items()):
        print(f"{kind:16} {outcome:24} {count}")
    assert {kind for kind, _ in seen} == ALTERATIONS.keys()
