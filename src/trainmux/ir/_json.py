"""Profiles, plans and programs as JSON, exactly, both ways; files that are whole or not there.

A document names its kind and format version and carries a checksum of its contents. Rows of like records
are tables: the columns once, then one row per line. Numbers come back as they were, floats bit by bit; what
is not finite, which JSON does not know, is written as text. Reading follows the records' own types: nothing
in a file can name code to run, and whatever does not fit is refused with `PlanError`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from trainmux.errors import PlanError
from trainmux.ir._plan import Plan
from trainmux.ir._profile import Profile
from trainmux.ir._program import Program

Record = TypeVar("Record", Profile, Plan, Program)

_VERSION = 1
_KINDS: dict[type, str] = {Profile: "profile", Plan: "plan", Program: "program"}
_REMEDIES = {"profile": "profile again", "plan": "plan again and save it anew", "program": "rewrite its plan"}
_LINE_WIDTH = 110
_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def to_json(record: Profile | Plan | Program) -> str:
    """A document from which `from_json` makes an equal record.

    Refused with `PlanError`: a record of another kind, and a field whose value is not of its type.
    """
    kind = _kind_of(type(record))
    try:
        content = _codec(type(record)).encode(record)
    except _MisfitError as misfit:
        raise PlanError(
            f"expected a {kind} with every field of its type, but {misfit.describe(kind)}; convert it"
        ) from None
    head = f'"trainmux": "{kind}", "version": {_VERSION}, "sha256": "{_checksum(kind, content)}"'
    return f'{{{head},\n"{kind}": {_lay_out(content, 1)}}}\n'


def from_json(text: str | bytes, kind: type[Record]) -> Record:
    """The record of type ``kind`` that ``text`` holds.

    Refused with `PlanError`, saying what was expected and got: text that is truncated or edited, a document
    of another kind, one of another format version.
    """
    return _read(text, kind, "the text")


def save(path: str | os.PathLike[str], record: Profile | Plan | Program) -> None:
    """Write ``record`` to the file ``path``, replacing one that is there in one step.

    Whoever reads meanwhile sees the old file or the new one; after a failure, which raises `PlanError`, the
    old one.
    """
    target = Path(path)
    document = to_json(record).encode("ascii")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        try:
            with open(temporary, "xb") as file:
                file.write(document)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise PlanError(
            f"expected to write a {_kind_of(type(record))} to {target}, but got: {error.strerror or error}; "
            "name a file in a folder that exists and can be written to"
        ) from error


def load(path: str | os.PathLike[str], kind: type[Record]) -> Record:
    """The record of type ``kind`` in the file ``path``; refuses what `from_json` refuses, and says where."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise PlanError(
            f"expected a {_kind_of(kind)} in {os.fspath(path)}, but got: {error.strerror or error}; "
            f"name a file that `save` wrote"
        ) from error
    return _read(text, kind, os.fspath(path))


def _kind_of(record_type: type) -> str:
    if record_type not in _KINDS:
        raise PlanError(
            f"expected one of {', '.join(known.__name__ for known in _KINDS)}, but got "
            f"{record_type.__name__}; only these have a form as a file"
        )
    return _KINDS[record_type]


