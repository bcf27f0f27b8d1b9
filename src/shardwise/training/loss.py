"""Cross-entropy summed over tokens, which never holds the logits of a whole batch.

`attach_loss` gives the model a method `sum_loss(input_ids, labels)`. In the chunked form the head
and the cross-entropy are one operation over slices of tokens. It computes its gradients in the same
pass: three matmuls, as usual, with the logits of one slice at a time. `token_losses` is the same
for each token, for objectives that weigh tokens by what all of them are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.facts.head_form import PLAIN, HeadForm
from shardwise.kernels.cross_entropy import (
    IGNORE_INDEX,
    turn_by_token,
    turn_by_token_by_triton,
    turn_by_triton,
    turn_into_gradient,
)
from shardwise.model.head import head_of
from shardwise.model.override import override_forward
from shardwise.parallel.reduce_buffer import ReduceBuffer
from shardwise.plan.memory import EVEN_ROWS
from shardwise.training.split_loss import divide_head, turn_over_ranks

Turn = Callable[[Tensor, Tensor, HeadForm], Tensor]


class Slicing(NamedTuple):
    """The tokens of a slice, the function that returns its loss and overwrites the head's output
    with its gradient, the function that scales and casts a gradient, what the head's rows are
    padded to a multiple of, and the memory for the head's gradient, if it is not to be
    allocated."""

    tokens: int
    turn: Callable[[Tensor, Tensor], Tensor]
    scaled: Callable[[Tensor, Tensor, torch.dtype], Tensor]
    even: int = 1
    buffer: ReduceBuffer | None = None

    def rows_of(self, hidden: Tensor) -> Iterator[slice]:
        """The rows of each slice."""
        for start in range(0, hidden.shape[0], self.tokens):
            yield slice(start, start + self.tokens)


class LinearCrossEntropy(torch.autograd.Function):
    """Sum over tokens of the cross-entropy of `hidden @ weight.T + bias`, slice by slice, with the
    scale and the cap that `how.turn` knows."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, how: Slicing
    ) -> Tensor:
        """The loss. Gradients of hidden, weight and bias are saved for backward."""
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        vocab = len(weight)
        weight = _padded(weight, how.even)
        bias = None if bias is None else _padded(bias, how.even)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # Many slices are summed, which needs more bits than the weight itself has.
        grad_weight = _zeros_for(weight, how.buffer) if wants_weight else None
        grad_bias = None
        if bias is not None and wants_bias:
            grad_bias = torch.zeros_like(bias, dtype=torch.float32)
        for rows in how.rows_of(hidden):
            grad = F.linear(hidden[rows], weight, bias)
            total += how.turn(grad[:, :vocab], labels[rows])
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                _add_product(grad_weight, grad.T, hidden[rows])
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            # Free these before the next slice allocates its own.
            del grad
        heads = (None if each is None else each[:vocab] for each in (grad_weight, grad_bias))
        ctx.save_for_backward(grad_hidden, *heads)
        ctx.weight_dtype, ctx.scaled = weight.dtype, how.scaled
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the saved gradients by the gradient of the loss."""
        (scale,) = grads
        hidden, weight, bias = ctx.saved_tensors
        return (
            None if hidden is None else ctx.scaled(hidden, scale, hidden.dtype),
            None if weight is None else ctx.scaled(weight, scale, ctx.weight_dtype),
            None if bias is None else ctx.scaled(bias, scale, ctx.weight_dtype),
            None,
            None,
        )


class LinearTokenLosses(torch.autograd.Function):
    """The cross-entropy of each token, slice by slice.

    What the loss of a token counts for is known after all tokens are, so backward computes the
    logits of each slice again: four matmuls. `how.turn` returns the losses of a slice.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, how: Slicing
    ) -> Tensor:
        """The losses in fp32, 0 where a label does not count."""
        losses = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        whole, shift = _padded(weight, how.even), None if bias is None else _padded(bias, how.even)
        for rows in how.rows_of(hidden):
            output = F.linear(hidden[rows], whole, shift)
            losses[rows] = how.turn(output[:, : len(weight)], labels[rows])
            del output
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.how = how
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """A token's factor multiplies its hidden state and its gradient, which are far smaller
        than its logits."""
        (factors,) = grads
        hidden, weight, bias, labels = ctx.saved_tensors
        how, (wants_hidden, wants_weight, wants_bias) = ctx.how, ctx.needs_input_grad[:3]
        vocab, one = len(weight), factors.new_ones(())
        whole, shift = _padded(weight, how.even), None if bias is None else _padded(bias, how.even)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = _zeros_for(whole, how.buffer) if wants_weight else None
        grad_bias = None
        if shift is not None and wants_bias:
            grad_bias = torch.zeros_like(shift, dtype=torch.float32)
        for rows in how.rows_of(hidden):
            grad = F.linear(hidden[rows], whole, shift)
            how.turn(grad[:, :vocab], labels[rows])
            factor = factors[rows, None]
            if grad_hidden is not None:
                torch.mul(grad @ whole, factor, out=grad_hidden[rows])
            if grad_weight is not None:
                _add_product(grad_weight, grad.T, (hidden[rows] * factor).to(grad.dtype))
            if grad_bias is not None:
                grad_bias += grad.T @ factors[rows].to(grad.dtype)
            del grad
        return (
            grad_hidden,
            None if grad_weight is None else how.scaled(grad_weight[:vocab], one, weight.dtype),
            None if grad_bias is None else how.scaled(grad_bias[:vocab], one, bias.dtype),
            None,
            None,
        )


