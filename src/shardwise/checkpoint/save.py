"""Save: copy the shards to the host, write them in the background, and publish when all is
durable."""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.audit import check_written
from shardwise.checkpoint.base import base_identity
from shardwise.checkpoint.durable_files import Fingerprint, Unreadable, plain_size
from shardwise.checkpoint.eval_history import HeldOut
from shardwise.checkpoint.index import Index, dump_index
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.outcome import SaveOutcome, first_cause, is_no_room
from shardwise.checkpoint.portions import StagedPlanner
from shardwise.checkpoint.site_tensors import SiteState
from shardwise.checkpoint.state import kept_tensors, optimizer_tensors, saved_tensors
from shardwise.checkpoint.storage import ShardWriter
from shardwise.checkpoint.store import (
    begin,
    discard,
    final_path,
    outdated,
    partial_path,
    publish,
    quarantine,
    remove,
    small_files,
)
from shardwise.errors import UserError
from shardwise.files import free_bytes
from shardwise.lease.lease import UNFENCED, Fence, LostLease
from shardwise.model.stage_part import is_staged
from shardwise.model.weights import Portion
from shardwise.parallel.mesh import World
from shardwise.plan.planned import Plan
from shardwise.units import format_bytes
from shardwise.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Scalars of the run that a checkpoint keeps."""

    step: int
    position: int
    tokens: int
    """Tokens that the weights have learnt from, over all starts of the run."""

    loss: float | None
    loss_scale: dict[str, float] | None
    data: str | None = None
    """The identity of the training tokens."""

    held_out: HeldOut | None = None
    shift: int | None = None
    """Sequences that the place of every batch is shifted by, where its size has changed."""


@dataclass(frozen=True, slots=True)
class Room:
    """The bytes that the next save needs, and those that are free on the disk."""

    place: Path
    needed_bytes: int
    free_bytes: int | None
    """Free bytes; None where the file system does not tell."""

    @property
    def fits(self) -> bool:
        """False where a save cannot succeed."""
        return self.free_bytes is None or self.needed_bytes <= self.free_bytes

    def __str__(self) -> str:
        free = "unknown" if self.free_bytes is None else format_bytes(self.free_bytes)
        needed = format_bytes(self.needed_bytes)
        return f"a checkpoint needs {needed}, {free} are free in {self.place}"


class Saver:
    """Saves checkpoints of one run, at most one at a time."""

    def __init__(
        self,
        root: Path,
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        fence: Fence = UNFENCED,
        sites: SiteState | None = None,
    ) -> None:
        self.root = root
        self.plan = plan
        self.model = model
        self.optimizer = optimizer
        self.fence = fence
        self.sites = sites
        # The first rank writes the manifest.
        self.base = base_identity(plan) if world.is_first else None
        # The saver has a process group of its own, whose collectives run beside those of training.
        self.world = world.beside("gloo")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._buffers: dict[str, Tensor] = {}
        self._needed_bytes = 0
        self._pending: Future[SaveOutcome] | None = None
        # The step of a published save that could not be read back, and what this rank wrote of it.
        self._unread: tuple[int, dict[str, Fingerprint]] | None = None

    def start(self, progress: Progress, *, hurried: bool = False) -> list[SaveOutcome]:
        """Stage now and write in the background. Returns the outcome of the previous save, if any.

        A save waits for the previous one, because both use the same staging buffers. A hurried save
        is not read back, so no older checkpoint is removed after it.
        """
        before = self.finish()
        started = time.perf_counter()
        tensors = saved_tensors(self.model) | optimizer_tensors(self.model, self.optimizer)
        if self.sites is not None:
            tensors = self.sites.names(tensors)
        # The bytes of all ranks together: a sharded tensor counts whole, and a replicated one is
        # written once.
        kept = kept_tensors(self.model, tensors)
        self._needed_bytes = sum(
            _whole_bytes(portion) * self._copies(name) for name, portion in kept.items()
        )
        if is_staged(self.model):
            # Ranks of one stage have the same tensors.
            everyone = self.world.gather({n: _whole_bytes(each) for n, each in kept.items()})
            sizes = {name: size for each in everyone for name, size in each.items()}
            self._needed_bytes = sum(sizes.values())
        staged = self._stage(tensors)
        stage_s = time.perf_counter() - started
        write = partial(self._write, kept, staged, progress, hurried=hurried)
        self._pending = self._thread.submit(lambda: replace(write(), stage_s=stage_s))
        return before

    def _copies(self, name: str) -> int:
        return 1 if self.sites is None else self.sites.copies(name)

    def room(self) -> Room:
        """The room for a save like the last one that was started."""
        return Room(self.root, self._needed_bytes, free_bytes(self.root))

    def poll(self) -> list[SaveOutcome]:
        """The outcome of a background save that has ended since the last call."""
        return self.finish() if self._pending is not None and self._pending.done() else []

    def finish(self) -> list[SaveOutcome]:
        """Wait for the save in flight."""
        pending, self._pending = self._pending, None
        return [] if pending is None else [pending.result()]

    def close(self) -> None:
        """Stop the thread; a save in flight is waited for."""
        self._thread.shutdown(wait=True)

    def _stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors to host memory. The buffers are reused, and pinned where there is a GPU."""
        for name, tensor in tensors.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if name not in self._buffers:
                self._buffers[name] = torch.empty_like(
                    local, device="cpu", pin_memory=torch.cuda.is_available()
                )
            self._buffers[name].copy_(local.detach(), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self._buffers

    def _write(
        self,
        kept: dict[str, Portion],
        staged: dict[str, Tensor],
        progress: Progress,
        *,
        hurried: bool,
    ) -> SaveOutcome:
        """Write, commit and read back; the outcome says what failed. Runs in the background thread
        of every rank.

        A published save that could not be read back is only read again. The tensors of its step
        are the same, and a checkpoint is never overwritten.
        """
        started = time.perf_counter()
        commit_s = check_s = 0.0
        small: dict[str, Fingerprint] = {}

        def commit(index: Index, files: dict[str, Fingerprint]) -> None:
            nonlocal commit_s, small
            begun = time.perf_counter()
            plan = json.dumps(self.plan.to_dict()).encode()
            manifest = self._manifest(progress, files)
            published = publish(self.root, manifest, dump_index(index), plan, self.fence)
            small = small_files(published)
            commit_s = time.perf_counter() - begun

        error, no_room, misread = None, False, False
        try:
            if self._unread is not None and self._unread[0] == progress.step:
                _, written = self._unread
            else:
                writer = ShardWriter(self._begin(progress.step), self.world.rank, commit)
                planner = StagedPlanner(staged, kept)
                group = self.world.group
                tensors = {name: portion.tensor for name, portion in kept.items()}
                dcp.save(tensors, storage_writer=writer, planner=planner, process_group=group)
                written = {**writer.written, **small}
            write_s = time.perf_counter() - started - commit_s
            if not hurried:
                error = self._read_back(progress.step, written)
                check_s = time.perf_counter() - started - commit_s - write_s
                misread = error is not None
        except (CheckpointException, OSError) as failure:
            write_s = time.perf_counter() - started - commit_s
            error, no_room = first_cause(failure), is_no_room(failure)
            self._give_space_back(progress.step)
        return SaveOutcome(progress.step, 0.0, write_s, commit_s, error, no_room, check_s, misread)

    def _read_back(self, step: int, written: dict[str, Fingerprint]) -> str | None:
        """Why the disk does not hold what was written; None where it does.

        Only a checkpoint that was read back may replace an older one. Each rank reads its own file
        past the page cache. A checkpoint that differs is quarantined, and every older one stays.
        """
        final = final_path(self.root, step)
        wrong: list[str] = []
        unread = None
        try:
            # Hosts of a shared file system may see a new name late, which is no damage.
            unseen = [name for name in written if plain_size(final / name) is None]
            if unseen:
                unread = f"{final / unseen[0]} is not visible on this host"
            else:
                wrong = [str(damage) for damage in check_written(final, written, from_disk=True)]
        except Unreadable as error:
            unread = error.what
        everyone = self.world.gather((wrong, unread))
        wrong = sorted(damage for damages, _ in everyone for damage in damages)
        unread = next((what for _, what in everyone if what is not None), None)
        self._unread = (step, written) if unread is not None and not wrong else None
        if self.world.is_first:
            # The checkpoint is there; an old one that cannot be removed does not change that.
            with suppress(OSError, UserError):
                self.fence.validate()
                if wrong:
                    quarantine(final, wrong)
                elif unread is None:
                    kept = self.plan.settings.checkpoint
                    remove(
                        self.root, outdated(self.root, kept.keep, keep_best=kept.keep_best is True)
                    )
        return f"the disk does not hold what was written: {'; '.join(wrong)}" if wrong else unread

    def _begin(self, step: int) -> Path:
        """The directory, which rank 0 makes. Its error is raised on every rank."""
        found: Path | OSError = self.root
        if self.world.is_first:
            try:
                if final_path(self.root, step).exists():
                    raise FileExistsError(f"{final_path(self.root, step)} exists already")
                room = self.room()
                if not room.fits:
                    raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {room}")
                found = begin(self.root, step, self.fence)
            except LostLease as failure:
                found = OSError(str(failure))
            except OSError as failure:
                found = failure
        found = self.world.share(found)
        if isinstance(found, OSError):
            raise found
        return found

    def _give_space_back(self, step: int) -> None:
        if self.world.is_first:
            discard(partial_path(self.root, step, self.fence.epoch))

    def _manifest(self, progress: Progress, files: dict[str, Fingerprint]) -> Manifest:
        return Manifest(
            **{item.name: getattr(progress, item.name) for item in fields(progress)},
            global_batch=self.plan.decided.global_batch,
            seed=self.plan.settings.train.seed,
            base=self.base,
            world_size=self.world.size,
            versions=software_versions(),
            created=time.time(),
            files=dict(files),
        )


def _whole_bytes(portion: Portion) -> int:
    return math.prod(portion.shape) * portion.dtype.itemsize


def software_versions() -> dict[str, str]:
    """Versions of the software that a run is computed with."""
    return {
        "shardwise": __version__,
        "transformers": transformers.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