def _checksum(kind: str, content: Any) -> str:
    canonical = json.dumps([kind, _VERSION, content], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _read(text: str | bytes, record_type: type[Record], where: str) -> Record:
    kind = _kind_of(record_type)

    def refuse(got: str) -> NoReturn:
        raise PlanError(f"expected a {kind} in {where}, but {got}; {_REMEDIES[kind]}") from None

    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        refuse(f"got text that is truncated or edited: {reason}")
    if not isinstance(document, dict) or not isinstance(document.get("trainmux"), str):
        refuse("got JSON that trainmux did not write")
    if document["trainmux"] != kind:
        refuse(f"got a {document['trainmux'][:40]!r} document")
    if type(document.get("version")) is not int or document["version"] != _VERSION:
        refuse(f"got format version {document.get('version')!r:.40}, and this trainmux reads {_VERSION}")
    if set(document) != {"trainmux", "version", "sha256", kind}:
        refuse(f"got the keys {', '.join(sorted(document))[:80]}")
    try:
        checksum = _checksum(kind, document[kind])
    except (ValueError, RecursionError):
        refuse("got contents that cannot be checked")
    if document["sha256"] != checksum:
        refuse("got one that was edited since it was written: its checksum does not fit")
    try:
        record: Record = _codec(record_type).decode(document[kind])
    except _MisfitError as misfit:
        refuse(misfit.describe(kind))
    return record


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


class _MisfitError(Exception):
    """A value that is not of its type; the path to it grows on the way out."""

    def __init__(self, expected: str, got: object) -> None:
        super().__init__()
        self._expected = expected
        self._got = f"{type(got).__name__} {got!r:.60}"
        self._path: list[str] = []

    def inside(self, step: str) -> _MisfitError:
        self._path.append(step)
        return self

    def describe(self, root: str) -> str:
        path = "".join(reversed(self._path))
        return f"{root}{path} must be {self._expected} and is {self._got}"


@dataclass(frozen=True)
class _Codec:
    """Record values to JSON values and back; both raise `_MisfitError`."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def _make_codec(hint: Any) -> _Codec:
    """How values of a type are written: of the types that records are made of, and no others."""
    if hint is float:
        return _Codec(_encode_float, _decode_float)
    if hint in (int, str, bool):
        same = _same(hint)
        return _Codec(same, same)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _object(hint)
    if get_origin(hint) is tuple:
        items = get_args(hint)
        if items[-1] is not Ellipsis:
            return _fixed_tuple(items)
        if isinstance(items[0], type) and dataclasses.is_dataclass(items[0]):
            return _table(items[0])
        if isinstance(items[0], UnionType):
            return _verbs(get_args(items[0]))
        return _long_tuple(items[0])
    raise TypeError(f"records with a field of type {hint} have no JSON form")


_codec: Callable[[Any], _Codec] = cache(_make_codec)


def _same(expected: type) -> Callable[[Any], Any]:
    def same(value: Any) -> Any:
        if type(value) is not expected:
            raise _MisfitError(expected.__name__, value)
        return value

    return same


def _encode_float(value: Any) -> float | int | str:
    if type(value) is float:
        return value if math.isfinite(value) else repr(value)
    if type(value) is int:
        return value
    raise _MisfitError("float", value)


def _decode_float(value: Any) -> float:
    if type(value) is float or type(value) is int:
        return value
    if isinstance(value, str) and value in _NON_FINITE:
        return _NON_FINITE[value]
    raise _MisfitError("float", value)


def _enum(enum: type[Enum]) -> _Codec:
    members = {member.value: member for member in enum}

    def encode(value: Any) -> Any:
        if type(value) is not enum:
            raise _MisfitError(enum.__name__, value)
        return value.value

    def decode(value: Any) -> Enum:
        if not isinstance(value, str) or value not in members:
            raise _MisfitError(f"one of {', '.join(members)}", value)
        return members[value]

    return _Codec(encode, decode)


def _field_codecs(record: Any) -> tuple[tuple[str, _Codec], ...]:
    hints = get_type_hints(record)
    return tuple((field.name, _codec(hints[field.name])) for field in dataclasses.fields(record))


_fields: Callable[[Any], tuple[tuple[str, _Codec], ...]] = cache(_field_codecs)


def _encode_row(record: type, value: Any) -> list[Any]:
    """The values of a record's fields, in their order."""
    if type(value) is not record:
        raise _MisfitError(record.__name__, value)
    row = []
    for name, codec in _fields(record):
        try:
            row.append(codec.encode(getattr(value, name)))
        except _MisfitError as misfit:
            raise misfit.inside(f".{name}") from None
    return row


def _decode_row(record: type, values: list[Any]) -> Any:
    fields = _fields(record)
    if len(values) != len(fields):
        raise _MisfitError(f"{len(fields)} values of a {record.__name__}", values)
    row = []
    for (name, codec), value in zip(fields, values, strict=True):
        try:
            row.append(codec.decode(value))
        except _MisfitError as misfit:
            raise misfit.inside(f".{name}") from None
    return record(*row)


def _names(record: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(record)]


def _object(record: type) -> _Codec:
    """An object of which a field that has a default may be missing: it is younger than the document."""
    names, defaults = _names(record), _defaults(record)

    def encode(value: Any) -> dict[str, Any]:
        return dict(zip(names, _encode_row(record, value), strict=True))

    def decode(value: Any) -> Any:
        known = {**defaults, **value} if isinstance(value, dict) else {}
        if known.keys() != set(names):
            raise _MisfitError(f"an object with the keys {', '.join(names)}", value)
        return _decode_row(record, [known[name] for name in names])

    return _Codec(encode, decode)


def _defaults(record: type) -> dict[str, Any]:
    """As they would be written."""
    return {
        field.name: list(field.default) if isinstance(field.default, tuple) else field.default
        for field in dataclasses.fields(record)
        if isinstance(field.default, bool | int | float | tuple)
    }


class _Rows(list[Any]):
    """A list that is laid out with one element per line."""


def _table(record: type) -> _Codec:
    """Rows under the names of their columns, of which the last may be missing where they have defaults."""
    columns, defaults = _names(record), _defaults(record)

    def encode(value: Any) -> dict[str, Any]:
        return {
            "columns": columns,
            "rows": _Rows(_each(value, lambda item: _encode_row(record, item), tuple)),
        }

    def decode(value: Any) -> tuple[Any, ...]:
        there = (
            value.get("columns") if isinstance(value, dict) and value.keys() == {"columns", "rows"} else None
        )
        count = len(there) if isinstance(there, list) else 0
        missing = columns[count:]
        if there != columns[:count] or not all(name in defaults for name in missing):
            raise _MisfitError(f"a table with the columns {', '.join(columns)}", value)
        younger = [defaults[name] for name in missing]
        return tuple(_each(value["rows"], lambda row: _decode_row(record, [*_a_list(row), *younger]), list))

    return _Codec(encode, decode)


def _verbs(records: tuple[type, ...]) -> _Codec:
    """Records of several types in one row: each is a list that begins with the name of its type."""
    by_name = {record.__name__: record for record in records}

    def encode_one(value: Any) -> list[Any]:
        if type(value) not in records:
            raise _MisfitError(f"one of {', '.join(by_name)}", value)
        return [type(value).__name__, *_encode_row(type(value), value)]

    def decode_one(value: Any) -> Any:
        row = _a_list(value)
        if not row or not isinstance(row[0], str) or row[0] not in by_name:
            raise _MisfitError(f"a list that begins with one of {', '.join(by_name)}", value)
        return _decode_row(by_name[row[0]], row[1:])

    return _Codec(
        lambda value: _Rows(_each(value, encode_one, tuple)),
        lambda value: tuple(_each(value, decode_one, list)),
    )


def _long_tuple(item: Any) -> _Codec:
    codec = _codec(item)
    return _Codec(
        lambda value: _each(value, codec.encode, tuple),
        lambda value: tuple(_each(value, codec.decode, list)),
    )


def _fixed_tuple(items: tuple[Any, ...]) -> _Codec:
    codecs = [_codec(item) for item in items]

    def encode(value: Any) -> list[Any]:
        if not isinstance(value, tuple) or len(value) != len(codecs):
            raise _MisfitError(f"a tuple of {len(codecs)}", value)
        return [codec.encode(item) for codec, item in zip(codecs, value, strict=True)]

    def decode(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(codecs):
            raise _MisfitError(f"a list of {len(codecs)}", value)
        return tuple(codec.decode(item) for codec, item in zip(codecs, value, strict=True))

    return _Codec(encode, decode)


def _each(
    value: Any, convert: Callable[[Any], Any], sequence: type[list[Any]] | type[tuple[Any, ...]]
) -> list[Any]:
    if not isinstance(value, sequence):
        raise _MisfitError(f"a {sequence.__name__}", value)
    converted = []
    try:
        for item in value:
            converted.append(convert(item))
    except _MisfitError as misfit:
        raise misfit.inside(f"[{len(converted)}]") from None
    return converted


def _a_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _MisfitError("a list", value)
    return value


def _lay_out(value: Any, depth: int) -> str:
    """JSON text: an object's keys and a table's rows on a line each, long lists broken into lines."""
    margin = " " * depth
    if isinstance(value, dict):
        lines = [f"{json.dumps(key)}: {_lay_out(item, depth + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(margin + line for line in lines) + "}"
    text = json.dumps(value)
    if not isinstance(value, list) or len(margin) + len(text) <= _LINE_WIDTH:
        return text
    lines = [""]
    for item in map(json.dumps, value):
        if isinstance(value, _Rows) or len(margin) + len(lines[-1]) + len(item) > _LINE_WIDTH:
            lines.append("")
        lines[-1] += f"{item}, "
    return "[\n" + "\n".join(margin + line.rstrip() for line in lines if line).rstrip(",") + "]"
