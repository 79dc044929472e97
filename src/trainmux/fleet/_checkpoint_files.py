"""Checkpoints that survive a kill at any moment and never load damaged bytes.

A checkpoint is a directory: ``tensors-<token>.safetensors`` and ``checkpoint.json``, a record that names the
former and holds its checksum. The rename of the JSON file is the commit: until then the old JSON and the
tensors it names are untouched. Nothing is ever unpickled.

Tensors are read by the safetensors library and written by hand: only one tensor at a time is copied to the
host, the checksum covers the values that were meant rather than those read back, and a full disk is an
``OSError`` with its number.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from trainmux.errors import CheckpointError
from trainmux.ir import failure_reason, failure_remedy, file_format, load, replace_file, to_bytes

JSON_NAME = "checkpoint.json"

_TENSORS_NAME = re.compile(r"tensors-[0-9a-f]{16}\.safetensors")
_OUR_FILES = re.compile(
    rf"{_TENSORS_NAME.pattern}|\.({_TENSORS_NAME.pattern}|checkpoint\.json)\.[0-9a-f]{{16}}\.tmp"
)

_REPLACE = "Restore it from a copy, or train anew with resume=False"

_READ_ATTEMPTS = 5
"""A reader that meets a writer's clean-up looks again this often before it calls the file missing."""

# The codes that every safetensors release since 0.4.3 reads. Other dtypes are stored as bytes, and the
# checkpoint's JSON says what they are.
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

PathLike = str | os.PathLike[str]


@file_format("checkpoint", version=3, remedy=_REPLACE, error=CheckpointError)
@dataclass(frozen=True)
class _Checkpoint:
    """The JSON file: which tensors file belongs to it, and the document without its tensors.

    ``raw_tensors`` has dtype and shape of tensors that are stored as bytes.
    """

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
    inside: dict[str, torch.Tensor] = {}
    encoded = _encode(dict(document), inside)
    everything = {**tensors, **inside}
    _check_storable(everything)
    name = f"tensors-{secrets.token_hex(8)}.safetensors"
    try:
        # Durable before the JSON file that names it is.
        sha256, size_bytes, raw = replace_file(folder / name, lambda file: _write_tensors(file, everything))
        content = to_bytes(_Checkpoint(name, sha256, size_bytes, raw, encoded))
        replace_file(folder / JSON_NAME, lambda file: file.write(content))
    except BaseException as error:
        is_committed = _remove_unless_committed(folder, name)
        if not isinstance(error, OSError):
            raise
        if is_committed:
            kept = "The new checkpoint is in place but may not survive a power failure"
        else:
            kept = "The checkpoint that was there before, if any, is untouched"
        raise CheckpointError(
            f"cannot write the checkpoint {folder}: {failure_reason(error)}. {kept}. {failure_remedy(error)}"
        ) from error
    with suppress(OSError):  # what earlier checkpoints and killed writers left; else the next save removes it
        for entry in list(os.scandir(folder)):
            if _OUR_FILES.fullmatch(entry.name) and entry.name != name:
                with suppress(OSError):
                    os.unlink(entry.path)


def read_checkpoint(path: PathLike) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read the ``(tensors, document)`` last written to ``path``; tensors come back on the CPU.

    Raises ``CheckpointError``, naming the file, when there is none, when a checksum does not fit, and
    when the format is of another version.
    """
    folder = Path(path)
    for _ in range(_READ_ATTEMPTS):
        if not checkpoint_exists(folder):
            raise CheckpointError(
                f"there is no checkpoint: {folder / JSON_NAME} does not exist. Check the path"
            )
        checkpoint = load(folder / JSON_NAME, _Checkpoint)
        file = folder / checkpoint.tensors_file
        try:
            tensors = _read_tensors(file, checkpoint)
        except FileNotFoundError:
            continue  # a writer may have committed a newer checkpoint since, and removed this one's tensors
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {failure_reason(error)}") from error
        inside = {name: tensors.pop(name) for name in list(tensors) if name.startswith(_TENSOR_PREFIX)}
        document = _decode(checkpoint.document, inside)
        if not isinstance(document, dict):
            raise CheckpointError(f"{folder / JSON_NAME}: expected the document to be a dict. {_REPLACE}")
        return tensors, document
    raise CheckpointError(f"{file} is missing, though {JSON_NAME} names it. {_REPLACE}")


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


def _check_storable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse, by name, tensors that the file cannot hold; nothing is written or copied."""
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
            raise CheckpointError(
                f"tensor {name!r} is sparse, nested or quantized; a checkpoint holds dense tensors only. "
                "Convert it with .to_dense() or .dequantize() first"
            )
        if tensor.device.type == "meta":
            raise CheckpointError(f"tensor {name!r} is on the meta device and has no values to save")


def _write_tensors(
    file: BinaryIO, tensors: Mapping[str, torch.Tensor]
) -> tuple[str, int, dict[str, tuple[str, tuple[int, ...]]]]:
    """Write ``tensors`` by value, in row-major order; returns checksum, size, and the raw entries."""
    # Wide elements first: then each tensor starts at a multiple of its element's size.
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, Any] = {}
    raw: dict[str, tuple[str, tuple[int, ...]]] = {}
    offset = 0
    for name in names:
        tensor = tensors[name]
        code, shape = _CODES.get(tensor.dtype), list(tensor.shape)
        if code is None:
            raw[name] = (_DTYPE_NAMES[tensor.dtype], tuple(shape))
            code, shape = "U8", [tensor.nbytes]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    file.write(head)
    digest = hashlib.sha256(head)
    for name in names:
        flat = tensors[name].detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().data
        file.write(data)
        digest.update(data)
    return digest.hexdigest(), len(head) + offset, raw


