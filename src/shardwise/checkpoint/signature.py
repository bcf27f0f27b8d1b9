"""Signatures: whether a checkpoint that changed hands is the one that was signed.

Hashes in the manifest show damage, not malice: whoever can write a checkpoint can write its
manifest. A signature is an HMAC-SHA256 of the manifest, which hashes every other file, with a key
that the user holds. Whoever can verify with a key can also sign with it. Needs no torch.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from shlex import quote

from shardwise.checkpoint.durable_files import (
    read_small,
    sync_directory,
    validate_absent,
    write_file,
)
from shardwise.checkpoint.manifest import MANIFEST_NAME, SIGNATURE_NAME
from shardwise.errors import ExitCode, UserError

# This prefix keeps the signature apart from anything else that is signed with the same key.
_PURPOSE = b"shardwise checkpoint 1\n"
_MIN_KEY_BYTES, _MAX_KEY_BYTES = 32, 64 * 1024
_MAX_MANIFEST_BYTES = 64 * 2**20


def read_key(path: Path) -> bytes:
    """The bytes of a key file."""
    try:
        key = read_small(path.resolve(), _MAX_KEY_BYTES)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the key {path} cannot be read: {getattr(error, 'strerror', None) or error}",
            fix="name the file that holds your key: --key FILE",
            code=ExitCode.ENVIRONMENT,
        ) from error
    if len(key) < _MIN_KEY_BYTES:
        raise UserError(
            f"the key {path} has {len(key)} bytes, but a key needs at least {_MIN_KEY_BYTES}",
            fix="make one, and keep it where only you can read it: head -c 32 /dev/urandom > FILE",
        )
    return key


def sign(directory: Path, key: bytes) -> None:
    """Write manifest.hmac into a checkpoint that has none."""
    path = directory / SIGNATURE_NAME
    try:
        write_file(path, f"{_signature_of(directory, key)}\n".encode())
        sync_directory(directory)
    except FileExistsError as error:
        raise UserError(
            f"{directory} is signed already",
            why="nothing in a checkpoint is overwritten",
            fix=f"to sign it with another key, remove that signature: rm {quote(str(path))}",
        ) from error
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror}",
            fix="sign a copy in a directory that you may write to, on a disk that has room",
            code=ExitCode.ENVIRONMENT,
        ) from error


def why_not_signed(directory: Path, key: bytes) -> str | None:
    """Why this manifest is not one that was signed with `key`; None where it is."""
    path = directory / SIGNATURE_NAME
    try:
        found, right = read_small(path, 1024).strip(), _signature_of(directory, key).encode()
    except OSError as error:
        validate_absent(path, error)
        return f"{SIGNATURE_NAME}: the checkpoint is not signed"
    except ValueError as error:
        return f"{SIGNATURE_NAME}: {error}"
    if not hmac.compare_digest(found, right):
        return (
            f"{SIGNATURE_NAME}: another key signed it, or the checkpoint was altered after it was "
            "signed"
        )
    return None


def _signature_of(directory: Path, key: bytes) -> str:
    manifest = read_small(directory / MANIFEST_NAME, _MAX_MANIFEST_BYTES)
    return hmac.new(key, _PURPOSE + manifest, hashlib.sha256).hexdigest()
