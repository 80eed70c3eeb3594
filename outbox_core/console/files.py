"""The files of the page, which are part of the package."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import NamedTuple

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
}
_LONGEST_PATH = 200


class PageFile(NamedTuple):
    """A file of the page."""

    content: bytes
    content_type: str
    etag: str


def read_page_file(path: str) -> PageFile | None:
    """Return a file by its path below the page's folder, None if there is none."""
    parts = path.split("/")
    if any(part in ("", ".", "..") or part.startswith((".", "_")) or "\\" in part or "\0" in part for part in parts):
        return None
    suffix = f".{parts[-1].rpartition('.')[2].lower()}"
    found = files("outbox_core.console").joinpath("page", *parts)
    # File systems refuse long names with an error of their own.
    if suffix not in _TYPES or len(path) > _LONGEST_PATH or not found.is_file():
        return None
    content = found.read_bytes()
    return PageFile(content, _TYPES[suffix], f'"{hashlib.sha256(content).hexdigest()[:20]}"')
