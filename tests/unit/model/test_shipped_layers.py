"""Which weights of a model stay as its files have them."""

from __future__ import annotations

import pytest
import torch

from quantised_models import SHAPES
from shardwise.errors import UserError
from shardwise.model.build import build_on_meta
from shardwise.model.packed import floats_shape, pack_weight
from shardwise.model.quantised import apply_base, count_packed, find_quantised

STACKS = ("gate_up_proj", "down_proj")


def test_experts_alone_are_in_mxfp4() -> None:
    model = build_on_meta(SHAPES["gpt_oss"], attention="eager")
    found = find_quantised(model, "mxfp4", ("model.layers.*.self_attn", "lm_head"))
    experts = [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    assert not found.layers and list(found.experts) == experts
    shapes = {name: tuple(weight.shape) for name, weight in found.weights().items()}
    apply_base(model, "mxfp4", multiplies=False)
    for name, shape in shapes.items():
        packed = model.get_parameter(name)
        assert packed.dtype == torch.int32 and packed.shape[:2] == (shape[0], shape[2])
        assert floats_shape(packed) == shape


@pytest.mark.parametrize(
    ("unpacked", "left"),
    [
        ((), 0),
        (("model.layers.1",), 1 + 5 + 3),
        (("model.layers.*.self_attn",), 2 * 5),
        (("q_a_proj", "mlp.experts"), 2 + 1),
        (("model.layers.1.self_attn.o_pro",), 0),
    ],
)
def test_modules_that_config_json_leaves_out_stay_floats(
    unpacked: tuple[str, ...], left: int
) -> None:
    model = build_on_meta(SHAPES["deepseek_v3"])
    everything = find_quantised(model, "fp8")
    found = find_quantised(model, "fp8", unpacked)
    before = len(everything.layers) + len(everything.experts)
    assert before - len(found.layers) - len(found.experts) == left


def test_bytes_are_counted_with_their_scales() -> None:
    model = build_on_meta(SHAPES["deepseek_v3"])
    counted = count_packed(model, "fp8", ("lm_head",))
    apply_base(model, "fp8", multiplies=False)
    packed = [param for param in model.parameters() if param.dtype == torch.int64]
    assert counted["packed_bytes"] == sum(param.nbytes for param in packed)
    assert counted["packed_tensors"] == len(packed)
    assert counted["unpacked"] == ("lm_head",)


def test_real_weights_are_packed_in_the_order_of_rows() -> None:
    weight = torch.nn.Parameter(torch.arange(3 * 32 * 5.0).view(3, 32, 5))
    packed = pack_weight(weight, torch.int32)
    assert packed.shape == (3, 5, 8)
    assert floats_shape(packed) == (3, 32, 5)


def test_experts_that_lie_otherwise_are_not_in_mxfp4() -> None:
    with pytest.raises(UserError, match="cannot store the experts") as raised:
        find_quantised(build_on_meta(SHAPES["deepseek_v3"]), "mxfp4")
    assert "as gpt-oss's" in str(raised.value.why)
