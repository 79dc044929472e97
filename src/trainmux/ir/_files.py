"""Files: one format for records, and one atomic writer for everything the package writes.

A record file is one JSON object: ``{"trainmux": kind, "version": number, "sha256": ..., kind: content}``. A
file of another version is refused rather than converted. The checksum is of the content, however the text is
laid out: it finds damage and edits, not forgery.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

from trainmux.errors import PlanError, TrainmuxError
from trainmux.ir._codec import Misfit, from_json, to_json

Record = TypeVar("Record")
Written = TypeVar("Written")
PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class FileFormat:
    """A kind of record file. ``remedy`` ends every refusal, whose type is ``error``."""

    kind: str
    version: int
    remedy: str
    error: type[TrainmuxError]


_FORMATS: dict[type, FileFormat] = {}


def file_format(
    kind: str, *, version: int, remedy: str, error: type[TrainmuxError] = PlanError
) -> Callable[[type[Record]], type[Record]]:
    """Decorate a frozen dataclass that `save` and `load` shall know."""

    def register(record: type[Record]) -> type[Record]:
        _FORMATS[record] = FileFormat(kind, version, remedy, error)
        return record

    return register


def save(path: PathLike, record: object) -> None:
    """Replace the file ``path`` by ``record``, making its folder if need be.

    Refused with the error of the record's format: a field whose value is not of its type, and every failure
    of the file system; the old file is then untouched.
    """
    write_file(path, to_bytes(record), error=_format_of(type(record)).error)


def to_bytes(record: object) -> bytes:
    """The contents of the file that `save` writes."""
    form = _format_of(type(record))
    try:
        content = to_json(record)
    except Misfit as misfit:
        raise form.error(
            f"expected a {form.kind} with every field of its type, but {misfit.describe(form.kind)}; "
            "convert it"
        ) from None
    document = {
        "trainmux": form.kind,
        "version": form.version,
        "sha256": _checksum(form, content),
        form.kind: content,
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def load(path: PathLike, kind: type[Record]) -> Record:
    """Read the record of type ``kind`` that `save` wrote to the file ``path``.

    Refused with the error of its format, naming the file and the field: a file that is missing, damaged,
    edited, of another kind or of another format version.
    """
    form = _format_of(kind)

    def refuse(got: str) -> NoReturn:
        raise form.error(f"expected a {form.kind} in {os.fspath(path)}, but {got}; {form.remedy}") from None

    try:
        document = json.loads(Path(path).read_bytes(), parse_constant=_refuse_constant)
    except OSError as error:
        refuse(f"got: {failure_reason(error)}")
    except RecursionError:
        refuse("got text that is truncated or edited: it is nested too deeply")
    except ValueError as error:
        refuse(f"got text that is truncated or edited: {error}")
    if not isinstance(document, dict) or not isinstance(document.get("trainmux"), str):
        refuse("got JSON that trainmux did not write")
    if document["trainmux"] != form.kind:
        refuse(f"got a {document['trainmux'][:40]!r} file")
    if type(document.get("version")) is not int or document["version"] != form.version:
        refuse(f"got format version {document.get('version')!r:.40}, and this trainmux reads {form.version}")
    if set(document) != {"trainmux", "version", "sha256", form.kind}:
        refuse(f"got the keys {', '.join(sorted(document))[:80]}")
    try:
        checksum = _checksum(form, document[form.kind])
    except (ValueError, RecursionError):
        refuse("got contents that cannot be checked")
    if document["sha256"] != checksum:
        refuse("got one that was damaged or edited since it was written: its checksum does not fit")
    try:
        record: Record = from_json(document[form.kind], kind)
    except Misfit as misfit:
        refuse(misfit.describe(form.kind))
    return record


def write_file(path: PathLike, content: bytes | str, *, error: type[TrainmuxError] = PlanError) -> None:
    """Replace the file ``path``, making its folder if need be; ``error`` where that fails."""
    data = content.encode() if isinstance(content, str) else content
    try:
        replace_file(path, lambda file: file.write(data))
    except (OSError, TypeError, ValueError) as failure:  # the latter two: a path that no file can have
        raise error(
            f"expected to write the file {path!r}, but got: {failure_reason(failure)}; the file that was "
            f"there, if any, is untouched. {failure_remedy(failure)}"
        ) from failure


def replace_file(path: PathLike, write: Callable[[BinaryIO], Written], *, is_durable: bool = True) -> Written:
    """Have ``write`` fill a new file, then rename it to ``path``: readers see the old file or the new one.

    With ``is_durable`` the new file also survives a power failure; a cache can do without and be quicker. The
    folder is made if need be. Returns what ``write`` returned; ``OSError`` passes through, and the old file
    is then untouched unless the failure came after the rename.
    """
    target = Path(path)
    if not target.parent.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        if is_durable:
            _sync_folder(target.parent.parent)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            result = write(file)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    if is_durable:
        _sync_folder(target.parent)
    return result


def failure_reason(error: BaseException) -> str:
    """The message of an error, without the number and the path that ``OSError`` adds."""
    return getattr(error, "strerror", None) or str(error)


def failure_remedy(error: BaseException) -> str:
    """Advice on a write that failed."""
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "Free space there (old and new file exist side by side for a moment), or use another disk"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Make the folder writable, or name another path"
    if number in (errno.EEXIST, errno.ENOTDIR):
        return "A folder of the path is a file: name another path"
    return "Check the disk, or name another path"


def _sync_folder(folder: Path) -> None:
    """Have a rename in ``folder`` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and user-space file systems know no fsync of a directory; nothing can be done.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _format_of(record: type) -> FileFormat:
    if record not in _FORMATS:
        raise PlanError(
            f"expected one of {', '.join(known.__name__ for known in _FORMATS)}, but got {record.__name__}; "
            "only these have a file format"
        )
    return _FORMATS[record]


def _checksum(form: FileFormat, content: Any) -> str:
    canonical = json.dumps([form.kind, form.version, content], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
