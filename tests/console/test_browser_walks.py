"""The console in a browser, with a real outbox behind it: what the person on call does, by the command line's door."""

import json
import re

import psycopg
import pytest
from playwright.sync_api import expect

from tests.console.recorded import EXACT, HOSTILE
from tests.kafka_reader import read_topic
from tests.topic_settings import alter_topic

pytestmark = pytest.mark.real_broker


@pytest.fixture(scope="module")
def address(world):
    """Return the address of a console by which one may do everything."""
    return world.start_console()


@pytest.fixture(scope="module")
def leader(world):
    """Return the name of the harvester that runs."""
    world.start_harvester("harvester-a")
    return "harvester-a"


@pytest.fixture
def console(open_page, address):
    """Return a page on the outbox `shop`."""
    page = open_page(allowed=["409 (Conflict)"])
    page.goto(f"{address}#/shop/overview")
    return page


def tile(page, name):
    """Return the value of a tile."""
    return page.locator(f"[data-tile={name}] strong")


def show(page, view):
    """Choose a view by its tab."""
    page.get_by_role("navigation", name="Views").get_by_role("link", name=re.compile(f"^{view}")).click()


def confirm(page, button, reason, done):
    """Give the reason in the open dialog, confirm, and see what was done."""
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Reason").fill(reason)
    dialog.get_by_role("button", name=button, exact=True).click()
    expect(page.locator(".result").filter(has_text=done)).to_be_visible()
    expect(dialog).to_be_hidden()


def test_record_is_found_and_backlog_drains(console, world, request):
    """Before a harvester is there, records grow in number, and one is found by its header; with one they drain."""
    topic = world.topic("orders")
    expect(tile(console, "leader")).to_have_text("none")
    world.stash(topic, *[f'{{"n": {n}}}'.encode() for n in range(20)])
    expect(tile(console, "deliverable")).to_have_text("20")
    (identity,) = world.stash(topic, EXACT.encode(), key=HOSTILE, ce_type=HOSTILE)
    expect(tile(console, "deliverable")).to_have_text("21")

    show(console, "Records")
    console.get_by_label("Header", exact=True).fill("ce_type")
    console.get_by_role("button", name="Search").click()
    console.get_by_role("button", name=f"Record {identity}").click()
    expect(console.get_by_role("row").filter(has_text=topic)).to_have_count(1)
    expect(console.locator("pre.value")).to_contain_text('"order": 12345678901234567890,\n  "amount": 1.00,')
    expect(console.locator(".detail dd").filter(has_text=HOSTILE)).to_be_visible()
    assert console.evaluate("window.hacked ?? null") is None

    request.getfixturevalue("leader")
    expect(tile(console, "leader")).to_have_text("harvester-a")
    expect(tile(console, "deliverable")).to_have_text("0")
    expect(console.get_by_text("No pending record matches")).to_be_visible()


@pytest.mark.usefixtures("leader")
def test_poison_record_is_understood_mended_and_released(console, world):
    """A record that its topic does not take is held for that; once the topic takes it, a release publishes it."""
    topic = world.topic("documents", max_message_bytes="20000")
    big, _ = world.stash(topic, b"x" * 50_000, b"behind it")
    expect(tile(console, "held")).to_have_text("2")
    show(console, "Holds")
    group = console.get_by_role("article").filter(has_text=topic)
    expect(group).to_contain_text("20000")
    expect(group).to_contain_text("2 records are kept by it")
    group.get_by_role("link", name=str(big)).click()
    expect(console.get_by_role("button", name=f"Record {big}")).to_be_visible()

    alter_topic(world.kafka.bootstrap, topic, {"max.message.bytes": "200000"})
    console.go_back()
    group.get_by_role("button", name=re.compile("^Release")).click()
    expect(console.get_by_role("dialog")).to_contain_text("1 hold")
    confirm(console, "Release", "the topic takes 200 kB now", "released 1 hold")
    expect(console.get_by_text("Nothing is held:")).to_be_visible()
    expect(tile(console, "held")).to_have_text("0")
    assert [len(one.value) for one in read_topic(world.kafka.bootstrap, topic, count=2)] == [50_000, 9]
    show(console, "History")
    expect(console.get_by_role("listitem").filter(has_text="the topic takes 200 kB now")).to_contain_text("released")


