"""The README where it is shown without the repository: as the description of the package."""

import re

from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

from tests.docs.blocks import ROOT


def test_the_description_of_the_package_has_absolute_links() -> None:
    """Every link and image leads somewhere from a page of another site, and to a file that exists."""
    metadata = ProjectMetadata(str(ROOT), PluginManager())
    text, source = metadata.core.readme, metadata.core.urls["Source"]
    assert metadata.core.readme_content_type == "text/markdown"
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", text)
    assert len(links) > 20
    assert [link for _, link in links if not link.startswith(("https://", "#"))] == []
    ours = [(image, link.removeprefix(f"{source}/")) for image, link in links if link.startswith(f"{source}/")]
    assert len(ours) > 20
    for image, link in ours:
        kind, branch, path = link.split("/", 2)
        assert (kind, branch) == ("raw" if image else "blob", "main")
        assert (ROOT / path.partition("#")[0]).exists(), path
