"""Checkpoints that survive a kill at any moment and never load damaged bytes.

A checkpoint is a directory: ``tensors-<token>.safetensors`` and ``checkpoint.json``, which names the
former and holds its checksum. Both are written under a temporary name, flushed to disk and renamed; the
rename of the JSON file is the commit. Until then the old JSON and the tensors it names are untouched.
Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainmux.errors import CheckpointError
from trainmux.training._codec import DocumentEncoder, decode
from trainmux.training._tensor_file import check_names, check_storable, read_tensors, write_tensors

FORMAT = "trainmux-checkpoint"
VERSION = 1
JSON_NAME = "checkpoint.json"

_DOCUMENT_PREFIX = "__document__."
_TENSORS_NAME = re.compile(r"tensors-[0-9a-f]{16}\.safetensors")
_OUR_FILES = re.compile(r"tensors-[0-9a-f]{16}\.safetensors(\.tmp)?|checkpoint-[0-9a-f]{16}\.json\.tmp")

_BODY_TYPES = {
    "tensors_file": str,
    "tensors_sha256": str,
    "tensors_size_bytes": int,
    "raw_tensors": dict,
    "document": dict,
}

_REPLACE = "Restore it from a copy, or train anew with resume=False"

# A reader that meets a writer's clean-up looks again this often before it calls the file missing.
_READ_ATTEMPTS = 5

PathLike = str | os.PathLike[str]


def write_checkpoint(
    path: PathLike, tensors: Mapping[str, torch.Tensor], document: Mapping[str, Any]
) -> None:
    """Replace the checkpoint in the directory ``path`` (made if need be) in one atomic step.

    ``document`` may hold None, bool, int, float, str, list, tuple, dict with any plain keys, Counter,
    deque, OrderedDict, numpy scalars (read back as Python's), torch.dtype, and tensors anywhere inside.
    Tensors are saved by value: device, strides, ``requires_grad`` and shared storage are not kept.

    Raises ``CheckpointError`` for what cannot be stored and for every failure of the file system; the
    checkpoint that was there before can then still be read, and no temporary files remain. One process
    may write to a directory at a time; any number may read.
    """
    folder = Path(path)
    encoder = DocumentEncoder(_DOCUMENT_PREFIX)
    encoded = encoder.encode(document)
    check_names(tensors, reserved_prefix=_DOCUMENT_PREFIX)
    everything = {**tensors, **encoder.tensors}
    check_storable(everything)

    token = secrets.token_hex(8)
    tensors_name = f"tensors-{token}.safetensors"
    tensors_temp = folder / f"{tensors_name}.tmp"
    json_temp = folder / f"checkpoint-{token}.json.tmp"
    try:
        _make_folder(folder)
        with open(tensors_temp, "xb") as file:
            written = write_tensors(file, everything)
            file.flush()
            os.fsync(file.fileno())
        os.replace(tensors_temp, folder / tensors_name)
        # The tensors' directory entry must be on disk before a JSON file that names them is.
        _sync_folder(folder)
        body = {
            "tensors_file": tensors_name,
            "tensors_sha256": written.sha256,
            "tensors_size_bytes": written.size_bytes,
            "raw_tensors": dict(written.raw),
            "document": encoded,
        }
        with open(json_temp, "xb") as file:
            file.write(_seal(body))
            file.flush()
            os.fsync(file.fileno())
        os.replace(json_temp, folder / JSON_NAME)
        _sync_folder(folder)
    except OSError as error:
        committed = _remove_own(folder, token)
        raise _write_error(folder, error, committed) from error
    except BaseException:
        _remove_own(folder, token)
        raise
    _sweep(folder, keep=tensors_name)


def read_checkpoint(path: PathLike) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The ``(tensors, document)`` last written to ``path``; tensors come back on the CPU.

    Raises ``CheckpointError``, naming the file, when there is none, when a checksum does not fit, and
    when the format is of another version.
    """
    folder = Path(path)
    seen = ""
    for _ in range(_READ_ATTEMPTS):
        body = _read_json(folder / JSON_NAME)
        name = body["tensors_file"]
        try:
            everything = _read_verified(folder / name, body)
        except FileNotFoundError as error:
            # A writer may have committed a newer checkpoint since, and removed this one's tensors.
            if name == seen:
                raise CheckpointError(
                    f"{folder / name} is missing, though {JSON_NAME} names it. Restore it, or train anew "
                    "with resume=False"
                ) from error
            seen = name
            continue
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {_reason(error)}") from error
        inside = {
            name: everything.pop(name) for name in list(everything) if name.startswith(_DOCUMENT_PREFIX)
        }
        document = decode(body["document"], inside)
        if not isinstance(document, dict):
            raise CheckpointError(f"{folder / JSON_NAME}: expected the document to be a dict")
        return everything, document
    raise CheckpointError(f"{folder} is being overwritten faster than it can be read. Try again later")


def checkpoint_exists(path: PathLike) -> bool:
    """Whether ``path`` holds a checkpoint, damaged or not.

    Raises ``CheckpointError`` where that cannot be found out (no permission, a network file system
    away): to answer no would let a training run start over on top of it.
    """
    file = Path(path) / JSON_NAME
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be looked up: {_reason(error)}. Check the path's rights"
        ) from error
    return True


