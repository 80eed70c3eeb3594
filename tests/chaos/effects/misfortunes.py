"""The misfortunes of the first try of a few messages, and the notes of the processes that have them.

The seed and the name of a message decide what happens to it. A file that is made exclusively lets it happen once, in
whichever process the first try is, so that later tries succeed. Notes are lines that are written at once: a SIGKILL
loses none.
"""

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import psycopg

VARIABLE = "TEST_EFFECTS"
_LATE_SECONDS = 0.004
"""Within which the end of a record's work comes: the question, the commit, the commit of the offset."""


class Misfortune(Exception):
    """An error of the application's own."""


@dataclass(frozen=True)
class Place:
    """The place of a process in a run; it travels in the environment.

    Attributes:
        name: of the process, unlike all others.
        directory: of journals and marks.
        seed: of the run.
        direct: URL of the database, past the proxy.
    """

    name: str
    directory: str
    seed: int
    direct: str

    @classmethod
    def of_this_process(cls) -> Self:
        """Return the place of this process."""
        return cls(**json.loads(os.environ[VARIABLE]))

    def environment(self) -> dict[str, str]:
        """Return the variable that tells a process its place."""
        return {VARIABLE: json.dumps(asdict(self))}


class Journal:
    """The notes of one process; any thread may note."""

    def __init__(self, place: Place) -> None:
        path = Path(place.directory) / f"{place.name}.journal"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, *words: object) -> None:
        """Write a line, which begins with the time."""
        os.write(self._file, (" ".join(map(str, (time.time(), *words))) + "\n").encode())


def read_journals(directory: Path) -> list[tuple[str, list[str]]]:
    """Return the notes of all processes by their time: the name of the process, and the words."""
    notes = []
    for path in directory.glob("*.journal"):
        for line in path.read_text().splitlines():
            at, *words = line.split()
            notes.append((float(at), path.stem, words))
    return [(process, words) for _, process, words in sorted(notes, key=lambda note: note[0])]


class Misfortunes:
    """The misfortunes of a run, as a process meets them; any thread may ask."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._marks = marks_of(Path(place.directory))
        self._hangman: psycopg.Connection | None = None
        self._hangman_is_at_work = threading.Lock()

    def of(self, message: str, shares: Mapping[str, float]) -> str:
        """Return the kind of misfortune that this try of a message meets; '' for none."""
        chance = random.Random(f"{self._place.seed}/{message}").random()
        for kind, share in shares.items():
            chance -= share
            if chance < 0:
                return kind if self._is_first(message, kind) else ""
        return ""

    def cut_soon(self, backend: int) -> None:
        """End a session of the database in a moment: before, in or after the commit."""
        with self._hangman_is_at_work:
            if self._hangman is None or self._hangman.closed:  # which takes longer than a commit
                self._hangman = psycopg.connect(self._place.direct, autocommit=True, application_name="hangman")
        self._soon(lambda: self._cut(backend))

    @staticmethod
    def die() -> None:
        """Kill this process."""
        os.kill(os.getpid(), signal.SIGKILL)

    def die_soon(self) -> None:
        """Kill this process in a moment: before the commit, or between it and the commit of the offset."""
        self._soon(self.die)

    def _cut(self, backend: int) -> None:
        with self._hangman_is_at_work:
            self._hangman.execute("SELECT pg_terminate_backend(%s)", [backend])

    def _soon(self, act: Callable[[], None]) -> None:
        def wait():
            time.sleep(random.uniform(0, _LATE_SECONDS))
            act()

        threading.Thread(target=wait, daemon=True).start()

    def _is_first(self, message: str, kind: str) -> bool:
        try:
            os.close(os.open(self._marks / f"{message}.{kind.replace(' ', '_')}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def marks_of(directory: Path) -> Path:
    """Return the folder of the misfortunes that have happened, which is made if need be."""
    marks = directory / "marks"
    marks.mkdir(exist_ok=True)
    return marks


def happened(directory: Path) -> Counter[str]:
    """Count the misfortunes that have happened, by what they happened to and their kind."""
    names = (entry.name for entry in os.scandir(marks_of(directory)))
    return Counter(f"{name.partition('-')[0]}: {name.partition('.')[2].replace('_', ' ')}" for name in names)
