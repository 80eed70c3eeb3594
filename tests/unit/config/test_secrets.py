"""Secrets stay hidden: in reprs, errors, log lines and findings, in settings of any name."""

import dataclasses
import importlib.util
import inspect
import json
import logging
import pkgutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from django.test import override_settings

from outbox_core.cli import main
from outbox_core.config import HarvestConfig, redact, redact_settings
from outbox_core.config.data_source import normalise_data_source
from outbox_core.config.redaction import is_secret
from outbox_core.errors import InvalidConfig, KafkaUnavailable, OutboxError
from outbox_core.kafka.clients import make_producer
from outbox_core.kafka.identity import TransactionalIdentity
from outbox_core.stores.postgres.connection import parameters_of
from outbox_django.settings import outbox_settings

CANARY = "S3cr3tCanary"
_PACKAGES = ["outbox_core", "outbox_sqlalchemy", "outbox_django", "outbox_queue"]
if importlib.util.find_spec("pyspark"):
    _PACKAGES.append("outbox_spark")
_MAY_HOLD_SECRETS = {"dsn", "data_source", "kafka", "producer", "producer_kafka", "base_kafka_config"}

SECRET_SETTINGS = [
    "sasl.password",
    "ssl.key.password",
    "ssl.key.pem",
    "ssl_key",
    "ssl.keystore.password",
    "sasl.oauthbearer.client.secret",
    "sasl.oauthbearer.assertion.private.key.pem",
    "sasl.oauthbearer.assertion.private.key.passphrase",
    "sasl.oauthbearer.config",
    "sasl.jaas.config",
    "basic.auth.user.info",
]
PLAIN_SETTINGS = ["bootstrap.servers", "ssl.key.location", "ssl.keystore.location", "sasl.username", "ssl.ca.pem"]

# Passwords that libpq would quote in its errors.
UNREADABLE = [
    f"postgresql://me:{CANARY} word@127.0.0.1:1/db",
    f"postgresql://me:{CANARY}\tword@127.0.0.1:1/db",
    f"postgresql://me:{CANARY}%zz@127.0.0.1:1/db",
    f"postgresql://me:{CANARY}%00@127.0.0.1:1/db",
    f"postgresql://me:{CANARY}%@127.0.0.1:1/db",
    f"postgresql://127.0.0.1:1/db?user=me&password={CANARY}&{CANARY}",
    f"postgresql://127.0.0.1:1/db?password=a={CANARY}",
    f"postgresql://me:{CANARY}@word@127.0.0.1:1/db",
    f"host=127.0.0.1 port=1 password=a {CANARY}=c",
]


def _records():
    """Yield every dataclass and named tuple of the packages."""
    for name in _PACKAGES:
        package = importlib.import_module(name)
        for found in pkgutil.walk_packages(package.__path__, f"{name}."):
            if found.name.endswith("__main__") or ".migrations" in found.name:
                continue
            module = importlib.import_module(found.name)
            for value in vars(module).values():
                if inspect.isclass(value) and value.__module__ == found.name:
                    if dataclasses.is_dataclass(value):
                        yield value, {field.name: field.type for field in dataclasses.fields(value)}
                    elif issubclass(value, tuple) and hasattr(value, "_fields"):
                        yield value, {name: value.__annotations__.get(name) for name in value._fields}


def _canary_for(name, kind):
    """Return settings or a DSN with a secret, for fields that may have one."""
    named = name in _MAY_HOLD_SECRETS and any(word in str(kind) for word in ("Mapping", "dict", "str", "Any"))
    if not named and "Mapping[str, Any]" not in str(kind):
        return "plain"
    return f"host=db password={CANARY}" if str(kind) == "str" else {"sasl.password": CANARY}


def test_repr_of_every_record_of_settings():
    """No dataclass or named tuple with Kafka's settings or a DSN shows them in its repr."""
    held = []
    for record, fields in _records():
        values = {name: _canary_for(name, kind) for name, kind in fields.items()}
        if not any(CANARY in str(value) for value in values.values()):
            continue
        held.append(record.__name__)
        if issubclass(record, tuple):
            made = tuple.__new__(record, values.values())
        else:
            made = object.__new__(record)
            for name, value in values.items():
                object.__setattr__(made, name, value)
        try:
            shown = repr(made)
        except AttributeError:  # a repr of its own, which reads attributes of the values
            continue
        assert CANARY not in shown, record
    assert {"TransactionalIdentity", "OutboxSettings", "NeliConfig"} <= set(held)


def test_repr_of_settings_in_use():
    """The settings of exactly-once delivery and of Django hide their secrets, and still name outbox and brokers."""
    kafka = {"bootstrap.servers": "kafka:9092", "sasl.password": CANARY, "ssl_key": CANARY}
    config = HarvestConfig(base_kafka_config=kafka, data_source=f"postgresql://me:{CANARY}@db/shop")
    transactions = TransactionalIdentity.of(config, "shop.public.outbox")
    with override_settings(OUTBOX={"KAFKA": kafka, "PRODUCER_KAFKA": {"ssl.key.pem": CANARY}}):
        for settings in (config, transactions, outbox_settings()):
            assert CANARY not in f"{settings!r} {settings!s}"
    assert "shop.public.outbox" in repr(transactions)
    assert "kafka:9092" in repr(config)


