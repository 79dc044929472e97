"""Frozen records ↔ JSON values, exactly, both ways, driven by the records' type hints.

A record is an object, a tuple of records of one type a table (column names once, then rows), a member of a
union a list that starts with its type's name. Floats come back bit by bit; non-finite ones, which JSON does
not know, are written as text. Reading is strict: a missing field, an unknown field or a value of another type
raises `Misfit` with the path to it, and nothing in a file can name code to run.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class Misfit(Exception):  # noqa: N818 - always turned into a typed error of the package
    """A value that does not fit its type; the path to it grows on the way out."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self._path = ""

    def inside(self, step: str) -> Misfit:
        self._path = step + self._path
        return self

    def describe(self, root: str) -> str:
        return f"{root}{self._path} {self.args[0]}"


@dataclasses.dataclass(frozen=True)
class Codec:
    """The conversion of values of one type to JSON values, and back; both raise `Misfit`."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def _make_codec(hint: Any) -> Codec:
    if hint is Any:  # a JSON value already, which its owner checks
        return Codec(lambda value: value, lambda value: value)
    if hint is float:
        return Codec(_encode_float, _decode_float)
    if hint in (int, str, bool):
        return Codec(_exactly(hint), _exactly(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _object(hint)
    arguments = get_args(hint)
    if get_origin(hint) is dict and arguments[0] is str:
        return _mapping(codec_of(arguments[1]))
    if get_origin(hint) in (types.UnionType, typing.Union):
        return _union(tuple(each for each in arguments if each is not types.NoneType), arguments)
    if get_origin(hint) is tuple:
        if arguments[-1] is not Ellipsis:
            return _fixed_tuple([codec_of(item) for item in arguments])
        if isinstance(arguments[0], type) and dataclasses.is_dataclass(arguments[0]):
            return _table(arguments[0])
        return _long_tuple(codec_of(arguments[0]))
    raise TypeError(f"records with a field of type {hint} have no JSON form")


codec_of: Callable[[Any], Codec] = cache(_make_codec)
"""The codec of a type that records are made of; ``TypeError`` for any other."""


def _unlike(expected: str, got: object) -> Misfit:
    return Misfit(f"must be {expected} and is {type(got).__name__} {got!r:.60}")


def _exactly(expected: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) is not expected:
            raise _unlike(expected.__name__, value)
        return value

    return check


def _encode_float(value: Any) -> float | int | str:
    if type(value) is float:
        return value if math.isfinite(value) else repr(value)
    if type(value) is int:
        return value
    raise _unlike("float", value)


def _decode_float(value: Any) -> float:
    if type(value) is float or type(value) is int:
        return value
    if isinstance(value, str) and value in _NON_FINITE:
        return _NON_FINITE[value]
    raise _unlike("float", value)


def _enum(enum: type[Enum]) -> Codec:
    members = {member.value: member for member in enum}

    def encode(value: Any) -> Any:
        if type(value) is not enum:
            raise _unlike(enum.__name__, value)
        return value.value

    def decode(value: Any) -> Enum:
        if not isinstance(value, str) or value not in members:
            raise _unlike(f"one of {', '.join(members)}", value)
        return members[value]

    return Codec(encode, decode)


def _field_codecs(record: Any) -> dict[str, Codec]:
    hints = get_type_hints(record)
    return {field.name: codec_of(hints[field.name]) for field in dataclasses.fields(record)}


_fields: Callable[[Any], dict[str, Codec]] = cache(_field_codecs)


def _encode_row(record: type, value: Any) -> list[Any]:
    """The values of a record's fields, in their order."""
    if type(value) is not record:
        raise _unlike(record.__name__, value)
    row = []
    for name, codec in _fields(record).items():
        try:
            row.append(codec.encode(getattr(value, name)))
        except Misfit as misfit:
            raise misfit.inside(f".{name}") from None
    return row


def _decode_row(record: type, values: Sequence[Any]) -> Any:
    fields = _fields(record)
    if len(values) != len(fields):
        raise _unlike(f"{len(fields)} values of a {record.__name__}", values)
    row = []
    for (name, codec), value in zip(fields.items(), values, strict=True):
        try:
            row.append(codec.decode(value))
        except Misfit as misfit:
            raise misfit.inside(f".{name}") from None
    try:
        return record(*row)
    except ValueError as error:  # the record's own check of its values
        raise Misfit(str(error)) from None


