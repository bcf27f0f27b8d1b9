"""Adapters leave as PEFT's and come back from PEFT, and merge into the weights under them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from quantised_models import save_both
from shardwise.checkpoint.read import find_checkpoint, verify_checkpoint
from shardwise.errors import UserError
from shardwise.generate.adapted import load_adapted

Run = Callable[..., subprocess.CompletedProcess[str]]
Ask = Callable[..., None]
pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
# Beside the other packages, as `make setup` puts it.
PEFT = ROOT / ".venv" / "peft"
SIDE = Path(__file__).with_name("peft_side.py")
CONFIG = """\
model: MODEL
adapter: {method: lora, rank: 4, alpha: 8, rslora: true}
data: {source: synthetic, seq_len: 32}
cluster: 2xCPU
shard: {strategy: full_shard}
optim: {lr: 1e-2}
train: {steps: 2, global_batch: 4}
"""
# For runs whose adapters need not come from several ranks.
ALONE = "cluster.name=1xCPU"
IDS = torch.arange(24)[None] * 7 % 131

needs_peft = pytest.mark.skipif(
    not PEFT.is_dir(), reason="PEFT is not in .venv/peft: `make setup` puts it there"
)


@pytest.fixture(scope="module")
def ask_peft() -> Iterator[Callable[..., None]]:
    """`ask_peft(verb, ...)`: one process with PEFT answers all questions."""
    environment = {**os.environ, "PYTHONPATH": str(PEFT)}
    command = [sys.executable, str(SIDE)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as side:
        assert side.stdin is not None and side.stdout is not None
        ask, answers = side.stdin, side.stdout

        def run(*words: str) -> None:
            ask.write(json.dumps(words) + "\n")
            ask.flush()
            assert answers.readline() == "done\n"

        yield run
        ask.close()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in two files and two dtypes, as releases have them."""
    home = tmp_path_factory.mktemp("exported")
    tiny = make_tiny()
    tiny.save_pretrained(home / "base", max_shard_size="60KB")
    assert len(list((home / "base").glob("*.safetensors"))) > 1
    (home / "run.yaml").write_text(CONFIG.replace("MODEL", str(home / "base")))
    return home


def make_tiny(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **changes)).to(torch.bfloat16)
    if not changes.get("tie_word_embeddings"):
        model.lm_head.to(torch.float32)
    return model


def train(shardwise: Run, home: Path, name: str, *words: str, **how: Any) -> Any:
    place = (f"runs_dir={home}", f"name={name}")
    return shardwise("train", str(home / "run.yaml"), *place, *words, **how)


@pytest.fixture(scope="module")
def trained(home: Path, shardwise: Run) -> Path:
    train(shardwise, home, "trained")
    return home / "trained"


@pytest.fixture(scope="module")
def exported(home: Path, trained: Path, shardwise: Run) -> Path:
    said = shardwise("export", str(trained), "--to", str(home / "adapter"))
    assert "for PeftModel.from_pretrained" in said.stdout
    return home / "adapter"


@pytest.fixture(scope="module")
def seen_by_peft(home: Path, exported: Path, ask_peft: Ask) -> dict[str, torch.Tensor]:
    ask_peft("logits", str(home / "base"), str(exported), str(home / "seen.safetensors"))
    return load_file(home / "seen.safetensors")


def logits_of(place: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=IDS).logits
    return logits


def unmerged_logits(run: Path, base: Path | None = None) -> torch.Tensor:
    """As `shardwise generate` computes them."""
    checkpoint = verify_checkpoint(find_checkpoint(run))
    cpu = torch.device("cpu")
    model: Any = load_adapted(checkpoint, torch.float32, cpu, base=base, code_dir=None).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=IDS).logits
    return logits


