"""A study in PostgreSQL, by URL: a server of its own for the test."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest

import trainmux as tm

optuna = pytest.importorskip("optuna")
pytest.importorskip("psycopg2", reason="needs PostgreSQL's driver psycopg2")

from tests.integrations.study_cases import Do, make_member, settings, terminate  # noqa: E402


def programs() -> Path | None:
    """The folder of ``initdb`` and ``pg_ctl``, which Debian keeps off the path."""
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return next((folder for folder in reversed(folders) if (folder / "initdb").exists()), None)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that listens on this machine alone. It refuses to run as root, so there as its own user."""
    where = programs()
    if where is None:
        pytest.skip("needs a PostgreSQL server: initdb and pg_ctl")
    folder = Path(mkdtemp(prefix="trainmux-postgresql-"))
    user: dict[str, object] = {}
    if os.getuid() == 0:
        try:
            entry = pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("needs the user postgres: PostgreSQL does not run as root")
        os.chown(folder, entry.pw_uid, entry.pw_gid)
        user = {"user": "postgres", "group": entry.pw_gid, "extra_groups": []}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def do(*words: str) -> None:
        subprocess.run(words, check=True, cwd=folder, stdout=subprocess.DEVNULL, timeout=60, **user)  # type: ignore[call-overload]

    try:
        do(str(where / "initdb"), "-D", "data", "-A", "trust", "-U", "trainmux")
        options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1"
        do(str(where / "pg_ctl"), "-D", "data", "-o", options, "-l", "log", "-w", "start")
        yield f"postgresql+psycopg2://trainmux@127.0.0.1:{port}/postgres"
        do(str(where / "pg_ctl"), "-D", "data", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_search_goes_on_in_postgresql_where_it_was_ended(url: str, tmp_path: Path) -> None:
    def study() -> optuna.Study:
        return optuna.create_study(storage=url, study_name="a", load_if_exists=True)

    how = settings(max_epochs=40, checkpoint=tmp_path / "trials", checkpoint_every=100)
    ended = [Do(1, 10, terminate)]
    tm.optuna.optimize(study(), make_member, total_trials=6, sigterm=True, callbacks=ended, **how)
    assert {trial.state.name for trial in study().trials} == {"WAITING"}
    results = tm.optuna.optimize(study(), make_member, total_trials=6, **how)
    assert [trial.state.name for trial in study().trials] == ["COMPLETE"] * 6
    assert results.best.value == pytest.approx(study().best_value)
