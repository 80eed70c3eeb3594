"""The report of an audit on a phone and on a desk, in a browser."""

import pytest

from outbox_spark.pipelines.audit import KINDS, AuditResult
from outbox_spark.pipelines.audit_report import to_html

pytestmark = pytest.mark.complete

_LONG = "shop.orders.of-a-topic-whose-name-goes-on-and-on"
_NONE = dict.fromkeys(("expected", "found", "replayed", *KINDS), 0)


@pytest.fixture
def page():
    """Return the page of a result with findings, long names and two days."""
    lost = {**_NONE, "expected": 12_345_678, "found": 12_345_670, "lost": 8}
    example = {"topic": _LONG, "kind": "reordered", "key": "k" * 80, "id": "shop.public.outbox:77", "timestamp": None}
    places = {"partition": 2, "offset": 31, "other_id": "shop.public.outbox:78", "other_partition": 2}
    return to_html(
        AuditResult(
            topics={_LONG: lost, "clean": _NONE},
            hours=[
                {**_NONE, "hour": f"2026-11-21T{hour:02}:00:00Z", "found": 5, "lost": hour % 2} for hour in range(24)
            ],
            keys=[{"topic": _LONG, "key": "k" * 80, **_NONE, "lost": 8}],
            examples=[{**example, **places, "other_offset": 9, "times": 1}],
        )
    )


@pytest.mark.parametrize("width", [360, 1280])
def test_the_report_fits_the_screen(open_page, page, width):
    """No screen scrolls sideways; a phone names each value where a desk has the head of a table."""
    shown = open_page(width=width)
    shown.set_content(page)
    assert shown.evaluate("document.documentElement.scrollWidth") == width
    assert shown.locator("th").first.is_visible() == (width > 1000)
    named = shown.evaluate("getComputedStyle(document.querySelector('td'), '::before').content")
    assert named == ("none" if width > 1000 else '"topic"')
