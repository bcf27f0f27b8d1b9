from dataclasses import replace

import pytest

from shardwise.facts.counted import preset_spec
from shardwise.facts.families import spec_from_config
from shardwise.facts.flops import flops_per_token, recompute_flops_per_token
from shardwise.facts.models import ModelSpec
from shardwise.facts.presets import PRESETS


def preset(name: str) -> ModelSpec:
    return spec_from_config(name, PRESETS[name])


def test_the_declared_formula() -> None:
    spec = preset("llama-3.1-8b")
    weights = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336) + 128256 * 4096
    assert spec.matmul_params_per_token == weights == 7_504_658_432
    assert flops_per_token(spec, 8192) == 6 * weights + 6 * 32 * 4096 * 8192


def test_a_tied_head_still_multiplies() -> None:
    spec = preset("llama-3.2-1b")
    assert spec.matmul_params_per_token == spec.total_params - (2 * 16 + 1) * 2048


def test_only_the_experts_of_a_token_count() -> None:
    spec = preset("mixtral-8x7b")
    assert spec.matmul_params_per_token / 1e9 == pytest.approx(12.75, abs=0.01)
    everyone = replace(spec, matmul_params_per_token=spec.total_params)
    assert flops_per_token(spec, 4096) < flops_per_token(everyone, 4096) / 3


def test_recompute_is_the_blocks_forward() -> None:
    spec = preset("llama-3.1-8b")
    blocks = spec.matmul_params_per_token - 128256 * 4096
    assert recompute_flops_per_token(spec, 2048, 1.0) == 2 * blocks + 2 * 32 * 4096 * 2048
    assert recompute_flops_per_token(spec, 2048, 0.5) == blocks + 32 * 4096 * 2048
    assert recompute_flops_per_token(spec, 2048, 0.0) == 0


def test_a_window_shortens_attention() -> None:
    spec = preset("mistral-7b")
    full = replace(spec, attention_window=None)
    assert spec.attention_window == 4096
    assert flops_per_token(spec, 4096) == flops_per_token(full, 4096)
    saved = flops_per_token(full, 8192) - flops_per_token(spec, 8192)
    assert saved == 12 * 32 * 4096 * (4096 - 3072)


def test_each_block_has_its_own_window() -> None:
    """Five of six blocks of Gemma 3 see 1024 tokens."""
    spec = preset_spec("gemma-3-12b")
    attention = flops_per_token(spec, 8192) - 6 * spec.matmul_params_per_token
    near, far = 1024 - 1024**2 / (2 * 8192), 8192 / 2
    assert attention == 12 * 16 * 256 * (40 * near + 8 * far)


def test_keys_and_values_of_latent_attention_have_their_own_widths() -> None:
    spec = preset_spec("deepseek-v3")
    attention = flops_per_token(spec, 4096) - 6 * spec.matmul_params_per_token
    assert attention == 3 * 61 * 128 * 4096 * (192 + 128)
    recomputed = recompute_flops_per_token(spec, 4096, 1.0)
    assert recomputed == 2 * spec.block_matmul_params_per_token + attention / 3