@pytest.mark.parametrize("name", SECRET_SETTINGS)
def test_secret_settings(name):
    """Settings of these names are hidden: as settings, in text, and as environment variables."""
    assert is_secret(name)
    assert is_secret(f"OUTBOX_KAFKA_{name.replace('.', '_').upper()}")
    assert CANARY not in str(redact_settings({name: CANARY}))
    assert CANARY not in redact(f'refused {name}={CANARY}, "{name}": "{CANARY}"')


@pytest.mark.parametrize("name", PLAIN_SETTINGS)
def test_settings_that_are_no_secret(name):
    """A path or an address is shown, so that a mistake in it can be seen."""
    assert not is_secret(name)


@pytest.mark.parametrize(
    "name", ["security.protocol", "sasl.mechanism", "sasl.oauthbearer.method", "compression.type", "partitioner"]
)
def test_a_password_in_the_place_of_another_setting(name):
    """An error of the Kafka client names the setting, and not its value."""
    servers = {"bootstrap.servers": "127.0.0.1:1", "security.protocol": "sasl_ssl"}
    with pytest.raises(InvalidConfig, match=r"protocol|mechanism|method|codec|partitioner") as caught:
        make_producer({**servers, name: CANARY})
    assert CANARY not in str(caught.value)


@pytest.mark.timeout(60)
def test_long_words_are_looked_through_once():
    """A line of a log with a word of a hundred thousand letters, as of an error of a handler, is written at once."""
    word = "a" * 100_000
    assert redact(f"{word} password={CANARY} {word}") == f"{word} password=*** {word}"


class NoKafka(nullcontext):
    """A cluster that does not answer, at once."""

    def __init__(self, *_, **__):
        super().__init__(self)

    def checks(self):
        raise KafkaUnavailable("away")


@pytest.mark.parametrize("dsn", UNREADABLE)
@pytest.mark.parametrize(
    "command", [["status"], ["doctor"], ["hold", "list"], ["inbox", "prune", "--older-than", "1d"]]
)
def test_data_sources_that_cannot_be_read(dsn, command, monkeypatch, capsys, caplog):
    """A password that libpq cannot read in its place is in no output of any command."""
    monkeypatch.setenv("OUTBOX_POSTGRES_DSN", dsn)
    monkeypatch.setenv("OUTBOX_KAFKA_BOOTSTRAP", "127.0.0.1:1")
    for module in ("examination", "status"):
        monkeypatch.setattr(f"outbox_core.doctor.{module}.KafkaConnecting", NoKafka)
    with caplog.at_level(logging.DEBUG):
        assert main(command) in {2, 5}
    told = capsys.readouterr()
    assert CANARY not in told.out + told.err + caplog.text
    assert told.out + told.err


def test_a_parameter_of_another_driver_is_named():
    """A URL written for asyncpg is refused with what libpq calls the same."""
    url = normalise_data_source(f"postgresql+asyncpg://app:{CANARY}@db/shop?ssl=require")
    with pytest.raises(InvalidConfig, match="write sslmode=require") as raised:
        parameters_of(url)
    assert CANARY not in str(raised.value)


@pytest.mark.parametrize("dsn", UNREADABLE[:-1])
def test_urls_are_refused_without_being_shown(dsn):
    """A URL that libpq would misread is refused with the remedy, without quoting any of it."""
    with pytest.raises(ValueError, match=r"write `%|more than one `@`") as raised:
        normalise_data_source(dsn)
    assert CANARY not in str(raised.value)


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://me:a%20b%25c@db:5432/shop?sslmode=require&options=-c%20geqo%3Doff",
        "postgresql://db/shop?",
        "postgresql:///shop?host=/var/run/postgresql&",
    ],
)
def test_urls_that_libpq_understands_stay(dsn):
    """Escapes, options and an empty query of a URL are accepted."""
    assert normalise_data_source(dsn).startswith("postgresql://")


@pytest.mark.parametrize("dsn", UNREADABLE)
def test_spark_targets_do_not_show_the_dsn(dsn):
    """A failed connection does not show the password of its target."""
    pytest.importorskip("pyspark")
    from outbox_spark.postgres.projection_store import ProjectionStore

    with pytest.raises(OutboxError) as raised:
        ProjectionStore(dsn, SimpleNamespace(query="q", table="t", tables=["t"]))
    assert CANARY not in f"{raised.value!r} {raised.value.__cause__!r}"


def test_findings_as_json_are_json(capsys, monkeypatch):
    """The output of `doctor --json` without services is JSON, and shows no secret."""
    monkeypatch.setenv("OUTBOX_POSTGRES_DSN", f"postgresql://me:{CANARY}@127.0.0.1:1/db")
    monkeypatch.setattr("outbox_core.doctor.examination.KafkaConnecting", NoKafka)
    assert main(["doctor", "--json"]) == 5
    out = capsys.readouterr().out
    assert json.loads(out)
    assert CANARY not in out
