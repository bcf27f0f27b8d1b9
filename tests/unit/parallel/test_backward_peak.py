"""What backward needs at its peak, against figures by hand and against real tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.facts.block_kind import BlockKind
from shardwise.facts.presets import PRESETS
from shardwise.internals.graphs import Graphs, noting_backend
from shardwise.parallel.backward_peak import compiled_peak, eager_peak
from shardwise.parallel.block_call import BlockCall
from shardwise.parallel.work import scale_of, storage_of, watch

Count = Callable[..., tuple[BlockKind, ...]]
TOKENS, WIDTH, WIDE = 96, 16, 40


class Mlp(nn.Module):
    """A layer, a sigmoid and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDE, bias=False)
        self.down = nn.Linear(WIDE, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.down(torch.sigmoid(self.up(x)))


def call() -> BlockCall:
    return BlockCall(Mlp(), (torch.randn(TOKENS, WIDTH, requires_grad=True),), {})


def test_a_small_block_by_hand() -> None:
    """Forward saves x and the sigmoid. Backward gets one narrow gradient and makes a wide one; the
    sigmoid's own gradient is written over it with the compiler, and beside it without."""
    block, graphs = call(), Graphs()
    torch.compiler.reset()
    run = torch.compile(block.block, backend=noting_backend(graphs, None), dynamic=False)
    run(*block.args)
    scale = scale_of(block, TOKENS)
    assert compiled_peak(graphs, scale) == 4 * (WIDTH + WIDE)
    known = {storage_of(parameter) for parameter in block.block.parameters()}
    # The narrow gradient is needed for both of the last layer's gradients, and then no more.
    assert eager_peak(watch(block, known), scale) == 4 * max(WIDTH + WIDE, 2 * WIDE)


def test_two_pieces_have_no_peak() -> None:
    block = call()
    assert compiled_peak(Graphs(), scale_of(block, TOKENS)) is None


SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 1}


def test_a_llama_block_by_hand(count: Count) -> None:
    """With our SwiGLU: the gradient that comes in, the gradients of both halves, and the product.
    A recomputed block has all that a whole one saves, besides what it takes."""
    ways = ((True, True, "none"), (True, True, "full"))
    (kind,) = count({**PRESETS["tiny-llama"], **SHAPE}, *ways)
    inside = 2 * (128 + 3 * 320)
    assert kind.saved["compiled own"].backward_bytes == pytest.approx(inside, rel=0.02)
    recomputed = kind.saved["compiled own"].bytes(2, 0) - 2 * 128 + inside
    full = kind.saved["compiled own full"]
    assert full.backward_bytes == pytest.approx(recomputed, rel=0.03)
    assert full.channels == 128


@pytest.mark.long
def test_experts_need_their_rows_by_hand(count: Count) -> None:
    """With our experts: gradients of SwiGLU's product and halves, the product, and dealt rows."""
    config = {**PRESETS["tiny-mixtral"], **SHAPE, "num_local_experts": 4}
    (kind,) = count(config, (True, True, "none"))
    ffn, routed = 2 * 320, 2 * 128
    found = kind.saved["compiled own"].backward_bytes
    assert found is not None
    assert 2 * (3 * ffn + routed) < found <= 2 * (4 * ffn + 2 * routed + 128) * 1.02