def _object(record: type) -> Codec:
    def encode(value: Any) -> dict[str, Any]:
        return dict(zip(_fields(record), _encode_row(record, value), strict=True))

    def decode(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _unlike(f"an object with the fields of a {record.__name__}", value)
        for problem, names in (
            ("lacks the field", _fields(record).keys() - value.keys()),
            ("has the unknown field", value.keys() - _fields(record).keys()),
        ):
            if names:
                raise Misfit(f"{problem} {min(names)!r:.60}")
        return _decode_row(record, [value[name] for name in _fields(record)])

    return Codec(encode, decode)


def _table(record: type) -> Codec:
    def encode(value: Any) -> dict[str, Any]:
        rows = _each(value, lambda item: _encode_row(record, item), tuple)
        return {"columns": list(_fields(record)), "rows": rows}

    def decode(value: Any) -> tuple[Any, ...]:
        columns = list(_fields(record))
        is_table = isinstance(value, dict) and value.keys() == {"columns", "rows"}
        if not is_table or value["columns"] != columns:
            raise _unlike(f"a table with the columns {', '.join(columns)}", value)
        return tuple(_each(value["rows"], lambda row: _decode_row(record, _list(row)), list))

    return Codec(encode, decode)


def _union(kinds: tuple[Any, ...], arguments: tuple[Any, ...]) -> Codec:
    """``X | None``, or records of several types: a list that starts with the name of the type."""
    if len(kinds) == 1:
        codec = codec_of(kinds[0])
        return Codec(
            lambda value: None if value is None else codec.encode(value),
            lambda value: None if value is None else codec.decode(value),
        )
    if len(kinds) < len(arguments) or not all(map(dataclasses.is_dataclass, kinds)):
        raise TypeError(f"expected a union of records, got {arguments}")
    by_name: dict[str, type] = {kind.__name__: kind for kind in kinds}

    def encode(value: Any) -> list[Any]:
        if type(value) not in kinds:
            raise _unlike(f"one of {', '.join(by_name)}", value)
        return [type(value).__name__, *_encode_row(type(value), value)]

    def decode(value: Any) -> Any:
        row = _list(value)
        if not row or not isinstance(row[0], str) or row[0] not in by_name:
            raise _unlike(f"a list that begins with one of {', '.join(by_name)}", value)
        return _decode_row(by_name[row[0]], row[1:])

    return Codec(encode, decode)


def _long_tuple(codec: Codec) -> Codec:
    return Codec(
        lambda value: _each(value, codec.encode, tuple),
        lambda value: tuple(_each(value, codec.decode, list)),
    )


def _fixed_tuple(codecs: list[Codec]) -> Codec:
    def encode(value: Any) -> list[Any]:
        if not isinstance(value, tuple) or len(value) != len(codecs):
            raise _unlike(f"a tuple of {len(codecs)}", value)
        return [codec.encode(item) for codec, item in zip(codecs, value, strict=True)]

    def decode(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(codecs):
            raise _unlike(f"a list of {len(codecs)}", value)
        return tuple(codec.decode(item) for codec, item in zip(codecs, value, strict=True))

    return Codec(encode, decode)


def _mapping(codec: Codec) -> Codec:
    def convert(value: Any, one: Callable[[Any], Any]) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _unlike("an object", value)
        converted = {}
        for key, item in value.items():
            try:
                converted[_exactly(str)(key)] = one(item)
            except Misfit as misfit:
                raise misfit.inside(f"[{key!r:.60}]") from None
        return converted

    return Codec(lambda value: convert(value, codec.encode), lambda value: convert(value, codec.decode))


def _each(
    value: Any, convert: Callable[[Any], Any], sequence: type[list[Any]] | type[tuple[Any, ...]]
) -> list[Any]:
    if not isinstance(value, sequence):
        raise _unlike(f"a {sequence.__name__}", value)
    converted: list[Any] = []
    try:
        for item in value:
            converted.append(convert(item))
    except Misfit as misfit:
        raise misfit.inside(f"[{len(converted)}]") from None
    return converted


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _unlike("a list", value)
    return value
