"""The sizes of a decoder as config.json names them."""

from __future__ import annotations


def shape_of(
    hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, num_kv_heads: int
) -> dict[str, int]:
    """The five sizes that presets of one family differ in."""
    return {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
    }
