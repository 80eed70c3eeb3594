"""The code blocks of the README and of docs/, with what a comment before them says.

    <!-- not run: REASON -->
    <!-- run by tests/docs/test_quickstart.py -->

in the line before a block's fence keep `test_code_blocks.py` from running it: why nothing can run it, or which test
does. Without such a comment the block's language decides what is done with it.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r"^(?:[ ]*<!--\s*(?P<mark>(?:not run|run by)\b.*?)\s*-->\n)?"
    r"^(?P<indent>[ ]*)(?P<fence>```+)(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^(?P=indent)(?P=fence)[ ]*$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str  # the path in the repository
    line: int  # of its first line of code
    language: str
    text: str
    mark: str  # the comment before it, or nothing

    @property
    def place(self) -> str:
        """The place to open in an editor."""
        return f"{self.page}:{self.line}"

    @property
    def is_run(self) -> bool:
        """True if the language's test runs it."""
        return not self.mark


def pages() -> list[Path]:
    """Return the pages for users and contributors."""
    others = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "example_project/README.md")
    return [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in others)]


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page in their order."""
    text, name = page.read_text(), page.relative_to(ROOT).as_posix()
    return [
        Block(
            name,
            text.count("\n", 0, found.start("text")) + 1,
            found["language"],
            textwrap.dedent(found["text"]),
            found["mark"] or "",
        )
        for found in _FENCE.finditer(text)
    ]


BLOCKS = [block for page in pages() for block in blocks_of(page)]


def run_blocks(*languages: str) -> list[Block]:
    """Return all blocks of these languages without a mark."""
    return [block for block in BLOCKS if block.language in languages and block.is_run]