def adapted_logits(base: Path, adapter: Path) -> torch.Tensor:
    """By hand: the sum of each weight and its adapter, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in tensors if name.endswith("lora_A.weight")]:
        layer = model.get_submodule(
            name.removeprefix("base_model.model.")[: -len(".lora_A.weight")]
        )
        product = tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
        assert product.abs().max() > 0
        layer.weight.data += 8 / 4**0.5 * product
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=IDS).logits
    return logits


@needs_peft
def test_peft_loads_what_was_trained(
    home: Path, exported: Path, seen_by_peft: dict[str, torch.Tensor]
) -> None:
    expected = adapted_logits(home / "base", exported)
    assert torch.allclose(seen_by_peft["logits"], expected, atol=1e-5)
    assert not torch.allclose(logits_of(home / "base"), expected, atol=1e-3)


def test_merged_weights_compute_the_same(
    home: Path, trained: Path, exported: Path, shardwise: Run
) -> None:
    said = shardwise("export", str(trained), "--to", str(home / "merged"), "--merge")
    assert "14 adapters merged" in said.stdout
    before, after = (weights_of(home / place) for place in ("base", "merged"))
    assert {name: t.dtype for name, t in after.items()} == {n: t.dtype for n, t in before.items()}
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert len(changed) == 14 and all("proj" in name for name in changed)
    # The sum is rounded to bf16 once.
    expected = adapted_logits(home / "base", exported)
    assert torch.allclose(logits_of(home / "merged"), expected, atol=2e-2)
    wide = home / "wide"
    shardwise("export", str(trained), "--to", str(wide), "--merge", "--dtype", "fp32")
    assert torch.allclose(logits_of(wide), expected, atol=1e-5)


def test_a_checkpoint_computes_the_same_unmerged(home: Path, trained: Path, exported: Path) -> None:
    moved = Path(shutil.copytree(home / "base", home / "moved"))
    for base in (None, moved):
        logits = unmerged_logits(trained, base)
        assert torch.allclose(logits, adapted_logits(home / "base", exported), atol=1e-5)
    with pytest.raises(UserError, match="does not hold the weights that the adapters were"):
        unmerged_logits(trained, _with_one_more(home, "other"))


def make_mixture(family: str, place: Path) -> None:
    """A model with stacked experts: Qwen3's files have a tensor for each expert, and gpt-oss's hold
    stacks whose matrices lie as (in, out)."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    sizes = {"hidden_size": 32, "vocab_size": 300, "head_dim": 8, "num_experts_per_tok": 2}
    own: dict[str, dict[str, Any]] = {
        "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 4, "tie_word_embeddings": True},
        "gpt_oss": {"intermediate_size": 24, "num_local_experts": 4},
    }
    config = AutoConfig.for_model(family, **heads, **sizes, **own[family])
    AutoModelForCausalLM.from_config(config).save_pretrained(place)


@needs_peft
@pytest.mark.parametrize(
    ("family", "num_changed"),
    [("qwen3_moe", 2 + 2 * 4 * 3), pytest.param("gpt_oss", 6, marks=pytest.mark.long)],
)
def test_adapters_of_experts_leave_and_merge(
    home: Path, shardwise: Run, ask_peft: Ask, family: str, num_changed: int
) -> None:
    base, adapter, mixed = (home / f"{family}-{what}" for what in ("base", "adapter", "mixed"))
    make_mixture(family, base)
    words = ("adapter.rank=8", "adapter.targets=[q_proj, experts.*]", ALONE)
    train(shardwise, home, family, f"model.name={base}", *words)
    shardwise("export", str(home / family), "--to", str(adapter))
    shardwise("export", str(home / family), "--to", str(mixed), "--merge")
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert all(tensor.abs().max() > 0 for tensor in tensors.values())
    seen = home / f"{family}.safetensors"
    ask_peft("logits", str(base), str(adapter), str(seen))
    logits = load_file(seen)["logits"]
    assert torch.allclose(logits_of(mixed), logits, atol=1e-5)
    assert not torch.allclose(logits_of(base), logits, atol=1e-4)
    before = weights_of(base)
    changed = [n for n, tensor in weights_of(mixed).items() if not torch.equal(tensor, before[n])]
    assert len(changed) == num_changed


@needs_peft
@pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("gpt_oss", marks=pytest.mark.long)])
def test_adapters_over_published_bytes_leave_and_come_back(
    home: Path, shardwise: Run, ask_peft: Ask, family: str
) -> None:
    """PEFT adapts the floats of these bytes. DeepSeek has dense layers beside its experts."""
    base, plain, left = (home / f"{family}-{what}" for what in ("shipped", "floats", "left"))
    save_both(family, base, plain)
    words = (f"model.name={base}", "adapter.rank=8", "adapter.targets=[all-linear,experts.*]")
    train(shardwise, home, f"{family}-bytes", *words, ALONE, "adapter.dropout=0.1")
    shardwise("export", str(home / f"{family}-bytes"), "--to", str(left))
    ask_peft("logits", str(plain), str(left), str(home / f"{family}-seen"))
    logits = load_file(home / f"{family}-seen")["logits"]
    assert torch.allclose(unmerged_logits(home / f"{family}-bytes"), logits, atol=1e-5)
    still = ("optim.lr=1e-30", "train.steps=1", f"adapter.weights_from={left}")
    train(shardwise, home, f"{family}-begun", *words, ALONE, *still)
    shardwise("export", str(home / f"{family}-begun"), "--to", str(home / f"{family}-again"))
    before, after = (weights_of(home / f"{family}-{place}") for place in ("left", "again"))
    assert before.keys() == after.keys() and all(t.any() for t in before.values())
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@needs_peft
@pytest.mark.long
def test_rows_of_dora_leave_and_merge(home: Path, shardwise: Run, ask_peft: Ask) -> None:
    words = ("adapter.dora=true", "adapter.targets=[q_proj,down_proj]", ALONE)
    train(shardwise, home, "dora", *words)
    shardwise("export", str(home / "dora"), "--to", str(home / "of-dora"))
    words = ("--to", str(home / "dora-merged"), "--merge", "--dtype", "fp32")
    shardwise("export", str(home / "dora"), *words)
    seen = home / "dora.safetensors"
    ask_peft("logits", str(home / "base"), str(home / "of-dora"), str(seen))
    assert torch.allclose(logits_of(home / "dora-merged"), load_file(seen)["logits"], atol=1e-5)