def _canonical(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _seal(body: dict[str, Any]) -> bytes:
    sealed = {"format": FORMAT, "version": VERSION, "sha256": hashlib.sha256(_canonical(body)).hexdigest()}
    return _canonical({**sealed, "body": body})


def _read_json(file: Path) -> dict[str, Any]:
    try:
        raw = file.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint: {file} does not exist. Check the path") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {_reason(error)}") from error
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: it is not valid JSON ({error}). {_REPLACE}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{file} is not a trainmux checkpoint, or it is damaged. {_REPLACE}")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{file} has format version {content.get('version')!r}, this trainmux reads version {VERSION}. "
            "Read it with the release that wrote it"
        )
    # Byte for byte what the writer makes of this body: so no flipped bit passes, not even one that
    # leaves the parsed value as it was.
    body = content.get("body")
    if not isinstance(body, dict) or _seal(body) != raw:
        raise CheckpointError(f"{file} is damaged or was edited: its checksum does not fit. {_REPLACE}")
    if not all(isinstance(body.get(key), kind) for key, kind in _BODY_TYPES.items()):
        raise CheckpointError(f"{file} is malformed: expected {', '.join(_BODY_TYPES)}. {_REPLACE}")
    # A name, never a path: a checkpoint cannot point outside its own directory.
    if not _TENSORS_NAME.fullmatch(body["tensors_file"]):
        raise CheckpointError(f"{file} names {body['tensors_file']!r} as its tensors file, which is refused")
    return body


def _read_verified(file: Path, body: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    expected = body["tensors_size_bytes"]
    with open(file, "rb") as opened:
        size_bytes = os.fstat(opened.fileno()).st_size
        if size_bytes != expected:
            raise CheckpointError(
                f"{file} is damaged: expected {expected} bytes, got {size_bytes}. {_REPLACE}"
            )
        if hashlib.file_digest(opened, "sha256").hexdigest() != body["tensors_sha256"]:
            raise CheckpointError(f"{file} is damaged: its checksum does not fit. {_REPLACE}")
    return read_tensors(file, body["raw_tensors"])


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # directories cannot be opened there; renames are journaled
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and user-space file systems know no fsync of a directory; nothing can be done.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _remove_own(folder: Path, token: str) -> bool:
    """After a failure: remove this write's files. Returns whether the write was committed all the same.

    The disk is asked, not a flag: an interrupt may strike between the rename and the next line.
    """
    tensors_name = f"tensors-{token}.safetensors"
    names = [f"{tensors_name}.tmp", f"checkpoint-{token}.json.tmp"]
    try:
        committed = tensors_name.encode() in (folder / JSON_NAME).read_bytes()
        if not committed:
            names.append(tensors_name)
    except (FileNotFoundError, NotADirectoryError):
        committed = False
        names.append(tensors_name)
    except OSError:
        committed = False  # not known: the tensors stay, the next save removes them if they are not needed
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(folder / name)
    return committed


def _sweep(folder: Path, keep: str) -> None:
    """Remove what earlier checkpoints and killed writers left. A failure waits for the next save."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder)):
            if _OUR_FILES.fullmatch(entry.name) and entry.name != keep:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)


def _write_error(folder: Path, error: OSError, committed: bool) -> CheckpointError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = (
            "Free space there (old and new checkpoint exist side by side for a moment), or use another disk"
        )
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        remedy = "Make the directory writable, or save elsewhere"
    elif error.errno in (errno.EEXIST, errno.ENOTDIR):
        remedy = "The path has to be a directory: name another one"
    else:
        remedy = "Check the disk, or save elsewhere"
    if committed:
        kept = "The new checkpoint is in place but may not survive a power failure"
    else:
        kept = "The checkpoint that was there before, if any, is untouched"
    return CheckpointError(f"cannot write the checkpoint {folder}: {_reason(error)}. {kept}. {remedy}")


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
