from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardwise.errors import UserError
from shardwise.facts.presets import PRESETS
from shardwise.model.blocks import find_units
from shardwise.model.boxes import Box
from shardwise.model.build import build_on_meta
from shardwise.model.pretrained import load_pretrained
from shardwise.model.weights import (
    allocate_shards,
    copy_shard,
    initialise_buffers,
    initialise_weights,
    local_box,
    shard_box,
)

CPU = torch.device("cpu")
TINY = ("tiny-llama", "tiny-qwen", "tiny-gpt2", "tiny-mixtral")
LLAMA_3_ROPE = dict(PRESETS["llama-3.1-8b"]["rope_scaling"])  # transformers writes into it


def initialised(
    preset: str, *, seed: int = 0, reverse_units: bool = False, **changes: Any
) -> PreTrainedModel:
    hf_config = PRESETS[preset] | changes
    model = build_on_meta(hf_config)
    units = find_units(model)
    if reverse_units:
        units = replace(units, units=units.units[::-1])
    allocate_shards(model, CPU, buffers_on=CPU)
    model.tie_weights()  # FSDP2 keeps ties by itself; a model that is not sharded loses them
    for param in model.parameters():
        param.data.fill_(float("nan"))
    initialise_weights(model, build_on_meta(hf_config), units, seed=seed, device=CPU)
    return model


def tensors_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def assert_same(left: PreTrainedModel, right: PreTrainedModel) -> None:
    first, second = tensors_of(left), tensors_of(right)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("preset", TINY)
def test_first_weights_have_the_familys_spread(preset: str) -> None:
    model = initialised(preset)
    theirs = {}
    if preset == "tiny-gpt2":  # its output projections are smaller, but not in every transformers
        torch.manual_seed(0)
        config = type(AutoConfig.for_model("gpt2")).from_dict(dict(PRESETS[preset]))
        theirs = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    for name, param in model.named_parameters():
        values = param.detach()
        assert torch.isfinite(values).all(), name
        if "norm" in name or ".ln_" in name:
            assert torch.equal(values, torch.full_like(values, float(name.endswith("weight"))))
        elif name.endswith("bias"):
            assert not values.any(), name
        else:
            usual = theirs[name].std().item() if name.endswith("c_proj.weight") else 0.02
            assert values.std().item() == pytest.approx(usual, rel=0.1), name
            assert abs(values.mean().item()) < 5 * usual / values.numel() ** 0.5, name


@pytest.mark.parametrize("preset", TINY)
def test_the_seed_decides_the_weights(preset: str) -> None:
    first = initialised(preset, seed=1)
    torch.manual_seed(123)  # the caller's generator has no say
    assert_same(first, initialised(preset, seed=1))
    other = initialised(preset, seed=2)
    head = first.get_output_embeddings().weight
    assert not torch.equal(head, other.get_output_embeddings().weight)


def test_initialising_leaves_the_callers_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    initialised("tiny-llama")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("preset", TINY)
def test_the_order_of_units_does_not_matter(preset: str) -> None:
    assert_same(initialised(preset), initialised(preset, reverse_units=True))


def test_blocks_differ_from_each_other() -> None:
    layers = initialised("tiny-llama").model.layers
    assert not torch.equal(layers[0].mlp.up_proj.weight, layers[1].mlp.up_proj.weight)


@pytest.mark.parametrize("preset", ["tiny-qwen", "tiny-gpt2"])
def test_tied_weights_stay_tied(preset: str) -> None:
    model = initialised(preset)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("tiny-llama", {}),
        ("tiny-llama", {"rope_scaling": LLAMA_3_ROPE, "max_position_embeddings": 16384}),
        ("tiny-qwen", {}),
        ("tiny-gpt2", {}),
    ],
)
def test_buffers_equal_transformers_own(preset: str, changes: dict[str, Any]) -> None:
    hf_config = PRESETS[preset] | changes
    config = type(AutoConfig.for_model(hf_config["model_type"])).from_dict(dict(hf_config))
    theirs = dict(AutoModelForCausalLM.from_config(config).named_buffers())
    ours = dict(initialised(preset, **changes).named_buffers())
    assert ours.keys() == theirs.keys()
    for name, buffer in theirs.items():
        assert torch.equal(ours[name], buffer), name


def test_saved_weights_are_read_back(tmp_path: Path) -> None:
    saved = initialised("tiny-qwen", seed=3)
    saved.save_pretrained(tmp_path)
    model = initialised("tiny-qwen", seed=4)
    num_bytes = load_pretrained(model, tmp_path)
    assert_same(model, saved)
    assert num_bytes == 4 * sum(param.numel() for param in saved.parameters())


