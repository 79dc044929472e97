"""Frozen records ↔ JSON values, exactly, both ways, driven by the records' type hints.

A record is an object, a tuple of records of one type a table (column names once, then rows), a member of a
union a list that starts with its type's name. Floats come back bit by bit; non-finite ones, which JSON does
not know, are written as text. Reading is strict: a missing field, an unknown field or a value of another type
raises `Misfit` with the path to it, and nothing in a file can name code to run. Writing checks nothing by
itself: who writes reads back (`to_json`).
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterable
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
    """The conversion of values of one type to JSON values, and back, which raises `Misfit`."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def to_json(record: Any) -> Any:
    """The JSON value of a record. `Misfit` where it could not be read back."""
    kind: Any = type(record)
    codec = codec_of(kind)
    try:
        value = codec.encode(record)
    except (AttributeError, TypeError, ValueError) as error:
        raise Misfit(f"has a value of another type ({error})") from None
    codec.decode(value)
    return value


def from_json(value: Any, kind: Any) -> Any:
    """The record of type ``kind`` that `to_json` turned into ``value``; `Misfit` for anything else."""
    return codec_of(kind).decode(value)


@cache
def codec_of(hint: Any) -> Codec:
    """The codec of a type that records are made of; ``TypeError`` for any other."""
    if hint is Any:  # a JSON value already, which its owner checks
        return Codec(lambda value: value, lambda value: value)
    if hint is float:
        return Codec(lambda value: value if math.isfinite(value) else repr(value), _decode_float)
    if hint in (int, str, bool):
        return Codec(lambda value: value, lambda value: _checked(value, type(value) is hint, hint.__name__))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _object(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is dict and arguments[0] is str:
        return _mapping(codec_of(arguments[1]))
    if origin in (types.UnionType, typing.Union):
        return _union(arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _fixed_tuple([codec_of(item) for item in arguments])
    if origin is tuple and isinstance(arguments[0], type) and dataclasses.is_dataclass(arguments[0]):
        return _table(arguments[0])
    if origin is tuple:
        item = codec_of(arguments[0])
        return Codec(
            lambda value: [item.encode(each) for each in value],
            lambda value: tuple(_decode_each(_list(value), item.decode)),
        )
    raise TypeError(f"records with a field of type {hint} have no JSON form")


def _checked(value: Any, fits: bool, expected: str) -> Any:
    if not fits:
        raise Misfit(f"must be {expected} and is {type(value).__name__} {value!r:.60}")
    return value


def _list(value: Any) -> list[Any]:
    checked: list[Any] = _checked(value, isinstance(value, list), "a list")
    return checked


def _decode_each(values: Iterable[Any], decode: Callable[[Any], Any]) -> list[Any]:
    decoded: list[Any] = []
    try:
        for value in values:
            decoded.append(decode(value))
    except Misfit as misfit:
        raise misfit.inside(f"[{len(decoded)}]") from None
    return decoded


def _decode_float(value: Any) -> Any:
    if isinstance(value, str) and value in _NON_FINITE:
        return _NON_FINITE[value]
    return _checked(value, type(value) in (float, int), "float")


def _enum(enum: type[Enum]) -> Codec:
    members = {member.value: member for member in enum}
    expected = f"one of {', '.join(members)}"

    def decode(value: Any) -> Enum:
        return members[_checked(value, isinstance(value, str) and value in members, expected)]

    return Codec(lambda value: value.value, decode)


@cache
def _fields(record: Any) -> dict[str, Codec]:
    hints = get_type_hints(record)
    return {field.name: codec_of(hints[field.name]) for field in dataclasses.fields(record)}


def _encode_row(record: type, value: Any) -> list[Any]:
    """The values of a record's fields, in their order."""
    return [codec.encode(getattr(value, name)) for name, codec in _fields(record).items()]


def _decode_row(record: type, values: list[Any]) -> Any:
    fields = _fields(record)
    _checked(values, len(values) == len(fields), f"{len(fields)} values of a {record.__name__}")
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
        _checked(value, isinstance(value, dict), f"an object with the fields of a {record.__name__}")
        fields = _fields(record).keys()
        if names := fields ^ value.keys():
            name = min(names)
            raise Misfit(f"{'lacks the' if name in fields else 'has the unknown'} field {name!r:.60}")
        return _decode_row(record, [value[name] for name in fields])

    return Codec(encode, decode)


def _table(record: type) -> Codec:
    def encode(value: Any) -> dict[str, Any]:
        return {"columns": list(_fields(record)), "rows": [_encode_row(record, item) for item in value]}

    def decode(value: Any) -> tuple[Any, ...]:
        columns = list(_fields(record))
        is_table = isinstance(value, dict) and value.keys() == {"columns", "rows"}
        fits = is_table and value["columns"] == columns
        _checked(value, fits, f"a table with the columns {', '.join(columns)}")
        return tuple(_decode_each(_list(value["rows"]), lambda row: _decode_row(record, _list(row))))

    return Codec(encode, decode)


def _union(arguments: tuple[Any, ...]) -> Codec:
    """``X | None``, or records of several types: a list that starts with the name of the type."""
    kinds = [kind for kind in arguments if kind is not types.NoneType]
    if len(kinds) == 1:
        codec = codec_of(kinds[0])
        return Codec(
            lambda value: None if value is None else codec.encode(value),
            lambda value: None if value is None else codec.decode(value),
        )
    if len(kinds) < len(arguments) or not all(map(dataclasses.is_dataclass, kinds)):
        raise TypeError(f"expected a union of records, got {arguments}")
    by_name: dict[str, type] = {kind.__name__: kind for kind in kinds}
    expected = f"a list that begins with one of {', '.join(by_name)}"

    def decode(value: Any) -> Any:
        row = _list(value)
        _checked(value, bool(row) and isinstance(row[0], str) and row[0] in by_name, expected)
        return _decode_row(by_name[row[0]], row[1:])

    return Codec(lambda value: [type(value).__name__, *_encode_row(type(value), value)], decode)


def _fixed_tuple(codecs: list[Codec]) -> Codec:
    def encode(value: Any) -> list[Any]:
        return [codec.encode(item) for codec, item in zip(codecs, value, strict=True)]

    def decode(value: Any) -> tuple[Any, ...]:
        _checked(value, isinstance(value, list) and len(value) == len(codecs), f"a list of {len(codecs)}")
        return tuple(codec.decode(item) for codec, item in zip(codecs, value, strict=True))

    return Codec(encode, decode)


def _mapping(codec: Codec) -> Codec:
    def decode(value: Any) -> dict[str, Any]:
        decoded = {}
        for key, item in _checked(value, isinstance(value, dict), "an object").items():
            try:
                decoded[_checked(key, type(key) is str, "str")] = codec.decode(item)
            except Misfit as misfit:
                raise misfit.inside(f"[{key!r:.60}]") from None
        return decoded

    return Codec(lambda value: {key: codec.encode(item) for key, item in value.items()}, decode)