def _read_tensors(file: Path, checkpoint: _Checkpoint) -> dict[str, torch.Tensor]:
    """Read all tensors into memory of their own, after checking the whole file; ``OSError`` passes."""
    expected = checkpoint.tensors_size_bytes
    with open(file, "rb") as opened:
        size_bytes = os.fstat(opened.fileno()).st_size
        if size_bytes != expected:
            raise CheckpointError(
                f"{file} is damaged: expected {expected} bytes, got {size_bytes}. {_REPLACE}"
            )
        if hashlib.file_digest(opened, "sha256").hexdigest() != checkpoint.tensors_sha256:
            raise CheckpointError(f"{file} is damaged: its checksum does not fit. {_REPLACE}")
    tensors: dict[str, torch.Tensor] = {}
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                # A copy: the library maps the file, which a later save removes.
                tensors[name] = opened.get_tensor(name).clone()
        for name, (dtype, shape) in checkpoint.raw_tensors.items():
            tensors[name] = tensors[name].view(_DTYPES[dtype]).reshape(shape)
    except (SafetensorError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as a safetensors file: {error}") from error
    return tensors


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
        with suppress(OSError):
            os.unlink(folder / tensors_name)
    return is_committed


# ---- documents ---------------------------------------------------------------------------------------------
#
# Plain JSON types stand for themselves. Everything else is an object with one key that starts with ``$``
# (``{"$tuple": [...]}``); a dict whose own keys could be mistaken for that is written as a list of pairs.
# Reading looks tags up in a closed table: nothing in a file can name code to run.

_TENSOR_PREFIX = "__document__."
"""Begins the names of tensors that were found inside a document."""

_MAX_DEPTH = 100
"""Levels: deep enough for any state dict, far below the recursion limits of Python and its JSON parser."""

_MAX_INT_BITS = 8192
"""Python refuses to read decimal texts of more than 4300 digits."""

_DTYPES = {
    str(item).removeprefix("torch."): item for item in vars(torch).values() if isinstance(item, torch.dtype)
}
"""By name, so that a file's text is looked up in a closed table and never as an attribute of a module."""

_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_CONTAINERS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "$tuple": (tuple, tuple),
    "$dict": (dict, dict),
    "$ordered": (OrderedDict, OrderedDict),
    "$counter": (Counter, lambda pairs: Counter(dict(pairs))),  # Counter(pairs) would count the pairs
}
_TAGS = {kind: tag for tag, (kind, _) in _CONTAINERS.items()}


def _encode(value: Any, tensors: dict[str, torch.Tensor], path: str = "", depth: int = 0) -> Any:
    """Turn a document into a JSON value and add the tensors inside to ``tensors``.

    Refuses, naming the path to it, what a checkpoint cannot hold.
    """
    if depth > _MAX_DEPTH:
        raise CheckpointError(
            f"the checkpoint document is nested deeper than {_MAX_DEPTH} levels at {path[:80]!r}…; "
            "does a list or dict contain itself?"
        )
    if isinstance(value, np.generic):
        value = value.item()  # extended precision has no Python counterpart, stays as it is and is refused
    kind = type(value)
    if kind is int and value.bit_length() > _MAX_INT_BITS:
        raise CheckpointError(f"a checkpoint cannot hold {path}: an int of more than {_MAX_INT_BITS} bits")
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, torch.Tensor):
        name = f"{_TENSOR_PREFIX}{len(tensors)}"
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, torch.dtype):
        return {"$dtype": _DTYPE_NAMES[value]}

    def items(values: Iterable[Any]) -> list[Any]:
        return [_encode(item, tensors, f"{path}[{index}]", depth + 1) for index, item in enumerate(values)]

    if kind is list:
        return items(value)
    if kind is tuple:
        return {"$tuple": items(value)}
    if kind is deque:
        return {"$deque": [value.maxlen, items(value)]}
    if kind not in _TAGS:
        raise CheckpointError(
            f"a checkpoint cannot hold {path or 'the document'}, a {kind.__module__}.{kind.__qualname__}: "
            "expected None, bool, int, float, str, list, tuple, dict, Counter, deque, torch dtype or tensor. "
            "Convert it to one of these, or leave it out of the state"
        )
    pairs = []
    for key, item in value.items():
        # A tensor is hashable only by identity, so as a key it would not be found again after reading.
        if isinstance(key, torch.Tensor):
            raise CheckpointError(f"a checkpoint cannot hold a tensor as a key of {path or 'the document'}")
        found = _encode(item, tensors, _child(path, key), depth + 1)
        pairs.append([_encode(key, tensors, f"{path}.<key>", depth + 1), found])
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return dict(pairs)
    return {_TAGS[kind]: pairs}


def _decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Undo `_encode`; ``tensors`` holds those it took out.

    Raises ``CheckpointError`` for a value that `_encode` never writes.
    """
    try:
        return _decoded(value, tensors)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the checkpoint's document is malformed, or of a torch with other dtypes: {error!r}"
        ) from error


def _decoded(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: _decoded(item, tensors) for key, item in value.items()}
    if len(value) != 1:
        raise ValueError(f"{tag} stands with other keys")
    content = value[tag]
    if tag == "$tensor":
        return tensors[content]
    if tag == "$float":
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[content]
    if tag == "$dtype":
        return _DTYPES[content]
    if tag == "$deque":
        maxlen, items = content
        return deque(_decoded(items, tensors), maxlen)
    return _CONTAINERS[tag][1](_decoded(content, tensors))


def _child(path: str, key: Any) -> str:
    if isinstance(key, str) and key.isidentifier():
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"
