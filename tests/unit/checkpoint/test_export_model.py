"""Export without ranks: from checkpoints that are written here by hand, in two shards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from forkserver import forkserver
from shardwise.checkpoint import export_target, exporter
from shardwise.checkpoint.durable_files import HashedFile
from shardwise.checkpoint.export_model import Exported, export_checkpoint
from shardwise.checkpoint.exporter import Exporter
from shardwise.checkpoint.index import Index, Piece, StoredTensor, dump_index
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.read import find_checkpoint, verify_checkpoint
from shardwise.checkpoint.store import begin, publish
from shardwise.config.plain import config_from_dict
from shardwise.errors import ExitCode, UserError
from shardwise.launch.prepare import choose_plan

Run = Callable[..., subprocess.CompletedProcess[str]]
LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
MANIFEST: dict[str, Any] = {
    **{"position": 0, "tokens": 0, "loss": None, "global_batch": 1, "seed": 0, "world_size": 2},
    **{"loss_scale": None, "versions": {}},
}


def build_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA)).eval()


def write_checkpoint(
    run: Path, model: Any, model_dir: Path, step: int = 10, tokenizer: str = "auto"
) -> Path:
    """Each tensor cut into two row blocks, one a file."""
    root = run / "checkpoints"
    directory = begin(root, step)
    pieces: dict[str, list[Piece]] = {}
    files = {}
    state = model.state_dict()
    for rank in range(2):
        name = f"rank-{rank:05d}.bin"
        with HashedFile(directory / name) as file:
            for key, tensor in state.items():
                middle = len(tensor) // 2
                rows = tensor[:middle] if rank == 0 else tensor[middle:]
                offsets = (rank * middle, *(0 for _ in tensor.shape[1:]))
                piece = Piece(offsets, tuple(rows.shape), name, file.position)
                pieces.setdefault(key, []).append(piece)
                file.write(rows.contiguous().numpy().tobytes())
            files[name] = file.fingerprint()
    index: Index = {
        f"model.{key}": StoredTensor(tensor.dtype, tuple(tensor.shape), tuple(pieces[key]))
        for key, tensor in state.items()
    }
    config = config_from_dict(
        {
            "model": {"name": str(model_dir), "weights": "random"},
            "data": {"source": "synthetic", "seq_len": 16, "tokenizer": tokenizer},
            "cluster": {"name": "2xCPU"},
        }
    )
    plan = json.dumps(choose_plan(config, environ={}).to_dict()).encode()
    manifest = Manifest(step=step, created=time.time(), files=files, **MANIFEST)
    return publish(root, manifest, dump_index(index), plan).path


def run_export(
    run: Path, out: Path, dtype: torch.dtype | None = None, size: str = "5GB", layout: Any = None
) -> Exported:
    checkpoint = verify_checkpoint(find_checkpoint(run))
    exporter = Exporter(checkpoint, dtype, lambda num_bytes: None)
    return export_checkpoint(exporter, out, layout=layout or "safetensors", max_shard_size=size)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(input_ids=torch.arange(24).view(2, 12)).logits
    return result


def same_logits(out: Path, model: Any) -> bool:
    return torch.equal(logits(AutoModelForCausalLM.from_pretrained(out).eval()), logits(model))


@pytest.fixture
def model() -> Any:
    return build_model()


@pytest.fixture
def model_dir(tmp_path: Path, model: Any) -> Path:
    model.config.save_pretrained(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def run(tmp_path: Path, model: Any, model_dir: Path) -> Path:
    write_checkpoint(tmp_path / "run", model, model_dir)
    return tmp_path / "run"


def test_the_command_writes_what_from_pretrained_reads(
    run: Path, model: Any, tmp_path: Path, installed: Run
) -> None:
    out = tmp_path / "deep" / "out"
    done = installed("export", str(run), "--to", str(out), "--max-shard-size", "8KB")
    assert done.stderr == ""
    assert "step-00000010 -> " in done.stdout
    assert "no tokenizer files: the model was trained on bytes" in done.stdout
    assert same_logits(out, model)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(model.state_dict())
    assert index["metadata"]["total_parameters"] == model.num_parameters()
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_the_command_refuses_damage_with_code_5(run: Path, tmp_path: Path, shardwise: Run) -> None:
    shard = next(run.glob("checkpoints/*/rank-00001.bin"))
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    done = shardwise("export", run, "--to", tmp_path / "out", expect=5)
    assert "rank-00001.bin: its content has changed (sha256 differs)" in done.stderr
    assert not (tmp_path / "out").exists()


def export_and_die(run: Path, out: Path) -> None:
    """In a process of its own: it is killed where it reads the first tensors."""

    def die(self: Exporter, group: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    Exporter._read = die  # type: ignore[method-assign, assignment]
    run_export(run, out, size="8KB")


def test_a_killed_export_leaves_nothing_under_its_name(
    run: Path, model: Any, tmp_path: Path
) -> None:
    process = forkserver().Process(target=export_and_die, args=(run, tmp_path / "out"))
    process.start()
    process.join(120)
    assert process.exitcode == -9
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".out.partial").exists()
    run_export(run, tmp_path / "out")
    assert same_logits(tmp_path / "out", model)
    assert not (tmp_path / ".out.partial").exists()


def test_a_failed_write_is_told_and_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_target, "sync_handle", full)
    with pytest.raises(UserError, match="cannot write") as caught:
        run_export(run, tmp_path / "out")
    assert caught.value.code == ExitCode.ENVIRONMENT
    assert "No space left" in caught.value.why
    assert {path.name for path in tmp_path.iterdir()} == {"run", "source"}


def test_nothing_is_overwritten(run: Path, model: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    run_export(run, out)  # an empty directory is fine
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    with pytest.raises(UserError, match="not empty"):
        run_export(run, out)
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before


def test_one_torch_file(run: Path, model: Any, tmp_path: Path) -> None:
    done = run_export(run, tmp_path / "out", layout="torch")
    assert done.num_files == 3
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("pytorch_model.bin", "config.json", "generation_config.json")
    }
    assert same_logits(tmp_path / "out", model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_cast(dtype: torch.dtype, run: Path, model: Any, tmp_path: Path) -> None:
    run_export(run, tmp_path / "out", dtype)
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(written[name], tensor.to(dtype)), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == dtype


def test_values_beyond_fp16_are_refused(model: Any, model_dir: Path, tmp_path: Path) -> None:
    with torch.no_grad():
        model.model.norm.weight[3] = 1e6
    write_checkpoint(tmp_path / "run", model, model_dir)
    with pytest.raises(UserError, match=r"model\.norm\.weight does not fit into fp16"):
        run_export(tmp_path / "run", tmp_path / "out", torch.float16)
    assert not (tmp_path / "out").exists()


def test_a_step_can_be_named(run: Path, model_dir: Path, tmp_path: Path) -> None:
    newer = write_checkpoint(run, build_model(seed=1), model_dir, step=20)
    assert find_checkpoint(run) == newer
    assert find_checkpoint(run, 10).name == "step-00000010"
    assert find_checkpoint(newer) == newer
    with pytest.raises(UserError, match="no checkpoint of step 15") as caught:
        find_checkpoint(run, 15)
    assert "steps 10, 20" in caught.value.why
    with pytest.raises(UserError, match="is one checkpoint"):
        find_checkpoint(newer, 10)


def test_a_run_without_checkpoints_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no checkpoint in"):
        find_checkpoint(tmp_path / "nowhere")


def test_damage_of_the_newest_names_the_others(run: Path, model_dir: Path) -> None:
    newest = write_checkpoint(run, build_model(seed=1), model_dir, step=20)
    (newest / "rank-00000.bin").unlink()
    with pytest.raises(UserError, match="is damaged") as caught:
        verify_checkpoint(find_checkpoint(run))
    assert caught.value.code == ExitCode.VERIFY_FAILED
    assert "rank-00000.bin: cannot be read" in caught.value.why
    assert "steps 10" in caught.value.fix


def test_a_size_that_is_none_is_told(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'5 potatoes' is not a file size"):
        run_export(run, tmp_path / "out", size="5 potatoes")


def test_the_models_tokenizer_comes_along(
    run: Path, model: Any, model_dir: Path, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (model_dir / name).write_text(f"of the model: {name}")
    (model_dir / "generation_config.json").write_text('{"temperature": 0.5, "do_sample": true}')
    (note,) = run_export(run, tmp_path / "out").notes
    assert note == f"tokenizer: 3 files from {model_dir}"
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "of the model: tokenizer.json"
    assert (tmp_path / "out" / "chat_template.jinja").exists()
    assert "0.5" in (tmp_path / "out" / "generation_config.json").read_text()


def test_the_datas_tokenizer_wins(model: Any, model_dir: Path, tmp_path: Path) -> None:
    (model_dir / "tokenizer.json").write_text("of the model")
    other = tmp_path / "tokenizer"
    other.mkdir()
    (other / "tokenizer.json").write_text("of the data")
    write_checkpoint(tmp_path / "run", model, model_dir, tokenizer=str(other))
    run_export(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "of the data"


def test_bytes_have_no_tokenizer_files(model: Any, model_dir: Path, tmp_path: Path) -> None:
    (model_dir / "tokenizer.json").write_text("of the model")
    write_checkpoint(tmp_path / "run", model, model_dir, tokenizer="byte")
    (note,) = run_export(tmp_path / "run", tmp_path / "out").notes
    assert "trained on bytes" in note
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_a_writer_holds_one_tensor_at_a_time(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    read = exporter.read_tensor

    def watched(*args: Any) -> Tensor:
        nonlocal most
        tensor = read(*args)
        alive.append(weakref.ref(tensor))
        most = max(most, sum(ref() is not None for ref in alive))
        return tensor

    monkeypatch.setattr(exporter, "read_tensor", watched)
    monkeypatch.setattr(exporter, "_NUM_WRITERS", 1)
    run_export(run, tmp_path / "out")
    assert len(alive) > 10
    assert most <= 2  # the last one is let go when the next has been read
