"""One buffer for what is reduced: who gets it, who waits for whom, and what the loss does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwise.parallel.reduce_buffer import BufferedInputs, ReduceBuffer
from shardwise.parallel.shard import _is_for_forward
from shardwise.training.loss import attach_loss, prepare_head

ASKED: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}


class Stream:
    """Stands in for a stream of a GPU: the events that it waits for."""

    def __init__(self) -> None:
        self.waits = list[Any]()

    def wait_event(self, event: Any) -> None:
        self.waits.append(event)


class Event:
    """Stands in for an event of a GPU."""

    recorded = False

    def record(self) -> None:
        self.recorded = True


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> dict[str, Stream]:
    """The current stream and the one that computes, which a test may make two."""
    computes = Stream()
    made = {"current": computes, "computes": computes}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: made["current"])
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: made["computes"])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return made


def test_every_unit_gets_the_same_memory_and_waits_for_who_read_it(
    streams: dict[str, Stream],
) -> None:
    buffer = ReduceBuffer()
    first = buffer.take((8, 4), **ASKED)
    assert not streams["computes"].waits
    buffer.note_read()
    second = buffer.take((6,), **ASKED)
    assert second.data_ptr() == first.data_ptr() and second.shape == (6,)
    (event,) = streams["computes"].waits
    assert event.recorded
    # It is waited for once.
    buffer.take((6,), **ASKED)
    assert len(streams["computes"].waits) == 1


def test_it_grows_and_never_shrinks(streams: dict[str, Stream]) -> None:
    buffer = ReduceBuffer()
    small = buffer.take((4,), **ASKED)
    large = buffer.take((1000,), **ASKED)
    assert large.untyped_storage().nbytes() == 4000 > small.untyped_storage().nbytes()
    half = buffer.take((4,), dtype=torch.bfloat16, device=torch.device("cpu"))
    assert half.dtype == torch.bfloat16
    assert half.untyped_storage().data_ptr() == large.untyped_storage().data_ptr()


def test_what_a_reduction_gives_is_memory_of_its_own(streams: dict[str, Stream]) -> None:
    buffer = ReduceBuffer()
    memory = BufferedInputs(buffer, lambda size, **asked: torch.empty(*size, **asked))
    given = memory((8,), **ASKED)
    streams["current"] = Stream()
    result = memory((1,), **ASKED)
    streams["current"] = streams["computes"]
    assert memory((8,), **ASKED).data_ptr() == given.data_ptr() != result.data_ptr()


class TwoLayers(nn.Module):
    """A base model and a head, as Hugging Face has them."""

    base_model: Any

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.base_model = lambda input_ids, **_: (self.table(input_ids),)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def losses_and_gradients(buffer: ReduceBuffer | None) -> list[torch.Tensor]:
    model: Any = TwoLayers()
    prepare_head(model, 3, compiled=False, own_kernels=False, buffer=buffer)
    attach_loss(model, chunked=True)
    ids = torch.arange(14).view(2, 7) % 50
    found = []
    for _ in range(2):
        loss = model.sum_loss(ids, ids)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    return found


def test_the_loss_is_the_same_with_its_gradient_in_the_buffer() -> None:
    for ours, plain in zip(
        losses_and_gradients(ReduceBuffer()), losses_and_gradients(None), strict=True
    ):
        assert torch.equal(ours, plain)


def test_a_second_loss_before_the_first_backward_is_an_error() -> None:
    model: Any = TwoLayers()
    prepare_head(model, 3, compiled=False, own_kernels=False, buffer=ReduceBuffer())
    attach_loss(model, chunked=True)
    ids = torch.arange(14).view(2, 7) % 50
    first = model.sum_loss(ids, ids)
    model.sum_loss(ids, ids)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()


def test_backward_needs_a_table_only_where_it_is_also_the_head() -> None:
    model = TwoLayers()
    assert _is_for_forward([model.table], model)
    assert not _is_for_forward([model.head], model)
    assert not _is_for_forward([model.table, model.head], model)
    model.head.weight = model.table.weight
    assert not _is_for_forward([model.table], model)
