"""Checkpoints that survive a kill at any moment and never load damaged bytes.

A checkpoint is a directory: ``tensors-<token>.safetensors`` and ``checkpoint.json``, a record that names the
former and holds its checksum. The rename of the JSON file is the commit: until then the old JSON and the
tensors it names are untouched. Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainmux.errors import CheckpointError
from trainmux.fleet._codec import DocumentEncoder, decode
from trainmux.fleet._tensor_file import check_names, check_storable, read_tensors, write_tensors
from trainmux.ir import failure_reason, failure_remedy, file_format, load, replace_file, to_bytes

JSON_NAME = "checkpoint.json"

_DOCUMENT_PREFIX = "__document__."
_TENSORS_NAME = re.compile(r"tensors-[0-9a-f]{16}\.safetensors")
_OUR_FILES = re.compile(
    r"tensors-[0-9a-f]{16}\.safetensors|\.(tensors-[0-9a-f]{16}\.safetensors|checkpoint\.json)\.[0-9a-f]{16}\.tmp"
)

_REPLACE = "Restore it from a copy, or train anew with resume=False"

# A reader that meets a writer's clean-up looks again this often before it calls the file missing.
_READ_ATTEMPTS = 5

PathLike = str | os.PathLike[str]


@file_format("checkpoint", version=2, remedy=_REPLACE, error=CheckpointError)
@dataclass(frozen=True)
class _Checkpoint:
    """The JSON file: which tensors file belongs to it, and the document without its tensors."""

    tensors_file: str
    tensors_sha256: str
    tensors_size_bytes: int
    raw_tensors: dict[str, tuple[str, tuple[int, ...]]]
    document: Any

    def __post_init__(self) -> None:
        # A name, never a path: a checkpoint cannot point outside its own directory.
        if not _TENSORS_NAME.fullmatch(self.tensors_file):
            raise ValueError(f"names {self.tensors_file!r:.80} as its tensors file, which is refused")


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

    tensors_name = f"tensors-{secrets.token_hex(8)}.safetensors"
    try:
        # Durable before the JSON file that names it is.
        written = replace_file(folder / tensors_name, lambda file: write_tensors(file, everything))
        content = to_bytes(
            _Checkpoint(tensors_name, written.sha256, written.size_bytes, dict(written.raw), encoded)
        )
        replace_file(folder / JSON_NAME, lambda file: file.write(content))
    except BaseException as error:
        is_committed = _remove_unless_committed(folder, tensors_name)
        if not isinstance(error, OSError):
            raise
        if is_committed:
            kept = "The new checkpoint is in place but may not survive a power failure"
        else:
            kept = "The checkpoint that was there before, if any, is untouched"
        raise CheckpointError(
            f"cannot write the checkpoint {folder}: {failure_reason(error)}. {kept}. {failure_remedy(error)}"
        ) from error
    _sweep(folder, keep=tensors_name)


def read_checkpoint(path: PathLike) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The ``(tensors, document)`` last written to ``path``; tensors come back on the CPU.

    Raises ``CheckpointError``, naming the file, when there is none, when a checksum does not fit, and
    when the format is of another version.
    """
    folder = Path(path)
    seen = ""
    for _ in range(_READ_ATTEMPTS):
        if not checkpoint_exists(folder):
            raise CheckpointError(
                f"there is no checkpoint: {folder / JSON_NAME} does not exist. Check the path"
            )
        checkpoint = load(folder / JSON_NAME, _Checkpoint)
        file = folder / checkpoint.tensors_file
        try:
            everything = _read_verified(file, checkpoint)
        except FileNotFoundError as error:
            # A writer may have committed a newer checkpoint since, and removed this one's tensors.
            if file.name == seen:
                raise CheckpointError(
                    f"{file} is missing, though {JSON_NAME} names it. {_REPLACE}"
                ) from error
            seen = file.name
            continue
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {failure_reason(error)}") from error
        inside = {
            name: everything.pop(name) for name in list(everything) if name.startswith(_DOCUMENT_PREFIX)
        }
        document = decode(checkpoint.document, inside)
        if not isinstance(document, dict):
            raise CheckpointError(f"{folder / JSON_NAME}: expected the document to be a dict. {_REPLACE}")
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
            f"{file} cannot be looked up: {failure_reason(error)}. Check the path's rights"
        ) from error
    return True


def _read_verified(file: Path, checkpoint: _Checkpoint) -> dict[str, torch.Tensor]:
    expected = checkpoint.tensors_size_bytes
    with open(file, "rb") as opened:
        size_bytes = os.fstat(opened.fileno()).st_size
        if size_bytes != expected:
            raise CheckpointError(
                f"{file} is damaged: expected {expected} bytes, got {size_bytes}. {_REPLACE}"
            )
        if hashlib.file_digest(opened, "sha256").hexdigest() != checkpoint.tensors_sha256:
            raise CheckpointError(f"{file} is damaged: its checksum does not fit. {_REPLACE}")
    return read_tensors(file, checkpoint.raw_tensors)


def _remove_unless_committed(folder: Path, tensors_name: str) -> bool:
    """After a failure, remove this write's tensors, unless the JSON file that names them is in place.

    The disk is asked, not a flag: an interrupt may strike between the rename and the next line.
    """
    try:
        is_committed = tensors_name.encode() in (folder / JSON_NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        is_committed = False
    except OSError:
        return False  # not known: the tensors stay, the next save removes them if they are not needed
    if not is_committed:
        with contextlib.suppress(OSError):
            os.unlink(folder / tensors_name)
    return is_committed


def _sweep(folder: Path, keep: str) -> None:
    """Remove what earlier checkpoints and killed writers left. A failure waits for the next save."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder)):
            if _OUR_FILES.fullmatch(entry.name) and entry.name != keep:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