@needs_peft
@pytest.mark.long
@pytest.mark.parametrize("tied", [False, True])
def test_modules_that_are_trained_whole_leave_and_merge(
    home: Path, shardwise: Run, ask_peft: Ask, tied: bool
) -> None:
    """The tied table also gets rows for new tokens."""
    name, head = f"whole-{tied}", "model.embed_tokens.weight" if tied else "lm_head.weight"
    make_tiny(tie_word_embeddings=tied).save_pretrained(home / f"base-{name}")
    words = [f"model.name={home / f'base-{name}'}", "adapter.modules_to_save=[lm_head,model.norm]"]
    words += ["model.overrides.vocab_size=308"] * tied
    said = train(shardwise, home, name, *words, "train.stop_after=1")
    assert tied == ("has 8 new rows, which begin with the mean of the others" in said.stdout)
    train(shardwise, home, name, *words)
    shardwise("export", str(home / name), "--to", str(home / f"of-{name}"))
    merged = ("--to", str(home / f"merged-{name}"), "--merge", "--dtype", "fp32")
    shardwise("export", str(home / name), *merged)
    tensors = load_file(home / f"of-{name}" / "adapter_model.safetensors")
    own = {key.removeprefix("base_model.model.") for key in tensors if "lora_" not in key}
    assert own == {"lm_head.weight", "model.norm.weight", head}
    before, after = (weights_of(home / f"{place}-{name}") for place in ("base", "merged"))
    changed = {key for key in after if not torch.equal(after[key], before[key].float())}
    assert changed == {key for key in after if "proj" in key} | {head, "model.norm.weight"}
    assert len(after[head]) == (308 if tied else 300)
    seen = home / f"{name}.safetensors"
    ask_peft("logits", str(home / f"base-{name}"), str(home / f"of-{name}"), str(seen))
    logits = load_file(seen)["logits"]
    assert torch.allclose(logits_of(home / f"merged-{name}"), logits, atol=1e-5)
    assert torch.allclose(unmerged_logits(home / name), logits, atol=1e-5)


def test_new_rows_that_would_stay_frozen_are_refused(home: Path, shardwise: Run) -> None:
    words = ("model.overrides.vocab_size=308", "adapter.modules_to_save=[lm_head]")
    said = train(shardwise, home, "frozen", *words, expect=2)
    assert "model.embed_tokens.weight has 8 more rows than its file" in said.stderr


def weights_of(place: Path) -> dict[str, torch.Tensor]:
    files = sorted(place.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@needs_peft
def test_adapters_of_peft_come_back_unchanged(home: Path, shardwise: Run, ask_peft: Ask) -> None:
    made = home / "made"
    ask_peft("make", str(home / "base"), str(made), "lm_head", "embed_tokens")
    still = ("adapter.modules_to_save=[embed_tokens,lm_head]",)
    still += ("optim.lr=1e-30", "train.steps=1", "adapter.rslora=false")
    train(shardwise, home, "begun", *still, ALONE, f"adapter.weights_from={made}")
    shardwise("export", str(home / "begun"), "--to", str(home / "again"))
    theirs, ours = (load_file(p / "adapter_model.safetensors") for p in (made, home / "again"))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"r": 8}, "write adapter.rank=8"),
        ({"use_dora": True}, "write adapter.dora=true"),
        ({"bias": "all"}, "have bias='all', which is not supported yet"),
        ({"init_lora_weights": "pissa"}, "have init_lora_weights='pissa'"),
        ({"use_newer": 1}, "have use_newer=1, which is not supported yet"),
        ({"lora_alpha": 16, "use_rslora": False}, "adapter.alpha=16 adapter.rslora=false"),
    ],
)
def test_other_adapters_are_refused(
    home: Path, exported: Path, shardwise: Run, change: dict[str, Any], shown: str
) -> None:
    other = Path(shutil.copytree(exported, home / f"other-{next(iter(change))}"))
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**config, **change}))
    said = train(shardwise, home, "refused", f"adapter.weights_from={other}", expect=2)
    assert shown in " ".join(said.stderr.split())


def test_other_weights_are_not_merged_into(home: Path, trained: Path, shardwise: Run) -> None:
    other = _with_one_more(home, "changed")
    words = ("--to", str(home / "wrong"), "--merge", "--base", str(other))
    said = shardwise("export", str(trained), *words, expect=5)
    assert "does not hold the weights that the adapters were trained over" in said.stderr
    assert not (home / "wrong").exists()


def _with_one_more(home: Path, name: str) -> Path:
    """The same model with other values in one tensor."""
    other = Path(shutil.copytree(home / "base", home / name))
    file = sorted(other.glob("*.safetensors"))[0]
    tensors = load_file(file)
    next(iter(tensors.values())).add_(1)
    save_file(tensors, file, {"format": "pt"})
    return other
