"""A browser for the tests of the console: Debian's Chromium, driven by Playwright."""

import os
import shutil
from urllib.parse import urlsplit

import pytest

from tests.console.recorded import BASE, NOW, RecordedConsole
from tests.console.world import World

_NAMES = ("chromium", "chromium-browser", "google-chrome")
GENEROUS_MS = 60_000
"""Longer than anything takes here on a machine that does seven other things."""


def _chromium() -> str | None:
    given = os.environ.get("OUTBOX_TEST_CHROMIUM")
    return given or next((found for name in _NAMES if (found := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser():
    """Yield a headless Chromium; without one the test is skipped, and fails in CI.

    It ends with the module: until then an event loop runs in this thread, which other modules' tests would not bear.
    """
    path = _chromium()
    if path is None:
        reason = "needs Chromium: apt-get install chromium, or name one by OUTBOX_TEST_CHROMIUM"
        if os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=GENEROUS_MS)
    with sync_playwright() as playwright:
        # The sandbox needs rights that root in a container lacks.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        started = playwright.chromium.launch(executable_path=path, args=options)
        yield started
        started.close()


@pytest.fixture
def open_page(browser):
    """Yield a factory for pages of their own, each with its own cookies: `open_page(width=1280, scheme="light")`.

    At the end of the test each page must have asked its own origin alone, without an error on its console: a breach of
    the policy (Content-Security-Policy) is one.
    """
    contexts, complaints = [], []

    def watch(page, allowed):
        requested = set()

        def note(message):
            # Answers that are refusals are written there, too; tests that provoke one expect it.
            if message.type == "error" and not any(text in message.text for text in allowed):
                complaints.append(message.text)

        page.on("console", note)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requested.add(request.url))
        return requested

    def make(*, width=1280, height=900, scheme="light", allowed=()):
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, timezone_id="UTC"
        )
        context.set_default_timeout(GENEROUS_MS)
        page = context.new_page()
        contexts.append((context, watch(page, allowed)))
        return page

    yield make
    for context, requested in contexts:
        origins = {urlsplit(url)[:2] for url in requested if not url.startswith(("about:", "blob:"))}
        context.close()
        assert len(origins) <= 1, f"left its origin: {origins}"
    assert not complaints


@pytest.fixture
def recorded():
    """Return a console that answers from memory."""
    return RecordedConsole()


@pytest.fixture
def open_recorded(open_page, recorded):
    """Return a factory for pages that show a view of the recorded console."""

    def make(view="overview", **options):
        page = open_page(**options)
        page.clock.set_fixed_time(NOW)
        page.context.route(f"{BASE}**", recorded.answer)
        page.goto(f"{BASE}#/shop/{view}")
        page.wait_for_selector("#view > *:not([data-key=asking])")
        return page

    return make


@pytest.fixture(scope="module")
def world(postgres, kafka, tmp_path_factory):
    """Yield a real outbox without a harvester; tests start those."""
    made = World(postgres, kafka, tmp_path_factory.mktemp("console"))
    yield made
    made.close()
