"""A hook of MkDocs: pages that live outside docs/, and links that leave it.

The repository's pages link to files relative to themselves, as readers on GitHub need it. On the site a link to a page
leads to that page, and a link to any other file of the repository to its source. A link to a file that does not exist
stays as it is, and fails the strict build.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
OUTSIDE = (  # shown under the same path on the site
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/RESULTS.md",
    "benchmarks/RESULTS-appendix.md",
    "example_project/README.md",
)
# Beside docs/index.md, README.md would be a second index page.
ADDRESSES = {"README.md": "guarantees.md"}

_LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that live outside docs/."""
    for name in OUTSIDE:
        content = (ROOT / name).read_text()
        files.append(File.generated(config, ADDRESSES.get(name, name), content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page for the site."""
    names = {address: name for name, address in ADDRESSES.items()}
    here = page.file.src_uri
    place = names.get(here, here)
    if place not in OUTSIDE:
        place = f"docs/{here}"

    def rewritten(link: re.Match[str]) -> str:
        target = normpath(join(dirname(place), link[2]))
        if target in OUTSIDE:
            address = ADDRESSES.get(target, target)
        elif target.startswith("docs/") and (ROOT / target).is_file():
            address = target.removeprefix("docs/")
        elif (ROOT / target).exists():
            return f"{link[1]}{config.repo_url.rstrip('/')}/blob/main/{target}{link[3]}"
        else:
            return link[0]
        return f"{link[1]}{relpath(address, dirname(here) or '.')}{link[3]}"

    del files
    return _LINK.sub(rewritten, markdown)
