"""Tensors → one safetensors file, streamed and hashed on the way; and back.

The writer is our own, where reading is the library's, for three reasons: only one tensor at a time is
copied to the host, the checksum covers what was meant rather than what was read back, and a full disk
is an ``OSError`` with its number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from trainmux.errors import CheckpointError

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

_METADATA_KEY = "__metadata__"

# By name, so that a file's text is looked up in a closed table and never as an attribute of a module.
_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


RawTensor = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class TensorFile:
    """A written file: its checksum and size, and ``{name: (dtype, shape)}`` of raw entries."""

    sha256: str
    size_bytes: int
    raw: Mapping[str, RawTensor]


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """``torch.float32`` for ``"float32"``; raises ``CheckpointError`` for one this torch does not have."""
    if name not in _DTYPES:
        raise CheckpointError(
            f"the checkpoint holds the dtype {name!r}, which torch {torch.__version__} does not have. "
            "Read it with the torch release that wrote it"
        )
    return _DTYPES[name]


def write_tensors(file: BinaryIO, tensors: Mapping[str, torch.Tensor]) -> TensorFile:
    """Write ``tensors`` to ``file`` in the safetensors format.

    Each tensor is written by value, in row-major order: views of one storage become separate tensors.
    Call ``check_storable`` first; ``OSError`` passes through.
    """
    # Wide elements first: then each tensor starts at a multiple of its element's size.
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, Any] = {}
    raw: dict[str, RawTensor] = {}
    offset = 0
    for name in names:
        tensor = tensors[name]
        size_bytes = tensor.numel() * tensor.element_size()
        code, shape = _CODES.get(tensor.dtype), list(tensor.shape)
        if code is None:
            raw[name] = (dtype_name(tensor.dtype), tuple(shape))
            code, shape = "U8", [size_bytes]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, offset + size_bytes]}
        offset += size_bytes

    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    size_bytes = 0
    head = len(text).to_bytes(8, "little") + text
    file.write(head)
    digest.update(head)
    size_bytes += len(head)
    for name in names:
        data = _bytes_of(tensors[name])
        file.write(data)
        digest.update(data)
        size_bytes += data.nbytes
    return TensorFile(digest.hexdigest(), size_bytes, raw)


def check_names(names: Iterable[str], reserved_prefix: str) -> None:
    """Refuse names that the file cannot hold, or that start with ``reserved_prefix``."""
    for name in names:
        if not isinstance(name, str) or name == _METADATA_KEY or name.startswith(reserved_prefix):
            raise CheckpointError(
                f"{name!r} cannot name a tensor in a checkpoint: names are texts, {_METADATA_KEY!r} and "
                f"{reserved_prefix!r}… are taken. Rename it"
            )
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise CheckpointError(f"the tensor name {name!r} is not valid Unicode. Rename it") from error


def check_storable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse, by name, tensors that the file cannot hold; nothing is written or copied."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"expected a tensor under {name!r}, got {type(tensor).__name__}; "
                "other values belong in the checkpoint's document"
            )
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
            raise CheckpointError(
                f"tensor {name!r} is sparse, nested or quantized; a checkpoint holds dense tensors only. "
                "Convert it with .to_dense() or .dequantize() first"
            )
        if tensor.device.type == "meta":
            raise CheckpointError(f"tensor {name!r} is on the meta device and has no values to save")


def read_tensors(path: Path, raw: Mapping[str, RawTensor]) -> dict[str, torch.Tensor]:
    """All tensors of the file, on the CPU, in memory of their own; ``raw`` as ``write_tensors`` gave it.

    Raises ``CheckpointError`` where the file is not what the writer writes; ``OSError`` passes through.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                # A copy: the library maps the file, which a later save removes.
                tensors[name] = file.get_tensor(name).clone()
        for name, (dtype, shape) in raw.items():
            tensors[name] = tensors[name].view(dtype_named(dtype)).reshape(shape)
    except (SafetensorError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}") from error
    return tensors


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
