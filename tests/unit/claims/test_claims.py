"""Claim checks: which payloads go to a store, what their records carry, and what comes back."""

import os
import stat
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from unittest import mock

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from outbox_core import OutboxRecord, Stasher
from outbox_core.claims import CLAIM_HEADER, ClaimMissing, ClaimStoreFailed, FolderStore, FsspecStore, claim_of, orphans
from outbox_core.claims.claims import ClaimName, collect, written_before
from outbox_core.claims.stores import store_of
from outbox_core.cli import claims, main
from outbox_core.errors import InvalidConfig, InvalidRecord, MissingExtra, TransactionRequired
from outbox_core.schema import TEXT_LAYOUT, TableName
from outbox_django import OutboxTable
from outbox_queue import InvalidMessage, QueueConfig, QueueService
from outbox_sqlalchemy import Outbox

SECRET = "../../etc/passwd"
_NAME = "orders/20260101T000000Z-" + "0" * 32


@pytest.fixture(params=["folder", "fsspec", "memory"])
def store(request, tmp_path):
    """Return an empty store of each kind that needs no service."""
    if request.param == "folder":
        return FolderStore(tmp_path / "claims")
    if request.param == "fsspec":
        return FsspecStore(LocalFileSystem(), str(tmp_path / "claims"))
    return FsspecStore(fsspec.filesystem("memory"), f"/{tmp_path.name}/claims")


def _stasher(store, above=10, **options):
    return Stasher(claim_store=store, claim_check_above=above, **options)


def _claim(row):
    return dict(zip(row[3], row[4], strict=True))[CLAIM_HEADER].decode()


def test_large_payloads_go_to_the_store(store):
    """A value of more bytes than the limit is in the store, and its record is empty but for the name."""
    stasher = _stasher(store)
    for value, payload in (("ö" * 6, "ö".encode() * 6), (b"x" * 11, b"x" * 11), ({"a": "b" * 9}, b'{"a":"bbbbbbbbb"}')):
        row = stasher.row(OutboxRecord("orders.v1", 1, value, headers={"a": "b"}))
        assert (row[2], row[3]) == (b"", ["a", CLAIM_HEADER])
        assert store.get(_claim(row)) == payload
        assert ClaimName.parse(_claim(row)).topic == "orders.v1"
    assert len(list(store.names())) == 3


def test_small_ones_and_tombstones_stay(store):
    """A value up to the limit, and a tombstone, are in their records as ever."""
    stasher = _stasher(store)
    for value in (b"x" * 10, "x" * 10, "ö" * 5, b"", None):
        row = stasher.row(OutboxRecord("t", value=value))
        assert row[3] == []
        assert row[2] == (value.encode() if isinstance(value, str) else value)
    assert list(store.names()) == []


def test_the_serialized_value_counts(store):
    """The bytes that a serializer made of the value are measured and stored."""
    row = _stasher(store, serializer=lambda value: value * 3).row(OutboxRecord("t", value=b"1234"))
    assert store.get(_claim(row)) == b"123412341234"


def test_a_text_table(store):
    """A table of text takes large payloads too, bytes included, as they are not in it."""
    row = _stasher(store, layout=TEXT_LAYOUT).row(OutboxRecord("t", "k", b"\xff" * 11))
    assert row[2] == ""
    assert store.get(dict(zip(row[3], row[4], strict=True))[CLAIM_HEADER]) == b"\xff" * 11


def test_names_and_ages(store):
    """Payloads are listed by name, with the time of their writing; other files are not ours."""
    _stasher(store).row(OutboxRecord("t", value=b"x" * 11))
    (name,) = store.names()
    assert abs(ClaimName.parse(name).written_at - datetime.now(UTC)) < timedelta(hours=1)
    assert list(written_before(store, datetime(2020, 1, 1, tzinfo=UTC))) == []
    assert [found for found, _ in written_before(store, datetime(9000, 1, 1, tzinfo=UTC))] == [name]
    store.delete(name)
    store.delete(name)
    assert list(store.names()) == []
    with pytest.raises(ClaimMissing, match=name):
        store.get(name)


@pytest.mark.parametrize(
    "name", [SECRET, "../20260101T000000Z-" + "0" * 32, "t/20261301T000000Z-" + "0" * 32, "t/x", "", "t\0/x"]
)
def test_forged_names_lead_nowhere(store, name):
    """A name that no stash has made is refused, by readers and by the stores themselves."""
    with pytest.raises(ClaimMissing, match="is no name of a payload"):
        collect(store, name)
    with pytest.raises(InvalidConfig):
        store.put(name, b"x")


