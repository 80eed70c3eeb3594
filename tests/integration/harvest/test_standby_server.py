"""A database server that becomes a standby, and is promoted again."""

import psycopg
import pytest

from outbox_core.cli import main
from outbox_core.errors import StoreUnavailable
from outbox_core.harvest import harvester as harvester_module
from outbox_core.record import OutboxRecord
from outbox_core.stores.postgres.store import PostgresStore
from tests.harvesting import Scene, wait_until


@pytest.fixture
def scene(own_postgres, kafka_bootstrap):
    """An outbox on a server of its own."""
    scene = Scene(own_postgres.create_database("outbox"), kafka_bootstrap)
    yield scene
    scene.close()


def restart_as_standby(server):
    """Restart a server that then takes no writes, as the reader of a cluster after a failover."""
    server.stop()
    (server._data / "standby.signal").touch()
    server.start()


def test_standby_is_refused(scene, own_postgres, make_topic, capsys, monkeypatch):
    """No session works on a standby, where published rows may be found again; harvesting goes on on a primary."""
    monkeypatch.setattr(harvester_module, "_UNHEALTHY_AFTER_SECONDS", 0.5)
    topic = make_topic()
    with scene.running(limits={"io_error_backoff": "50ms"}) as harvester:
        scene.stash(OutboxRecord(topic, "k", "1"))
        wait_until(lambda: scene.count() == 0, "it publishes")
        restart_as_standby(own_postgres)
        with pytest.raises(StoreUnavailable, match="is a standby; name the primary"):
            PostgresStore(scene.database).check()
        wait_until(lambda: "is a standby" in harvester.health().detail, "health tells of it")
        main(["doctor", "--dsn", scene.database, "--bootstrap-servers", scene.bootstrap])
        told = capsys.readouterr().out
        assert "connect to the primary" in told
        assert told.count("PROBLEM") == 1
        with psycopg.connect(own_postgres.dsn, autocommit=True) as connection:
            connection.execute("SELECT pg_promote()")
        scene.stash(OutboxRecord(topic, "k", "2"))
        wait_until(lambda: scene.count() == 0, "it goes on")
    assert [message.value for message in scene.read(topic)] == [b"1", b"2"]
