"""Whether a model's code calls the layers that have adapters."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from shardwise.errors import UserError
from shardwise.model.lora import adapted_modules
from shardwise.training.trial import trying

_NUMBER = re.compile(r"\d+")


def validate_called(model: Any, ids: Tensor) -> None:
    """Raise where no layer of a kind is called in a forward of a few tokens.

    Some families read the weight of a layer and multiply by themselves. Its adapters would never be
    trained, and nobody would notice. Of a kind, such as experts, only some may be called.
    """
    kinds = {name: _NUMBER.sub("*", name) for name in adapted_modules(model)}
    called: set[str] = set()
    hooks = [
        module.register_forward_pre_hook(lambda *_, kind=kinds[name]: called.add(kind))
        for name, module in adapted_modules(model).items()
    ]
    with trying(model):
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    if missing := sorted(set(kinds.values()) - called):
        raise UserError(
            f"the model's code does not call {missing[0]}, so its adapters would not be trained",
            why="it reads the weight of this layer and multiplies by itself",
            fix="leave it out of adapter.targets, which may be a list: "
            "adapter.targets=[q_proj,v_proj]",
        )