@pytest.mark.usefixtures("leader")
def test_topic_is_paused_and_resumed(console, world):
    """A topic that is paused keeps its records, another name is questioned, and what waited goes on when resumed."""
    topic = world.topic("refunds")
    show(console, "Holds")
    console.get_by_role("button", name="Pause a topic or key").click()
    dialog = console.get_by_role("dialog")
    dialog.get_by_label("Topic", exact=True).fill(topic)
    dialog.get_by_label("Topic", exact=True).press("Tab")
    dialog.get_by_label("Do it all the same").check()
    expect(dialog.get_by_role("button", name="Pause", exact=True)).to_be_enabled()
    expect(dialog.get_by_label("Do it all the same")).to_be_checked()
    confirm(console, "Pause", "ledger migration", f"{topic} is paused")
    world.stash(topic, b"1", b"2", b"3")
    expect(tile(console, "held")).to_have_text("3")
    expect(tile(console, "deliverable")).to_have_text("0")
    group = console.get_by_role("article").filter(has_text=topic)
    expect(group).to_contain_text("ledger migration")
    group.get_by_role("button", name=re.compile("^Resume")).click()
    confirm(console, "Resume", "migrated", f"{topic} goes on")
    expect(tile(console, "held")).to_have_text("0")
    assert len(read_topic(world.kafka.bootstrap, topic, count=3)) == 3


def test_killed_leader_is_fenced_and_succeeded(console, world, leader):
    """After the leader was killed the timeline shows its end, and the successor with its term."""
    expect(tile(console, "leader")).to_have_text(leader)
    world.start_harvester("harvester-b")
    expect(console.locator("[data-tile=leader]")).to_contain_text("1 standing by")
    world.kill(leader)
    leaders = console.get_by_role("list", name="Leaders")
    expect(leaders.get_by_role("listitem").filter(has_text=f"{leader} was fenced")).to_be_visible()
    expect(leaders.get_by_role("listitem").filter(has_text=re.compile(r"harvester-b leads term \d+"))).to_be_visible()
    expect(tile(console, "leader")).to_have_text("harvester-b")
    expect(console.locator("[data-tile=leader]")).to_contain_text(re.compile(r"term \d+, for"))


@pytest.mark.complete
def test_other_outbox_by_the_chooser(console):
    """The chooser leads to another outbox, which says that it has no history, and how to make it."""
    console.get_by_label("Outbox").select_option("billing")
    expect(console.get_by_text("outbox schema", exact=False).first).to_be_visible()
    expect(tile(console, "deliverable")).to_have_text("0")


def test_forged_and_unpermitted_actions_are_refused(open_page, world, address):
    """A page of another origin, a POST without the header, and a user who may only look all change nothing."""
    topic = world.topic("invoices")
    pause = json.dumps({"topic": topic, "force": True, "reason": "forged"})
    forged = (
        "async ([address, body, type]) => { try { return (await fetch(address, {method: 'POST', body, mode: 'cors',"
    )
    forged += " credentials: 'include', headers: {'Content-Type': type}})).status } catch { return 'blocked' } }"
    action = f"{address}api/outboxes/shop/actions/pause"

    page = open_page(allowed=["403"])
    page.goto(address)
    expect(tile(page, "held")).to_be_visible()
    assert page.evaluate(forged, [action, pause, "application/json"]) == 403

    foreign = page.context.new_page()
    foreign.route(
        "http://evil.test/", lambda route: route.fulfill(body="<title>evil</title>", content_type="text/html")
    )
    foreign.goto("http://evil.test/")
    for kind in ("application/json", "text/plain"):
        assert foreign.evaluate(forged, [action, pause, kind]) == "blocked"

    reader = open_page(allowed=["403"])
    reader.goto(f"{world.start_console('--read-only')}#/shop/holds")
    expect(reader.get_by_role("heading", name="Held, by cause")).to_be_visible()
    expect(reader.get_by_role("button", name="Pause a topic or key")).to_have_count(0)
    with psycopg.connect(world.dsn) as connection:
        assert connection.execute("SELECT FROM outbox_hold WHERE kafka_topic = %s", (topic,)).fetchall() == []


@pytest.mark.complete
@pytest.mark.usefixtures("leader")
def test_dead_letter_is_edited_and_stashed_anew(console, world):
    """A held record goes to the dead-letter topic, is shown there, and is published after an edit."""
    topic = world.topic("letters", max_message_bytes="20000")
    world.stash(topic, b"y" * 30_000, key="customer-1")
    show(console, "Holds")
    group = console.get_by_role("article").filter(has_text=topic)
    group.get_by_role("button", name=re.compile("^Dead-letter")).click()
    confirm(console, "Dead-letter", "it will never fit", "1")
    show(console, "Dead letters")
    row = console.get_by_role("row").filter(has_text=topic)
    expect(tile(console, "held")).to_have_text("0")
    console.get_by_role("button", name="Read again").click()
    row.get_by_role("button", name=re.compile("^Dead letter")).click()
    console.get_by_role("button", name="Edit and restash").click()
    console.get_by_role("dialog").get_by_label("Value").fill("short")
    confirm(console, "Stash anew", "shortened", "stashed")
    assert [one.value for one in read_topic(world.kafka.bootstrap, topic, count=1)] == [b"short"]
