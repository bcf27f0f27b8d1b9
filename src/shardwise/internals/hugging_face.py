"""What classes of transformers say about themselves by attributes with a leading underscore, and
one function that looks for packed sequences.

`from_pretrained`, `from_config` and `generate` read the same attributes. A user's own class
may have none of them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from shardwise.internals.parts import POSITIONS, Changed, is_open


def declared_blocks(model: nn.Module) -> set[str]:
    """Classes that must stay on one device as a whole: the decoder's block, as a rule."""
    return set(getattr(model, "_no_split_modules", None) or ())


def may_be_absent(model: nn.Module) -> Sequence[str]:
    """Patterns of names that the family's files need not have."""
    return getattr(model, "_keys_to_ignore_on_load_missing", None) or ()


def may_stay_unread(model: nn.Module) -> Sequence[str]:
    """Patterns of names in files that the family does not miss, such as layers of another head."""
    return getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()


def supported_attentions(model: Any) -> dict[str, bool]:
    """The attentions that the class says it has; `registered`: any that is registered by name."""
    return {
        "sdpa": model._supports_sdpa,
        "flash": model._supports_flash_attn,
        "flex": model._supports_flex_attn,
        "registered": model._supports_attention_backend,
    }


def router_outputs(model: nn.Module) -> list[Any]:
    """What a class says about the modules that return router logits."""
    specs = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits", [])
    return specs if isinstance(specs, list) else [specs]


@contextmanager
def eager_code(model: nn.Module) -> Iterator[None]:
    """Inside, attention and experts run the code that their family spells out, where the class
    lets one choose.

    `set_attn_implementation` has no public counterpart that tells what was set before.
    """
    inner: list[Any] = [
        part for part in model.modules() if hasattr(part, "set_attn_implementation")
    ]
    # A model comes before those inside it, and setting an outer configuration sets the inner ones.
    before = [
        (part.config, part.config._attn_implementation, part.config._experts_implementation)
        for part in inner
    ]
    for part in inner[:1]:
        if part._can_set_attn_implementation():
            part.set_attn_implementation("eager")
        if part._can_set_experts_implementation():
            part.set_experts_implementation("eager")
    try:
        yield
    finally:
        for config, attention, experts in before:
            config._attn_implementation, config._experts_implementation = attention, experts


def spelled_out_attention(module: nn.Module) -> Callable[..., Any] | None:
    """The attention that a family's file spells out for the module, which `eager` calls; None
    where it has none of the usual name."""
    files = (vars(sys.modules[cls.__module__]) for cls in type(module).__mro__)
    found = (names.get("eager_attention_forward") for names in files)
    return next((each for each in found if each is not None), None)


def initialise_module(owner: Any, module: nn.Module) -> None:
    """Fill the parameters of `module` as its family does; `owner` is the model that it is in."""
    owner._init_weights(module)


@contextmanager
def unsearched_positions() -> Iterator[None]:
    """Inside, transformers does not look for packed sequences in positions.

    `create_causal_mask` looks for jumps in `position_ids` with `find_packed_sequence_indices`,
    which returns None where there is none. Positions only count up inside, so None is its answer.
    To give it, though, the host waits for the GPU once in every forward, and the GPU has no work
    until the host is ahead of it again. There is no argument that turns the search off, so the
    function is replaced in its module while the block runs. Without this part transformers
    searches, and the masks are the same.
    """
    if not is_open(POSITIONS):
        yield
        return
    from transformers import masking_utils

    find_packed = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find_packed


def check_positions() -> None:
    """The function takes positions alone, and masks are made by whoever looks it up by its name."""
    from transformers import masking_utils

    given = list(inspect.signature(masking_utils.find_packed_sequence_indices).parameters)
    if given != ["position_ids"]:
        raise Changed(f"find_packed_sequence_indices takes {', '.join(given)}")
    callers = masking_utils._preprocess_mask_arguments.__code__.co_names
    if "find_packed_sequence_indices" not in callers:
        raise Changed("masks are made without find_packed_sequence_indices")
