"""A table's folder on the local disk, without Spark."""

import os
import shutil
import uuid
from pathlib import Path

from outbox_spark.parquet.folder import FileTaken, StoredFile


class LocalFolder:
    """A folder on the local disk."""

    def __init__(self, path: str | Path) -> None:
        self._root = Path(path)

    @property
    def url(self) -> str:
        """Return the path."""
        return str(self._root)

    def exists(self, path: str) -> bool:
        """Tell whether there is a file or folder."""
        return (self._root / path).exists()

    def files(self, path: str) -> list[StoredFile]:
        """Return all files below, sorted."""
        found = [file for file in (self._root / path).rglob("*") if file.is_file()]
        return sorted(StoredFile(file.relative_to(self._root).as_posix(), file.stat().st_size) for file in found)

    def read(self, path: str) -> str:
        """Read a file's text."""
        return (self._root / path).read_text(encoding="utf-8")

    def create(self, path: str, text: str) -> None:
        """Write the file under another name, then link it: linking fails if the file exists."""
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        draft.write_text(text, encoding="utf-8")
        try:
            os.link(draft, target)
        except FileExistsError:
            raise FileTaken(f"{target} exists already: another process writes to this folder") from None
        finally:
            draft.unlink()

    def move(self, source: str, destination: str) -> None:
        """Move a file, if it was not moved before."""
        target = self._root / destination
        target.parent.mkdir(parents=True, exist_ok=True)
        if (self._root / source).exists():
            (self._root / source).replace(target)

    def delete(self, path: str) -> None:
        """Delete a file or a folder."""
        target = self._root / path
        if target.is_dir():
            shutil.rmtree(target, ignore_errors=True)
        else:
            target.unlink(missing_ok=True)
