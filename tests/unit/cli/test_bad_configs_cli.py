from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from bad_configs import BAD_CONFIGS, BadConfig

from commands import run_forked
from shardwise.cli.main import main
from shardwise.facts import probe
from shardwise.units import GIB

SHARDWISE = Path(sys.executable).with_name("shardwise")


class Refused(NamedTuple):
    id: str
    overrides: tuple[str, ...]
    says: tuple[str, ...]
    code: int = 2


REFUSED_PLANS = (
    Refused(
        "mesh product",
        ("cluster.name=8xH100", "mesh.replicate=3", "mesh.shard=2"),
        ("mesh.replicate=3 x mesh.shard=2", "8 ranks", "product"),
    ),
    Refused(
        "half a mesh that does not divide",
        ("cluster.name=8xH100", "mesh.shard=3"),
        ("mesh.replicate=auto x mesh.shard=3 does not give 8 ranks",),
    ),
    Refused(
        "batch over ranks",
        ("cluster.name=8xH100", "train.global_batch=12"),
        (
            "train.global_batch=12 does not divide over 8 ranks",
            "train.global_batch=16, or another multiple of 8",
        ),
    ),
    Refused(
        "batch over micro-batch",
        ("cluster.name=8xH100", "train.global_batch=16", "train.micro_batch=3"),
        ("train.global_batch=16", "micro_batch=3", "8 ranks", "whole micro-batches"),
    ),
    Refused(
        "batch over accumulation",
        ("cluster.name=8xH100", "train.global_batch=16", "train.accumulation=4"),
        ("train.global_batch=16", "accumulation=4", "8 ranks"),
    ),
    Refused(
        "micro x accumulation x ranks",
        (
            "cluster.name=8xH100",
            "train.global_batch=32",
            "train.micro_batch=2",
            "train.accumulation=4",
        ),
        ("train.global_batch=32 is not micro_batch=2 x accumulation=4 x 8 ranks",),
    ),
    Refused(
        "strategy against mesh",
        ("cluster.name=8xH100", "shard.strategy=full_shard", "mesh.replicate=2", "mesh.shard=4"),
        ("shard.strategy=full_shard", "replicate=1 x shard=8", "2 x 4", "hybrid_shard"),
    ),
    Refused(
        "FSDP over two datacenters",
        ("cluster.name=2x8xH100", "cluster.datacenters=2", "mesh.site=1"),
        ("mesh.site is 1", "cluster.datacenters=2", "too slow", "leave mesh.site out: DiLoCo"),
    ),
    Refused(
        "reshard group that does not divide",
        ("cluster.name=8xH100", "shard.strategy=full_shard", "shard.reshard_after_forward=3"),
        ("shard.reshard_after_forward=3 does not divide", "8 ranks"),
    ),
    Refused(
        "reshard group as large as the axis",
        ("cluster.name=8xH100", "shard.strategy=full_shard", "shard.reshard_after_forward=8"),
        ("shard.reshard_after_forward=8 does not divide", "write shard.reshard_after_forward=4"),
    ),
    Refused(
        "pretrained weights of a preset",
        ("model.weights=pretrained",),
        ("model.weights=pretrained", "presets are shapes only", "model.weights=random"),
    ),
    Refused(
        "unknown preset",
        ("model.name=lama-3.1-8b",),
        ("unknown model 'lama-3.1-8b'", "did you mean the preset model.name=llama-3.1-8b"),
    ),
    Refused(
        "unknown override of the model",
        ("model.overrides.num_layer=2",),
        ("model.overrides.num_layer is no field", "fix:"),
    ),
    Refused(
        "heads that keys and values do not divide",
        ("model.overrides.num_attention_heads=3", "model.overrides.num_key_value_heads=2"),
        ("num_attention_heads=3 is not a multiple", "write model.overrides.num_key_value_heads=1"),
    ),
    Refused(
        "heads of an odd size",
        ("model.overrides.head_dim=7",),
        ("transformers cannot build a llama", "even rotary dimension", "model.overrides"),
    ),
    Refused(
        "heads that do not divide the hidden size",
        ("model.overrides.hidden_size=129",),
        ("transformers cannot build a llama", "hidden size (129)", "model.overrides"),
    ),
    Refused(
        "more experts for a token than there are",
        ("model.name=tiny-mixtral", "model.overrides.num_experts_per_tok=99"),
        ("num_experts_per_tok=99, but there are", "write model.overrides.num_experts_per_tok="),
    ),
    Refused(
        "no vocabulary",
        ("model.overrides.vocab_size=0",),
        ("config.json gives vocab_size=0", "model.overrides.vocab_size=NUMBER"),
    ),
    Refused(
        "unknown GPU",
        ("cluster.name=8xH101",),
        ("unknown GPU 'H101'", "did you mean cluster.name=8xH100"),
    ),
    Refused(
        "a node of 64 GPUs",
        ("cluster.name=64xH100",),
        ("64xH100 puts 64 GPUs into one node", "at most 8", "write cluster.name=8x8xH100"),
    ),
    Refused("unreadable cluster", ("cluster.name=many",), ("cannot read the cluster", "8xH100")),
    Refused(
        "domain that does not divide",
        ("cluster.name=8xH100", "cluster.nvlink_domain=3"),
        ("cluster.nvlink_domain=3 does not divide 8",),
    ),
    Refused(
        "float8 on a CPU",
        ("precision.linear=float8",),
        ("precision.linear=float8, but this CPU (", ") does not compute float8", "8.9", "H100"),
    ),
    Refused(
        "float8 on a GPU without it",
        ("precision.linear=float8_rowwise", "cluster.name=8xA100"),
        ("precision.linear=float8_rowwise, but A100-80GB does not compute float8",),
    ),
    Refused(
        "float8 for narrow layers only",
        ("precision.linear=float8", "cluster.name=8xH100"),
        ("changes no layer of tiny-llama", "128 x 384 is below", "precision.float8_min_features"),
    ),
    Refused(
        "405B on one GPU",
        ("model.name=llama-3.1-405b", "cluster.name=1xH100"),
        ("llama-3.1-405b does not fit on 1xH100", "write cluster.name=12x8xH100", "Adam"),
        3,
    ),
)

