"""Families of AutoModelForCausalLM that are refused, and the reason that is given."""

from __future__ import annotations

# Of a config.json that names the family alone, transformers itself builds no model.
NOT_BUILT: dict[str, str] = {
    "gemma3n": "its vision tower needs timm, or it has towers besides the text",
    "gemma4_assistant": "its default sizes contradict each other",
    "musicgen": "AutoModelForCausalLM takes its decoder's configuration, not this one",
    "musicgen_melody": "AutoModelForCausalLM takes its decoder's configuration, not this one",
}
# Tiny ones are built, and do not learn to predict text from tokens alone; this is said.
NOT_TRAINED: dict[str, str] = {
    "cpmant": "its attention is not causal",
    "emu3": "could not load what they are saved as",
    "gemma4_unified_assistant": "its forward gives no logits for tokens alone",
    "mllama": "could not load what they are saved as",
    "reformer": "its reversible layers compute gradients past FSDP2's hooks",
    "xlm": "its attention is not causal",
    "xlnet": "its attention is not causal",
}
