"""FSDP2's reduction of gradients, called apart from a backward.

FSDP2 reduces a unit's gradients in a hook of its backward. A schedule that computes gradients of
weights later, without the hooks, leaves them on the rank. `torch.distributed.pipelining` calls the
same two private methods for its own stages (`PipelineStage.perform_reduce_grad`), and there is no
public one.
"""

from __future__ import annotations

from typing import Any


def reduce_gradients(model: Any) -> None:
    """Reduce what backwards without gradient sync have left, and end the iteration."""
    model.set_is_last_backward(True)
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(True)
    root = model._get_fsdp_state()
    for state in root._state_ctx.all_states:
        for group in _groups(state):
            group.post_backward()
    root._root_post_backward_final_callback()


def _groups(state: Any) -> list[Any]:
    """The groups of parameters of a module: one in torch 2.11, any number since."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