REFUSED_TRAINING = (
    Refused(
        "float8 on a CPU",
        ("precision.linear=float8",),
        ("this CPU (", ") does not compute float8", "write precision.linear=param"),
    ),
    Refused(
        "GPUs that are not here",
        ("cluster.name=8xH100",),
        ("cluster 8xH100 needs 8 GPUs", "cluster.name=local", "2xCPU"),
        4,
    ),
    Refused(
        "several nodes from one machine",
        ("cluster.name=2x2xCPU",),
        ("cluster 2x2xCPU has 2 nodes", "torchrun --nnodes 2 --nproc-per-node 2"),
        4,
    ),
)


@pytest.fixture(autouse=True)
def _alone_in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def run_cli(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["shardwise", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def assert_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verb: str,
    row: Refused,
) -> None:
    Path("run.yaml").write_text("model: tiny-llama\ncluster: 2xCPU\n")
    code = run_cli(monkeypatch, verb, "run.yaml", *row.overrides)
    said = capsys.readouterr().err
    assert code == row.code
    assert said.count("error:") == 1
    assert "fix:" in said
    for words in row.says:
        assert words in said


@pytest.mark.parametrize("bad", BAD_CONFIGS, ids=lambda bad: bad.id)
def test_bad_config_ends_with_its_reason(
    bad: BadConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.yaml").write_text(bad.text)
    code = run_cli(monkeypatch, "plan", "run.yaml", *bad.overrides)
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    for words in bad.says:
        assert words in captured.err


@pytest.mark.parametrize("bad", BAD_CONFIGS[:: len(BAD_CONFIGS) // 2], ids=lambda bad: bad.id)
def test_bad_config_in_a_process_of_its_own(bad: BadConfig) -> None:
    Path("run.yaml").write_text(bad.text)
    command = [str(SHARDWISE), "plan", "run.yaml", *bad.overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for words in bad.says:
        assert words in done.stderr


@pytest.mark.parametrize("row", REFUSED_PLANS, ids=lambda row: row.id)
def test_impossible_plan_ends_with_its_reason(
    row: Refused, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(monkeypatch, capsys, "plan", row)


@pytest.mark.parametrize("row", REFUSED_TRAINING, ids=lambda row: row.id)
def test_training_on_another_machine_is_refused(
    row: Refused, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(monkeypatch, capsys, "train", row)
    assert not Path("runs").exists()


@pytest.mark.parametrize("verb", ["plan", "train"])
def test_a_plan_that_a_cpu_has_no_memory_for_exits_with_3(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By little: 25.5 GiB of 23.5, with nothing left to recompute."""
    monkeypatch.setattr(probe, "_ram_bytes", lambda: int(23.5 * GIB))
    Path("run.yaml").write_text(
        "model: llama-3.2-1b\ncluster: 1xCPU\ndata: {source: synthetic, seq_len: 24576}\n"
    )
    code = run_cli(monkeypatch, verb, "run.yaml")
    said = capsys.readouterr().err
    assert code == 3
    assert "llama-3.2-1b does not fit on 1xCPU" in said
    assert "25.5 GiB are needed on a rank that has 23.5 GiB" in said
    assert "fix: write data.seq_len=4096" in said
    assert not Path("runs").exists()


@pytest.mark.parametrize(("verb", "how"), [("train", ()), ("tunnel", ("--device", "fake"))])
def test_float8_without_torchao_is_refused(
    verb: str,
    how: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    Path("run.yaml").write_text(
        "model: tiny-llama\ndata: synthetic\ncluster: 2xH200\n"
        "precision: {linear: float8, float8_min_features: 16}\n"
    )
    assert run_cli(monkeypatch, verb, "run.yaml", *how) == 4
    said = capsys.readouterr().err
    assert "precision.linear=float8 needs torchao, which is not installed" in said
    assert "pip install 'shardwise[float8]'" in said
    assert not Path("runs").exists()


def test_missing_file_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(monkeypatch, "plan", "nowhere.yaml") == 2
    assert "nowhere.yaml" in capsys.readouterr().err


def test_cluster_option_is_checked_like_the_field(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.yaml").write_text("model: tiny-llama\n")
    assert run_cli(monkeypatch, "plan", "run.yaml", "--cluster", "8xH101") == 2
    assert "unknown GPU 'H101'" in capsys.readouterr().err


def test_tokenizer_larger_than_the_model_fails_as_a_config_error(tmp_path: Path) -> None:
    Path("text.txt").write_text("some words " * 200)
    Path("run.yaml").write_text(
        "model: {name: tiny-llama, overrides: {vocab_size: 200}}\n"
        "data: {source: text, path: text.txt, seq_len: 32}\n"
        "cluster: 1xCPU\ntrain: {steps: 1}\n"
    )
    done = run_forked(tmp_path, "train", "run.yaml", expect=2)
    assert "tokenizer byte has 257 tokens, the model only 200" in done.stderr
    assert "model.overrides.vocab_size=257" in done.stderr
