"""Attention inside documents only, for models of transformers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.data.documents import Documents, place_documents
from shardwise.errors import UserError
from shardwise.model.document_masks import give_masks
from shardwise.plan.planned import Plan
from shardwise.training.trial import trying


def kept_apart(documents: Documents, device: torch.device) -> dict[str, Any]:
    """The arguments that keep documents apart, by transformers' names.

    Attention that builds no mask reads where documents start. All other kinds find it in the
    positions.
    """
    starts = documents.starts.to(device, non_blocking=True)
    length = documents.positions.shape[1]
    return {
        "position_ids": documents.positions.to(device, non_blocking=True),
        **{"cu_seq_lens_q": starts, "cu_seq_lens_k": starts},
        **{"max_length_q": length, "max_length_k": length},
    }


def masks_by_position(plan: Plan) -> bool:
    """Whether transformers builds a mask from the positions."""
    is_told = plan.decided.attention == "flash_attention_4" or plan.decided.context > 1
    return plan.settings.data.keeps_documents_apart and not is_told


def check_documents(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Run two documents through the real model: the first must not change the second. A model that
    takes masks but makes them without positions gets ours.

    It may change its rounding: experts multiply the rows of both at once. So what it changes is
    compared with what it changes where they are one document. `dtype` is computed with. The caller
    sets up the attention as for the steps of the run.
    """
    try:
        with trying(model):
            reaches = _reaches(model, device, dtype) and not _is_mended(model, device, dtype)
    except (TypeError, ValueError) as error:
        raise _refusal(str(error)) from error
    if reaches:
        raise _refusal("one document changes the logits of the next one")


def _reaches(model: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the first document changes more than the rounding of the second."""
    apart = _change(model, device, is_apart=True)
    together = _change(model, device, is_apart=False)
    return apart > 0 and apart > math.sqrt(torch.finfo(dtype).eps) * together


def _is_mended(model: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether masks that are made from positions keep documents apart. The model has them then."""
    try:
        return give_masks(model, dtype) and not _reaches(model, device, dtype)
    except RuntimeError:
        # It reads a mask for something else, such as positions.
        return False


def _change(model: Any, device: torch.device, *, is_apart: bool) -> float:
    """How far the logits of the second document move with the first token of the first."""
    one, other = (_second(model, first, device, is_apart=is_apart) for first in (1, 5))
    return float((one.float() - other.float()).norm())


def _second(model: Any, first: int, device: torch.device, *, is_apart: bool) -> Tensor:
    """Logits of the same second document after a first that begins with `first`."""
    ids = torch.tensor([[first, 2, 3, 0, 4, 5, 6, 7]])
    starts = np.array([0, 4] if is_apart else [0])
    documents = place_documents([starts], ids.shape[1])
    logits: Tensor = model(input_ids=ids.to(device), **kept_apart(documents, device)).logits
    return logits[:, 4:]


def _refusal(why: str) -> UserError:
    return UserError(
        "documents that share a sequence cannot be kept apart in this model",
        why=why,
        fix="leave data.document_mask out, or for conversations other than pairs write "
        "data.packing=one, or try another attention: model.attention=eager",
    )
