"""Made chat templates in the manner of known ones, and what each writes for an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]", "<think>", "</think>"),
)

CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>' + call | tojson + '</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA = """\
{{- '<|begin_of_text|>' }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

GEMMA = """\
{{- '<s>' }}
{%- for message in messages %}
{%- if message.role not in ('user', 'assistant') %}
{{- raise_exception('only user and model') }}{% endif %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate user/model') }}{% endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' }}
{{- message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

MISTRAL = """\
{{- '<s>' }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}
{%- elif message.role == 'assistant' %}{{ ' ' + message.content + '</s>' }}
{%- else %}{{ raise_exception('only user and assistant') }}{% endif %}
{%- endfor %}"""

# Reasoning is kept in every turn, and answers are marked for transformers' own mask.
MARKED = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}
{%- if message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>' + call | tojson + '</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# The reasoning of all turns but the last is dropped.
MARKED_FORGETFUL = MARKED.replace(
    "{%- if message.reasoning_content %}", "{%- if loop.last and message.reasoning_content %}"
)
# The same two without marks.
PLAIN, FORGETFUL = (
    source.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    for source in (MARKED, MARKED_FORGETFUL)
)
# What opens an answer promises reasoning, which an answer need not have.
OPEN_THINKING = CHATML.replace(
    "'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n<think>' }}"
)

CALL: dict[str, Any] = {"name": "look", "arguments": {"at": "sky"}}
CALLED = '\n<tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call>'


def _thought(message: dict[str, Any]) -> str:
    text = message.get("reasoning_content")
    return f"<think>\n{text}\n</think>\n\n" if text else ""


def _called(message: dict[str, Any]) -> str:
    return CALLED * len(message.get("tool_calls", ()))


@dataclass(frozen=True)
class Made:
    """A template, what a model must produce for an answer, and what the template takes."""

    source: str
    answer: Callable[[dict[str, Any]], str]
    strict: bool = False  # user and assistant by turns, nothing else


MADE = {
    "chatml": Made(CHATML, lambda m: m["content"] + _called(m) + "<|im_end|>\n"),
    "llama": Made(LLAMA, lambda m: m["content"].strip() + "<|eot_id|>"),
    "gemma": Made(GEMMA, lambda m: m["content"].strip() + "<end_of_turn>\n", strict=True),
    "mistral": Made(MISTRAL, lambda m: " " + m["content"] + "</s>", strict=True),
    "plain": Made(PLAIN, lambda m: _thought(m) + m["content"] + _called(m) + "<|im_end|>\n"),
    "marked": Made(MARKED, lambda m: _thought(m) + m["content"] + _called(m) + "<|im_end|>\n"),
}


def make_backend(template: str | None = None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with a few merges. Its tokens spell every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user assistant system tool model hello world " * 4], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", clean_up_tokenization_spaces=False
    )
    fast.chat_template = template
    return fast