def test_who_has_a_claim():
    """Only an empty value is claimed: a header that was forwarded with a value of its own means nothing."""
    headers = [(CLAIM_HEADER, b"first"), ("a", None), (CLAIM_HEADER, b"last")]
    assert claim_of(headers, b"") == "last"
    assert claim_of(headers, b"own") is None
    assert claim_of(headers, None) is None
    assert claim_of([(CLAIM_HEADER, b"")], b"") is None
    assert claim_of(None, b"") is None
    assert claim_of([(CLAIM_HEADER, b"\xff")], b"") == "�"


class _Broken(FolderStore):
    """A store whose disk is full."""

    def put(self, *_):
        raise OSError(28, "No space left on device")

    get = names = delete = lambda *_: 1 / 0


def test_a_store_that_fails(tmp_path):
    """A store that fails raises before any SQL, with topic, size and cause; reading says so likewise."""
    stasher = _stasher(_Broken(tmp_path))
    expected = r"value: 11 bytes for topic 'orders' could not be written to _Broken: OSError: .*No space left"
    with pytest.raises(ClaimStoreFailed, match=expected):
        stasher.stash(None, OutboxRecord("orders", value=b"x" * 11))
    name = "t/20260101T000000Z-" + "0" * 32
    with pytest.raises(ClaimStoreFailed, match="could not be read from _Broken: ZeroDivisionError"):
        collect(_Broken(tmp_path), name)
    with pytest.raises(ClaimMissing, match="pass the store"):
        collect(None, name)


def test_options(tmp_path):
    """Both options, or neither; each adapter's outbox has them, and so has a service of queues."""
    store = FolderStore(tmp_path)
    for wrong in ({"claim_store": store}, {"claim_check_above": 1}):
        with pytest.raises(InvalidConfig, match="give both, or neither"):
            Stasher(**wrong)
    for wrong in ({"claim_check_above": -1}, {"claim_check_above": "1 MB"}, {"claim_store": object()}):
        with pytest.raises(InvalidConfig, match=f"^{next(iter(wrong))}: "):
            Stasher(**{"claim_store": store, "claim_check_above": 1, **wrong})
    options, record = {"claim_store": store, "claim_check_above": 1}, OutboxRecord("t", value=b"xx")
    assert OutboxTable("outbox", **options)._stasher.row(record)[2] == b""
    assert Outbox(**options)._parameters(record)["kafka_value"] == b""
    queue = QueueService(QueueConfig(bootstrap_servers="nowhere:1", message_topic="jobs"), **options).queue("q")
    job = queue.record(b"x" * 5_000_000)
    assert (job.value, [name for name, _ in job.headers]) == ("", [CLAIM_HEADER])
    assert store.get(job.headers[0].value) == b"x" * 5_000_000


def test_nothing_goes_to_the_store_for_a_stash_that_is_refused(store):
    """A connection that commits by itself is refused before the upload; a queue takes its payload back."""
    autocommit, record = SimpleNamespace(autocommit=True, cursor=None), OutboxRecord("t", value=b"x" * 11)
    with pytest.raises(TransactionRequired):
        _stasher(store).stash(autocommit, record)
    with pytest.raises(TransactionRequired):
        _stasher(store).stash_many(autocommit, [record])
    options = {"claim_store": store, "claim_check_above": 10}
    queue = QueueService(QueueConfig(bootstrap_servers="nowhere:1", message_topic="jobs"), **options).queue("q")
    for refused, error in ((autocommit, TransactionRequired), (object(), InvalidRecord)):
        with pytest.raises(error):
            queue.stash(refused, b"x" * 11)
    assert list(store.names()) == []


def test_a_refused_message_takes_back_its_own_payload_only(store):
    """A message that is refused leaves no payload of its own, and that of a forwarded header is another message's."""
    options = {"claim_store": store, "claim_check_above": 10}
    config = QueueConfig(bootstrap_servers="nowhere:1", message_topic="jobs")
    queue = QueueService(config, **options).queue("q")
    received = queue.record(b"x" * 11)
    names = list(store.names())
    for refused in ({"delay": timedelta(days=365)}, {"headers": {"h": b"x" * 1_000_000}}):
        with pytest.raises(InvalidMessage):
            queue.record(b"y" * 11, **refused)
    for payload in (b"small", b"", b"y" * 11):
        with pytest.raises(TransactionRequired):
            queue.stash(SimpleNamespace(autocommit=True, cursor=None), payload, headers=received.headers)
    assert list(store.names()) == names


