"""Log-probabilities of the model that training begins with, computed once and kept on disk.

With adapters the reference is the model without them. Otherwise it is the first weights. A number
for each document is kept beside the tokens, under a hash of the weights, the model's config and all
documents, so that other weights or other data never find these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

import torch
from torch import Tensor

from shardwise.config.schema import WITH_REFERENCE
from shardwise.data.arrays import ArrayFile, ArrayWriter
from shardwise.data.cache import (
    build_directory,
    damaged,
    key_of,
    validate_content,
    validate_sizes,
    write_index,
)
from shardwise.data.content import hashes_of
from shardwise.data.conversations import StoredConversations
from shardwise.data.progress import Say, silent
from shardwise.data.splits import DataSplits
from shardwise.errors import ExitCode, UserError
from shardwise.files import read_json, user_path
from shardwise.model.peft_format import WEIGHTS_NAME
from shardwise.model.weight_fingerprint import weight_files
from shardwise.parallel.mesh import World
from shardwise.plan.planned import Plan
from shardwise.training.preference_losses import has_kl_term

# This is part of every key. Raise it when the same documents would get other numbers.
FORMAT = 1
# The files of more parameters take seconds to hash.
_MANY_PARAMS = 10**9


@dataclass(frozen=True, slots=True)
class Reference:
    """A log-probability for each document."""

    table: Tensor
    """By the number of a document, fp32 on the device. Not a number until it is known. With KTO's
    KL term, as many more follow: of the prompt of each with another answer."""

    num_documents: int

    directory: Path
    """Where the first rank keeps it."""

    is_known: bool
    """Whether the table was read from there."""


def open_reference(
    plan: Plan, data: DataSplits, world: World, say: Say = silent
) -> Reference | None:
    """The reference of a run, as far as it is known; None where the objective needs none.

    The first rank reads it for all, because nodes need not share a disk.
    """
    stored = data.conversations
    if plan.settings.preference.objective not in WITH_REFERENCE or stored is None:
        return None
    if stored.documents is None:
        raise ValueError("these documents have no numbers")
    num_documents = stored.documents.length - 1
    with_kl = has_kl_term(plan.settings.preference)
    # Those of prompts with other answers follow.
    num_values = 2 * num_documents if with_kl else num_documents
    if plan.weights_dir is not None and plan.model.total_params > _MANY_PARAMS:
        say("hashing the files of the weights, by which the reference is known")
    documents = _documents_of(plan, stored, with_kl=with_kl)
    directory = world.decide(lambda: _directory_of(plan, documents))
    is_known = world.decide(lambda: directory.exists())
    values = world.decide(lambda: _read(directory, num_values) if is_known else None)
    if is_known:
        say(f"reference: log-probabilities of {num_documents} answers are read from {directory}")
    device = torch.device(plan.cluster.device)
    table = torch.full((num_values,), math.nan, device=device)
    if values is not None:
        table.copy_(values)
    return Reference(table, num_documents, directory, is_known)


def _documents_of(plan: Plan, stored: StoredConversations, *, with_kl: bool) -> str:
    """What tells the documents from others. How they are packed matters to the KL term alone."""
    if not with_kl:
        return stored.compared_digest
    packed = (plan.settings.data.seq_len, *map(stored.digest, stored.splits.values()))
    return f"{stored.compared_digest} exchanged in {packed}"


def _directory_of(plan: Plan, documents: str) -> Path:
    """The place in the cache for these weights and documents. Files of weights are hashed whole."""
    cache_root = Path(plan.settings.runs_dir) / ".cache"
    key = key_of(
        {
            "reference": FORMAT,
            "documents": documents,
            "weights": _weights_of(plan, cache_root),
            "model": plan.hf_config,
            "revision": plan.settings.model.revision,
            "precision": [plan.decided.param_dtype, plan.decided.linear, plan.decided.experts],
            "base": plan.settings.adapter.base,
        }
    )
    return cache_root / f"reference-{key}"


def _weights_of(plan: Plan, cache_root: Path) -> list[str]:
    """What tells the first weights from others."""
    adapter, known = plan.settings.adapter, []
    places = [] if plan.weights_dir is None else [Path(plan.weights_dir)]
    if not places:
        known = [f"random weights of seed {plan.settings.train.seed}"]
    if adapter.weights_from is not None and adapter.modules_to_save:
        # Modules that are trained whole begin with these, and cannot be turned off.
        places.append(user_path(adapter.weights_from) / WEIGHTS_NAME)
    for place in places:
        try:
            known += hashes_of(weight_files(place), cache_root)
        except OSError as error:
            what, fix = f"the weights in {place} cannot be read", f"ls -l {quote(str(place))}"
            raise _failed(what, fix, error) from error
    return known


def _read(directory: Path, num_values: int) -> Tensor:
    """The numbers that were kept, whose hash is checked."""
    try:
        found = read_json(directory / "index.json")["logps"]
        file = ArrayFile(directory / "logps.bin", "float32", num_values, found["sha256"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise damaged(directory, f"index.json: {error}") from error
    validate_sizes([file])
    validate_content([file])
    return torch.from_numpy(file.open().copy())


def keep_reference(reference: Reference) -> None:
    """Write the table, which must be whole. The first rank calls this."""

    def write(aside: Path) -> None:
        with ArrayWriter(aside / "logps.bin", "float32") as writer:
            writer.write(reference.table.cpu().numpy())
        write_index(aside, {"logps": {"length": writer.length, "sha256": writer.sha256}})

    try:
        build_directory(reference.directory, write)
    except OSError as error:
        what = f"the reference cannot be kept in {reference.directory}"
        fix = "name a directory that can be written to, such as runs_dir=/tmp/runs"
        raise _failed(what, fix, error) from error


def _failed(what: str, fix: str, error: OSError) -> UserError:
    why = error.strerror or str(error)
    return UserError(what, why=why, fix=fix, code=ExitCode.ENVIRONMENT)
