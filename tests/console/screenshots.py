"""Pictures of the console for docs/images, of recorded answers: `make screenshots`."""

import io
import os
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from tests.console.recorded import BASE, HOSTILE, NOW, RecordedConsole

IMAGES = Path(__file__).parents[2] / "docs" / "images"
_COLOURS = 256
_MOST_BYTES = 150_000


def _records(page: Page) -> None:
    page.get_by_role("button", name="Record 9007199254740993").click()
    page.locator("pre.value").wait_for()


def _dialog(page: Page) -> None:
    page.get_by_role("button", name="Release 3 records of orders").click()
    page.get_by_text("would release 3 holds").wait_for()
    page.get_by_label("Reason").fill("orders takes 4 MB now, ticket 812")


def _nothing(page: Page) -> None:
    page.locator("[data-tile=held]").wait_for()


SHOTS = {
    "console-overview": ("overview", "light", 1280, 1240, _nothing),
    "console-overview-dark": ("overview", "dark", 1280, 860, _nothing),
    "console-records": ("records", "light", 1280, 780, _records),
    "console-release": ("holds", "dark", 1280, 640, _dialog),
    "console-narrow": ("overview", "light", 360, 900, _nothing),
    "console-narrow-holds": ("holds", "dark", 360, 900, _nothing),
}
"""By the name of the file: view, theme, width, height, and what is done before the picture is taken."""


def _answers() -> RecordedConsole:
    """Return the recorded answers without what only tests want to see."""
    console = RecordedConsole()
    console.causes = [cause for cause in console.causes if cause["topic"] != HOSTILE]
    everything = console.answers["records"]

    def ordinary(asked: dict[str, str]) -> dict:
        page = everything(asked)
        kept = [one for one in page["data"]["records"] if one["topic"] in {"orders", "refunds"}]
        return page | {"data": page["data"] | {"records": kept}}

    console.answers["records"] = ordinary
    return console


def take(browser: Browser, name: str) -> bytes:
    """Return a picture as PNG of few colours."""
    view, scheme, width, height, prepare = SHOTS[name]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, timezone_id="UTC", reduced_motion="reduce"
    )
    page = context.new_page()
    page.clock.set_fixed_time(NOW)
    context.route(f"{BASE}**", _answers().answer)
    page.goto(f"{BASE}#/shop/{view}")
    page.wait_for_selector("#view > *:not([data-key=asking])")
    prepare(page)
    page.wait_for_load_state("networkidle")
    picture = Image.open(io.BytesIO(page.screenshot(caret="initial")))
    context.close()
    small = io.BytesIO()
    picture.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    assert small.tell() <= _MOST_BYTES, f"{name}: {small.tell()} bytes"
    return small.getvalue()


def main() -> None:
    """Take all pictures anew."""
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=options)
        for name in SHOTS:
            (IMAGES / f"{name}.png").write_bytes(take(browser, name))
        browser.close()


if __name__ == "__main__":
    main()