def test_missing_weights_are_named(tmp_path: Path) -> None:
    model = initialised("tiny-llama")
    with pytest.raises(UserError, match="no weights in"):
        load_pretrained(model, tmp_path)
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="tensors of the model are not in") as caught:
        load_pretrained(model, tmp_path)
    assert "model.embed_tokens.weight" in caught.value.why


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    initialised("tiny-llama").save_pretrained(tmp_path)
    model = initialised("tiny-llama", hidden_size=64)
    with pytest.raises(UserError, match="has shape"):
        load_pretrained(model, tmp_path)


@dataclass
class FakeMesh:
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]

    def size(self, axis: int) -> int:
        return self.sizes[axis]

    def get_local_rank(self, axis: int) -> int:
        return self.ranks[axis]


@dataclass
class FakeShard:
    """What `shard_box` asks of a DTensor."""

    shape: tuple[int, ...]
    placements: tuple[Any, ...]
    device_mesh: FakeMesh

    def dim(self) -> int:
        return len(self.shape)


def box_of(shape: tuple[int, ...], placements: tuple[Any, ...], mesh: FakeMesh) -> Box:
    return shard_box(cast(DTensor, FakeShard(shape, placements, mesh)))


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("length", [1, 2, 5, 7, 8, 13, 320])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_boxes_are_torchs_chunks(length: int, ranks: int, dim: int) -> None:
    shape = [3, 4, 5]
    shape[dim] = length
    whole = torch.arange(math.prod(shape)).view(shape)
    chunks = whole.chunk(ranks, dim)
    for rank in range(ranks):
        box = box_of(tuple(shape), (Shard(dim),), FakeMesh((ranks,), (rank,)))
        expected = chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)
        assert torch.equal(whole[box.slices], expected)


def test_replicas_keep_the_same_box() -> None:
    for replica in range(2):
        mesh = FakeMesh((2, 4), (replica, 3))
        assert box_of((10, 2), (Replicate(), Shard(0)), mesh) == Box((9, 0), (1, 2))
        assert box_of((2, 8), (Replicate(), Shard(1)), mesh) == Box((0, 6), (2, 2))


def test_boxes_of_two_sharded_axes_are_nested() -> None:
    found = [
        box_of((8,), (Shard(0), Shard(0)), FakeMesh((2, 2), (outer, inner)))
        for outer in range(2)
        for inner in range(2)
    ]
    assert found == [Box((start,), (2,)) for start in (0, 2, 4, 6)]


def test_a_placement_whose_parts_lie_elsewhere_is_refused_by_name() -> None:
    """FSDP2 over tensor parallel: taken for a replica, each rank would keep the whole tensor."""
    strided = _StridedShard(0, split_factor=2)
    with pytest.raises(NotImplementedError, match="where the parts of _StridedShard"):
        box_of((8, 4), (strided, Shard(0)), FakeMesh((2, 2), (0, 1)))


def test_the_box_of_a_plain_tensor_is_all_of_it() -> None:
    assert local_box(torch.zeros(3, 2)) == Box((0, 0), (3, 2))
    assert local_box(torch.zeros(())) == Box((), ())


def test_copy_shard_fills_a_plain_tensor() -> None:
    target = torch.nn.Parameter(torch.zeros(3, 2))
    copy_shard(target, torch.arange(6.0).reshape(3, 2))
    assert target.detach().flatten().tolist() == [0, 1, 2, 3, 4, 5]


FALCON_H1 = {
    "model_type": "falcon_h1",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "ssm_multipliers": [0.5, 0.25, 2.0, 3.0, 0.125],
}


def test_a_buffer_is_filled_from_the_module_that_knows_it() -> None:
    """Falcon-H1's model fills vectors that its layers hold."""
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**FALCON_H1))
    model, twin = build_on_meta(FALCON_H1), build_on_meta(FALCON_H1)
    model.to_empty(device="cpu")
    initialise_buffers(model, twin, CPU)
    ours = dict(model.named_buffers())
    name = "model.layers.1.mamba.mup_vector"
    assert ours[name].unique().numel() == 5
    assert all(torch.equal(ours[name], buffer) for name, buffer in theirs.named_buffers())
    initialise_weights(model, twin, find_units(twin), seed=0, device=CPU)
    assert torch.equal(model.get_buffer(name), theirs.get_buffer(name))
