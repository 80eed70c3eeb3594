"""A hook of the build: the README as the package's description, with links that work away from the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?![a-z]+:|#)([^)\s]+\))")


class ReadmeHook(MetadataHookInterface):
    """Fills in `project.readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the description, from README.md."""
        source = metadata["urls"]["Source"]
        text = (Path(self.root) / "README.md").read_text()
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, source)}


def absolute(text: str, source: str) -> str:
    """Return Markdown with its relative links leading to the repository, and its images to their files there."""
    return _LINK.sub(
        lambda found: f"{found[1]}{found[2]}{source}/{'raw' if found[1] else 'blob'}/main/{found[3]}", text
    )