def test_stores_of_a_command(tmp_path):
    """The command's option is a folder or a URL."""
    assert isinstance(store_of(str(tmp_path)), FolderStore)
    assert isinstance(store_of(f"file://{tmp_path}"), FsspecStore)
    with pytest.raises(InvalidConfig, match="claim store: "):
        store_of("nonsense://bucket")
    with pytest.raises(MissingExtra, match="claim store s3: "):
        store_of("s3://bucket/claims")


@pytest.mark.parametrize(
    ("store", "told"),
    [
        ("{}/no", "outbox: error: --store: there is no folder {}/no\n"),
        ("postgresql://u:s3c r3t@localhost/db", "outbox: error: --store: contains white space; write `%20` "),
        ("postgresql://u:s3cr3t@127.0.0.1:1/db", "outbox: error: payloads could not be listed in TableStore: Operat"),
    ],
)
def test_stores_that_a_command_cannot_use(store, told, tmp_path, monkeypatch, capsys):
    """A store that is not there is told in one line, without its password; it must not look like an empty one."""
    monkeypatch.setattr(claims, "connect", lambda *_: (mock.MagicMock(), TableName("outbox")))
    monkeypatch.setattr(claims, "_existing", lambda *_: set())
    assert main(["claims", "list", "--store", store.format(tmp_path), "--older-than", "1d"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(told.format(tmp_path))
    assert error.count("\n") == 1
    assert "r3t" not in error


def test_payload_that_a_command_cannot_delete(tmp_path, monkeypatch, capsys):
    """A store that fails in between is told in one line that names the payload."""
    monkeypatch.setattr(claims, "connect", lambda *_: (mock.MagicMock(), TableName("outbox")))
    monkeypatch.setattr(claims, "_existing", lambda *_: set())
    monkeypatch.setattr(orphans, "find_orphans", lambda *_, **__: ["t/1"])
    monkeypatch.setattr(FolderStore, "delete", mock.Mock(side_effect=PermissionError(13, "Permission denied")))
    assert main(["claims", "delete", "--store", str(tmp_path), "--older-than", "1d"]) == 2
    told = (
        "outbox: error: payload t/1 could not be deleted in FolderStore: PermissionError: [Errno 13] Permission denied"
    )
    assert capsys.readouterr().err == f"{told}\n"


def test_files_are_for_their_owner(tmp_path):
    """No other user reads payloads, unless the store is told so; the umask takes more away, and gives nothing."""
    old = os.umask(0o022)
    try:
        modes = []
        for folder, options in (("own", {}), ("group", {"mode": 0o640})):
            store = FolderStore(tmp_path / folder, **options)
            store.put(_NAME, b"secret")
            file = tmp_path / folder / _NAME
            modes += [stat.S_IMODE(path.stat().st_mode) for path in (file.parent.parent, file.parent, file)]
            assert store.get(_NAME) == b"secret"
    finally:
        os.umask(old)
    assert modes == [0o700, 0o700, 0o600, 0o750, 0o750, 0o640]
    for mode in (0o400, 0o700, True, "600"):
        with pytest.raises(InvalidConfig, match="mode: expected"):
            FolderStore(tmp_path, mode=mode)


def test_links_are_not_followed(tmp_path):
    """Neither a payload nor its topic's folder may be a link: another user could have it lead anywhere."""
    store, elsewhere = FolderStore(tmp_path / "claims"), FolderStore(tmp_path / "elsewhere")
    elsewhere.put(_NAME, b"of others")
    (tmp_path / "claims" / "orders").mkdir(parents=True)
    (tmp_path / "claims" / _NAME).symlink_to(tmp_path / "elsewhere" / _NAME)
    (tmp_path / "claims" / "refunds").symlink_to(tmp_path / "elsewhere" / "orders")
    for name in (_NAME, _NAME.replace("orders", "refunds")):
        with pytest.raises(ClaimStoreFailed, match="could not be read"):
            collect(store, name)
        with pytest.raises(OSError, match=r"link|exists"):
            store.put(name, b"x")
    assert elsewhere.get(_NAME) == b"of others"


@pytest.mark.parametrize("make", [FolderStore, lambda folder: FsspecStore(LocalFileSystem(), str(folder))])
def test_a_topic_that_is_a_file(tmp_path, make):
    """A name below another file of the folder is one of no payload: whoever writes to a topic may send such a name."""
    (tmp_path / "README").write_text("payloads of the outbox")
    with pytest.raises(ClaimMissing, match="has no payload README/2026"):
        collect(make(tmp_path), _NAME.replace("orders", "README"))