def _zeros_for(head: Tensor, buffer: ReduceBuffer | None) -> Tensor:
    """The head's gradient in fp32 before the first slice. A buffer that is taken again before
    backward has read it is an error of autograd, which counts the changes of its memory."""
    if buffer is None:
        return torch.zeros_like(head, dtype=torch.float32)
    return buffer.take(head.shape, dtype=torch.float32, device=head.device).zero_()


def _padded(head: Tensor, multiple: int) -> Tensor:
    """The head with rows of zeros up to a multiple. The logits of these rows are 0, and so are the
    gradients, because nothing overwrites them."""
    missing = -len(head) % multiple
    return F.pad(head, (0, 0) * (head.ndim - 1) + (0, missing)) if missing else head


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right. A GPU accumulates it in fp32 without writing the product."""
    if total.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _scaled(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scale and cast in one pass: the head's gradient is large, and so would be an fp32 copy."""
    return torch.mul(tensor, scale, out=torch.empty_like(tensor, dtype=dtype))


def _scaled_by_compiler(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The same compiled: one pass at the memory's bandwidth, which torch's kernel does not
    reach."""
    return (tensor * scale).to(dtype)


def prepare_head(
    model: nn.Module,
    chunk: int,
    *,
    compiled: bool,
    own_kernels: bool,
    form: HeadForm = PLAIN,
    buffer: ReduceBuffer | None = None,
    group: ProcessGroup | None = None,
) -> None:
    """Let the output head take labels. It then returns the loss instead of logits.

    It stays the same module and is called once, so FSDP2 gathers and frees it as usual. Ranks of
    `group` have parts of the vocabulary.
    """

    turns: tuple[Turn, Turn] = turn_into_gradient, turn_by_token
    if own_kernels:
        turns = turn_by_triton, turn_by_token_by_triton
    if group is not None:
        by_token = turn_over_ranks(group, compiled=compiled)
        turns = (lambda *given: by_token(*given).sum()), by_token

    def slicing_of(turn: Turn) -> Slicing:
        def of_form(output: Tensor, labels: Tensor) -> Tensor:
            return turn(output, labels, form)

        scaled = torch.compile(_scaled_by_compiler, dynamic=False) if compiled else _scaled
        if group is not None:
            return Slicing(chunk, of_form, scaled, EVEN_ROWS if own_kernels else 1, buffer)
        if own_kernels:
            return Slicing(chunk, of_form, scaled, EVEN_ROWS, buffer)
        made = torch.compile(of_form, dynamic=False) if compiled else of_form
        return Slicing(chunk, made, scaled, buffer=buffer)

    head = head_of(model)
    if head is not None:
        both = [slicing_of(turn) for turn in turns]
        override_forward([head], "Loss", lambda cls: _head_forward(cls, *both))
        if group is not None:
            divide_head(head, group)


def attach_loss(model: nn.Module, *, chunked: bool) -> None:
    """Give `model` the methods `sum_loss(input_ids, labels)` and `token_losses`, with the losses
    of all tokens in one row. Call this before the methods are registered.

    More arguments go to the model as they are.
    """
    method = _chunked_loss if chunked else _full_loss
    by_token = _chunked_token_losses if chunked else _full_token_losses
    model.sum_loss = MethodType(method, model)  # type: ignore[assignment]
    model.token_losses = MethodType(by_token, model)  # type: ignore[assignment]


def _chunked_loss(self: Any, input_ids: Tensor | None, labels: Tensor, **apart: Any) -> Tensor:
    hidden = self.base_model(input_ids=input_ids, use_cache=False, **apart)[0]
    loss: Tensor = self.get_output_embeddings()(hidden.flatten(0, 1), labels.flatten())
    return loss


def _chunked_token_losses(self: Any, input_ids: Tensor, labels: Tensor, **apart: Any) -> Tensor:
    hidden = self.base_model(input_ids=input_ids, use_cache=False, **apart)[0]
    head = self.get_output_embeddings()
    losses: Tensor = head(hidden.flatten(0, 1), labels.flatten(), by_token=True)
    return losses


def _full_loss(self: Any, input_ids: Tensor | None, labels: Tensor, **apart: Any) -> Tensor:
    return _full_token_losses(self, input_ids, labels, "sum", **apart)


def _full_token_losses(
    self: Any, input_ids: Tensor | None, labels: Tensor, reduction: str = "none", **apart: Any
) -> Tensor:
    logits = type(self).forward(self, input_ids=input_ids, use_cache=False, **apart).logits
    flat = logits.flatten(0, 1).float()
    return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORE_INDEX, reduction=reduction)


def _head_forward(cls: type[nn.Module], summed: Slicing, each: Slicing) -> Callable[..., Tensor]:
    def forward(
        self: Any, hidden: Tensor, labels: Tensor | None = None, *, by_token: bool = False
    ) -> Tensor:
        if labels is None:
            logits: Tensor = cls.forward(self, hidden)
            return logits
        weight, bias = self.weight, self.bias
        if not torch.is_grad_enabled():
            # An autograd function is asked for gradients of parameters even then.
            weight, bias = weight.detach(), None if bias is None else bias.detach()
        if by_token:
            losses: Tensor = LinearTokenLosses.apply(hidden, weight, bias, labels, each)
            return losses
        loss: Tensor = LinearCrossEntropy.apply(hidden, weight, bias, labels, summed)
        return loss

    return forward
