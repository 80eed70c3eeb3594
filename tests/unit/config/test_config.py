"""Settings: goharvest's file, durations, data sources, precedence, and hidden secrets."""

import logging
import re
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from pydantic import ValidationError

from outbox_core.config import (
    HarvestConfig,
    Limits,
    format_duration,
    load_config,
    load_file,
    log_level,
    normalise_data_source,
    parse_duration,
    read_document,
    redact,
)
from outbox_core.config import models as config_models
from outbox_core.errors import InvalidConfig

REAPER_YAML = (Path(__file__).parents[2] / "reaper.yaml").read_text()
SECRET = "s3cr3t"


@pytest.fixture(autouse=True)
def _say_everything_again():
    config_models._say_once.cache_clear()


@pytest.fixture
def write(tmp_path):
    """Write a reaper.yaml."""

    def write(text: str):
        path = tmp_path / "reaper.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


# -- goharvest's file --------------------------------------------------------------------------------------------------


def test_reaper_file_of_goharvest_is_accepted_unchanged(write):
    """Every setting of the file in seed 001 arrives."""
    config = load_file(write(REAPER_YAML))
    assert config.base_kafka_config == {"bootstrap.servers": "localhost:9092"}
    assert config.producer_kafka_config == {"compression.type": "lz4", "delivery.timeout.ms": 10000}
    assert config.leader_names("ignored") == ("my-app-name", "my-app-name")
    assert config.outbox_table == "outbox"
    assert config.limits.min_poll_interval == timedelta(seconds=1)
    assert config.limits.heartbeat_timeout == timedelta(seconds=5)
    assert config.limits.max_in_flight_records == 1000
    assert config.limits.min_metrics_interval == timedelta(seconds=5)


def test_secure_file_of_goharvest_is_accepted_but_for_its_topic():
    """The secure file of goharvest passes through, but for a leader topic that belongs to Kafka itself."""
    kafka = {
        "bootstrap.servers": "localhost:9094",
        "security.protocol": "sasl_ssl",
        "ssl.ca.location": "ca-cert.pem",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "alice",
        "sasl.password": SECRET,
    }
    document = {"harvest": {"baseKafkaConfig": kafka, "leaderTopic": "__consumer_offsets", "leaderGroupID": "app"}}
    with pytest.raises(
        InvalidConfig,
        match=r"^harvest\.leaderTopic: is one of Kafka's own topics, which clients must not write to; name another$",
    ):
        load_config(document)
    config = load_config(document, environ={"OUTBOX_LEADER_TOPIC": "app.neli"})
    assert kafka.items() <= config.producer_settings().items()
    assert kafka.items() <= config.neli_settings("app").items()


def test_level_of_the_reaper_file_becomes_pythons(write):
    """`logging.level: Debug` is logging.DEBUG."""
    assert log_level(read_document(write(REAPER_YAML))) == logging.DEBUG


def test_settings_without_effect_are_named_in_one_warning(write, caplog):
    """Settings that have no effect here are accepted, and named in one warning."""
    load_file(write(REAPER_YAML.replace("sendBuffer: 10", "sendBuffer: 10\n    queueTimeout: 30s")))
    load_file(write(REAPER_YAML))
    warnings = [record.getMessage() for record in caplog.records if "without effect" in record.getMessage()]
    assert warnings[0].endswith("limits.sendConcurrency, limits.sendBuffer, limits.queueTimeout")


def test_settings_of_gos_client_are_left_out(caplog):
    """`go.*` properties of Go's Kafka client do not reach librdkafka."""
    config = load_config({"harvest": {"producerKafkaConfig": {"go.batch.producer": True, "linger.ms": 1}}})
    assert "go.batch.producer" not in config.producer_settings()
    assert "producer_kafka_config.go.batch.producer" in caplog.text


@pytest.mark.parametrize("text", ["", "harvest:\n", "harvest:\nlogging:\n", "harvest:\n  limits:\n  dataSource:\n"])
def test_empty_file_gives_defaults(write, text):
    """An empty file, or names without values, mean the defaults."""
    config = load_file(write(text))
    assert config.limits == Limits()
    assert config.base_kafka_config == {"bootstrap.servers": "localhost:9092"}


def test_smaller_in_flight_limit_takes_the_default_mark_limit_down():
    """A file that sets only maxInFlightRecords stays valid."""
    limits = Limits(max_in_flight_records=1000)
    assert limits.mark_query_records == 1000
    assert Limits().mark_query_records == 5000


def test_limits_that_contradict_each_other_are_refused():
    """A mark limit above the in-flight limit is refused if both were set, and an equal one accepted."""
    with pytest.raises(InvalidConfig, match="markQueryRecords must not be more than maxInFlightRecords"):
        Limits(max_in_flight_records=1000, mark_query_records=1001)
    assert Limits(max_in_flight_records=1000, mark_query_records=1000).mark_query_records == 1000


# -- wrong files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("harvest: {limits: {markQuery: 1}}", r"harvest\.limits\.markQuery: unknown field; .* markQueryRecords\?"),
        ("harvest: {limits: {mark_query: 1}}", r"harvest\.limits\.mark_query: .* did you mean mark_query_records\?"),
        ("harvest: {leaderGroupId: x}", r"harvest\.leaderGroupId: unknown field; did you mean leaderGroupID\?"),
        ("harvester: {}", r"harvester: unknown field; did you mean harvest\?"),
        ("logging: {levle: debug}", r"logging\.levle: unknown field; did you mean level\?"),
        ("harvest: []", "harvest: must be a mapping"),
        ("harvest: {limits: 5}", r"harvest\.limits: must be a mapping"),
        ("harvest: {baseKafkaConfig: kafka:9092}", r"harvest\.baseKafkaConfig: must be a mapping"),
        ("harvest: {baseKafkaConfig: {security: {protocol: ssl}}}", r"harvest\.baseKafkaConfig\.security: .*single"),
        (
            "harvest: {baseKafkaConfig: {bootstrap.servers: ' , '}}",
            r"baseKafkaConfig\.bootstrap\.servers: is empty; write",
        ),
        (
            "harvest: {baseKafkaConfig: {bootstrap.servers: 'a:9092,kafka://b:9092'}}",
            r"baseKafkaConfig\.bootstrap\.servers: must be `host:port`, without a scheme",
        ),
        ("harvest: {baseKafkaConfig: {sasl.username: }}", r"harvest\.baseKafkaConfig\.sasl\.username: has no value"),
        ("harvest: {baseKafkaConfig: {sasl.password: 0123}}", r"sasl\.password: put it in quotes"),
        ("harvest: {outboxName: ' '}", r"harvest\.outboxName: must not be empty, or begin or end with blanks"),
        ("harvest: {leaderGroupID: 'shop '}", r"harvest\.leaderGroupID: must not .* end with blanks"),
        ("harvest: {leaderTopic: 5}", r"harvest\.leaderTopic: must be text; put it in quotes"),
        ("harvest: {leaderTopic: a b}", r"harvest\.leaderTopic: is not a topic name"),
        ("harvest: {leaderTopic: __consumer_offsets}", r"harvest\.leaderTopic: is one of Kafka's own topics"),
        ("harvest: {leaderTopic: a, leader_topic: b}", r"harvest\.leader_topic: is given twice"),
        ("harvest: {leaderTopic: a, leaderTopic: b}", r"line 1, column 27: .*`leaderTopic` is given twice"),
        ("harvest: {limits: {heartbeatTimeout: 5}}", r"harvest\.limits\.heartbeatTimeout: .*needs a unit; write `5s`"),
        ("harvest: {limits: {heartbeatTimeout: 5 s}}", r"harvest\.limits\.heartbeatTimeout: is not a duration"),
        ("harvest: {limits: {heartbeatTimeout: 10ms}}", r"heartbeatTimeout: must be between 1s and 10m"),
        ("harvest: {limits: {markBackoff: 0s}}", r"markBackoff: must be between 1ms and 1h"),
        ("harvest: {limits: {maxInFlightRecords: 0}}", r"harvest\.limits\.maxInFlightRecords: .*must be 1 or more"),
        (
            "harvest: {limits: {maxInFlightRecords: yes}}",
            r"harvest\.limits\.maxInFlightRecords: must be a whole number",
        ),
        ("harvest: {metricsPort: 70000}", r"harvest\.metricsPort: .*must be 65535 or less"),
        ("harvest: {dataSource: 'mysql://a@b/c'}", r"harvest\.dataSource: is the URL of another kind of database"),
        ("harvest: {dataSource: localhost}", r"harvest\.dataSource: is not a list of `key=value` .*`postgresql://"),
        ("- harvest", "must be a mapping with `harvest:` and `logging:`"),
        ("on: x", r"True: unknown field"),
        ("logging: {1: x}", r"logging\.1: unknown field"),
        ("harvest: {dataSource: {{ dsn }}}", r"line 1, column 24: .* a `\{\{ \}\}` that was not filled in\?"),
        ("harvest: {? [a, b] : c}", r"line 1, column 13: .*a list or mapping stands where a name should be"),
        ("harvest: [", r"reaper\.yaml, line 1, column 11: is not valid YAML"),
    ],
)
def test_wrong_file_is_refused_naming_the_setting(write, text, complaint):
    """A wrong setting is refused by its full path, with the right form."""
    with pytest.raises(InvalidConfig, match=complaint) as caught:
        load_file(write(text))
    assert "\n" not in str(caught.value)


def test_all_problems_are_reported_together():
    """One run of the command is enough to find every mistake."""
    wrong = {
        "harvest": {"leaderTopik": "a", "limits": {"markQuery": 1, "markBackoff": "x"}, "metricsPort": "y"},
        "x": 1,
    }
    with pytest.raises(InvalidConfig) as caught:
        load_config(wrong)
    names = [sentence.partition(":")[0] for sentence in str(caught.value).split("; ") if ": " in sentence]
    assert sorted(names) == [
        "harvest.leaderTopik",
        "harvest.limits.markBackoff",
        "harvest.limits.markQuery",
        "harvest.metricsPort",
        "x",
    ]


def test_file_that_cannot_be_read_is_one_clear_error(tmp_path):
    """A file that cannot be read is one error with its path and the reason."""
    with pytest.raises(InvalidConfig, match=r"missing\.yaml: cannot be read: No such file or directory"):
        load_file(tmp_path / "missing.yaml")


def test_python_names_raise_the_same_error():
    """Wrong settings made in Python raise InvalidConfig, not pydantic's error, and name Python's fields."""
    with pytest.raises(InvalidConfig, match=r"leader_topic: must be text.*limits\.mark_query: unknown field") as caught:
        HarvestConfig(leader_topic=5, limits={"mark_query": 1})
    assert not isinstance(caught.value, ValidationError)


def test_config_cannot_be_changed():
    """Settings are frozen."""
    config = HarvestConfig()
    with pytest.raises(ValidationError):
        config.outbox_table = "other"


# -- durations ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5s", 5),
        ("100ms", 0.1),
        ("1m30s", 90),
        ("1.5h", 5400),
        (".5s", 0.5),
        ("250us", 0.00025),
        ("0", 0),
        (0, 0),
        (timedelta(seconds=7), 7),
    ],
)
def test_durations_are_read_as_go_writes_them(text, seconds):
    """Durations are read in Go's notation; a timedelta stays as it is."""
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["5", 5, 1.5, True, "", "s", "5 s", "-5s", "5x", "5s5", None, "1e3s", "99999999h"])
def test_other_durations_are_refused(text):
    """Durations without a unit, and in other notations, are refused."""
    with pytest.raises(ValueError, match=r"unit|not a duration|longer"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["0s", "1ms", "100ms", "1.5s", "5s", "1m30s", "2h", "1h0.25s"])
def test_written_durations_are_read_back(text):
    """`parse_duration` reads back any duration that `format_duration` writes."""
    assert parse_duration(format_duration(parse_duration(text))) == parse_duration(text)
    assert format_duration(parse_duration(text)) == text


# -- data sources ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (
            "host=localhost port=5432 user=postgres password= dbname=postgres sslmode=disable",
            {"host": "localhost", "port": "5432", "user": "postgres", "dbname": "postgres", "sslmode": "disable"},
        ),
        ("password='a b' dbname=x", {"password": "a b", "dbname": "x"}),
        (r"password=a\ b dbname=x", {"password": "a b", "dbname": "x"}),
        (r"password='it\'s' dbname=x", {"password": "it's", "dbname": "x"}),
        ("password='dbname=y' dbname=x", {"password": "dbname=y", "dbname": "x"}),
        ("password= a=b dbname=x", {"password": "a=b", "dbname": "x"}),
        ("password= geheim dbname=x", {"password": "geheim", "dbname": "x"}),
        ("host = h dbname = x password =", {"host": "h", "dbname": "x"}),
        ("password='' dbname=x", {"dbname": "x"}),
        ("dbname=x binary_parameters=yes", {"dbname": "x"}),
        ("postgres://u:p%40@h:1/db", {"user": "u", "password": "p@", "host": "h", "port": "1", "dbname": "db"}),
        ("postgresql+psycopg://postgres@/db?host=/dir", {"user": "postgres", "host": "/dir", "dbname": "db"}),
        ("postgresql+asyncpg://u@h/db", {"user": "u", "host": "h", "dbname": "db"}),
        (
            "postgresql://h/db?binary_parameters=yes&sslmode=require",
            {"host": "h", "dbname": "db", "sslmode": "require"},
        ),
        ("postgresql://[::1]:5432/db", {"host": "::1", "port": "5432", "dbname": "db"}),
    ],
)
def test_data_source_means_to_libpq_what_was_meant(text, meant):
    """Every notation of a data source means to libpq what it says; empty values are empty."""
    read = psycopg.conninfo.conninfo_to_dict(normalise_data_source(text))
    assert {key: value for key, value in read.items() if value} == meant


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("usr=shop", "has the unknown option `usr`; did you mean `user`?"),
        ("postgresql://h/d?sslmod=require", "has the unknown option `sslmod`; did you mean `sslmode`?"),
        (
            f"password=two {SECRET}=x",
            "has an unknown option behind `password`; put values with spaces in single quotes",
        ),
        (f"{SECRET}=x", "has an unknown option; write for example `host=localhost dbname=shop user=shop`"),
    ],
)
def test_unknown_options_of_a_data_source(text, why):
    """A mistyped option is named with the right one; what may be a part of a password is not shown."""
    with pytest.raises(ValueError, match=re.escape(why)):
        normalise_data_source(text)


def test_normalised_data_source_stays_as_it_is():
    """Normalising a data source twice is the same as once."""
    once = normalise_data_source(r"password='a \\ \' b' host= dbname=x")
    assert normalise_data_source(once) == once


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        f"password='{SECRET}",
        f"{SECRET} host=x",
        f"mysql://u:{SECRET}@h/d",
        f"postgresql://u:a@{SECRET}@h/d",
        f"postgresql://u:a/{SECRET}@h/d",
    ],
)
def test_wrong_data_source_is_refused_without_quoting_it(text):
    """A wrong data source is refused without quoting any part of it."""
    with pytest.raises(InvalidConfig) as caught:
        HarvestConfig(data_source=text)
    assert str(caught.value).startswith("data_source: ")
    assert SECRET not in str(caught.value)


# -- environment and precedence ----------------------------------------------------------------------------------------


def test_command_line_wins_over_environment_over_file_over_defaults(write):
    """The four sources, from the strongest to the weakest, setting by setting."""
    path = write("harvest: {leaderTopic: file, leaderGroupID: file, outboxTable: file, idHeader: file}")
    environ = {"OUTBOX_LEADER_TOPIC": "environ", "OUTBOX_LEADER_GROUP_ID": "environ"}
    config = load_file(path, environ=environ, overrides={"leader_topic": "option", "outbox_table": None})
    assert config.leader_topic == "option"
    assert config.leader_group_id == "environ"
    assert config.id_header == "file"
    assert config.outbox_table == "file"
    assert config.metrics_host == "127.0.0.1"


def test_sections_are_merged_not_replaced():
    """A limit or property from one source leaves the others of its section alone."""
    document = {"harvest": {"baseKafkaConfig": {"bootstrap.servers": "a", "ssl.ca.location": "ca"}}}
    environ = {"OUTBOX_KAFKA_BOOTSTRAP": "b", "OUTBOX_LIMITS_MARK_BACKOFF": "20ms"}
    config = load_config(document, environ=environ, overrides={"base_kafka_config": {"client.id": "me"}})
    assert config.base_kafka_config == {"bootstrap.servers": "b", "ssl.ca.location": "ca", "client.id": "me"}
    assert config.limits == Limits(mark_backoff="20ms")


def test_property_on_the_command_line_wins_over_the_producers_own():
    """`-X` holds for all clients, in whichever section the file names the property."""
    document = {"harvest": {"producerKafkaConfig": {"linger.ms": 100}}}
    config = load_config(document, overrides={"base_kafka_config": {"linger.ms": "1"}})
    assert config.producer_settings()["linger.ms"] == "1"
    with pytest.raises(InvalidConfig, match=r"^harvest\.producerKafkaConfig: must be a mapping$"):
        load_config({"harvest": {"producerKafkaConfig": "x"}}, overrides={"base_kafka_config": {"linger.ms": "1"}})


def test_every_setting_has_a_variable():
    """Every setting has a variable, those included that `python -m devstack up` prints."""
    environ = {
        "OUTBOX_POSTGRES_DSN": "postgresql://postgres@/db?host=/dir",
        "OUTBOX_KAFKA_BOOTSTRAP": "k:1",
        "OUTBOX_KAFKA_SECURITY_PROTOCOL": "ssl",
        "OUTBOX_PRODUCER_KAFKA_COMPRESSION_TYPE": "zstd",
        "OUTBOX_TABLE": "b.outbox",
        "OUTBOX_LEADER_TOPIC": "t",
        "OUTBOX_LEADER_GROUP_ID": "g",
        "OUTBOX_NAME": "n",
        "OUTBOX_OUTBOX_NAME": "o",
        "OUTBOX_ID_HEADER": "h",
        "OUTBOX_METRICS_PORT": "9000",
        "OUTBOX_METRICS_HOST": "::1",
        "OUTBOX_LIMITS_MAX_IN_FLIGHT_RECORDS": "5",
    }
    assert load_config(None, environ=environ) == HarvestConfig(
        data_source="postgresql://postgres@/db?host=/dir",
        base_kafka_config={"bootstrap.servers": "k:1", "security.protocol": "ssl"},
        producer_kafka_config={"compression.type": "zstd"},
        outbox_table="b.outbox",
        leader_topic="t",
        leader_group_id="g",
        name="n",
        outbox_name="o",
        id_header="h",
        metrics_port=9000,
        metrics_host="::1",
        limits=Limits(max_in_flight_records=5),
    )


def test_empty_variable_is_no_setting_except_for_the_header():
    """An empty variable, which container tools pass, counts as unset, except for the id header."""
    config = load_config(None, environ={"OUTBOX_TABLE": "", "OUTBOX_ID_HEADER": ""})
    assert config.outbox_table == "outbox"
    assert config.id_header == ""


def test_unknown_variable_is_a_warning(caplog):
    """An unknown variable is only a warning, as it may belong to others; those of our other parts are not mentioned."""
    others = {"OUTBOX_DEVSTACK_DIR": "x", "OUTBOX_LOG_LEVEL": "info", "OUTBOX_CONSOLE_TOKEN": "x"}
    load_config(None, environ={"OUTBOX_TABEL": SECRET, **others})
    assert [record.getMessage() for record in caplog.records] == [
        "OUTBOX_TABEL: unknown variable; did you mean OUTBOX_TABLE?; it is ignored"
    ]


@pytest.mark.parametrize(
    ("environ", "overrides", "named"),
    [
        ({"OUTBOX_LIMITS_MARK_BACKOFF": "5"}, {}, "OUTBOX_LIMITS_MARK_BACKOFF: a duration needs a unit"),
        ({"OUTBOX_POSTGRES_DSN": "x"}, {}, "OUTBOX_POSTGRES_DSN: is not"),
        ({"OUTBOX_KAFKA_ACKS": "1"}, {}, "OUTBOX_KAFKA_ACKS: must be `all`"),
        ({}, {"metrics_port": -1}, "--metrics-port: "),
        ({}, {"data_source": "x"}, "--dsn: is not"),
        ({}, {"base_kafka_config": {"acks": "0"}}, "-X acks: must be `all`"),
    ],
)
def test_wrong_value_is_named_by_where_it_came_from(environ, overrides, named):
    """A wrong value is named by the variable or option that set it."""
    with pytest.raises(InvalidConfig) as caught:
        load_config(None, environ=environ, overrides=overrides)
    assert str(caught.value).startswith(named)


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("Trace", 10),
        ("Debug", 10),
        ("Info", 20),
        ("WARN", 30),
        ("warning", 30),
        ("Error", 40),
        ("Fatal", 50),
        ("Panic", 50),
    ],
)
def test_logrus_levels_become_pythons(text, level):
    """Levels are read in upper and lower case, and the command line wins over the environment over the file."""
    assert log_level({"logging": {"level": text}}) == level
    assert log_level({"logging": {"level": "Info"}}, environ={"OUTBOX_LOG_LEVEL": text}) == level
    assert log_level(None, environ={"OUTBOX_LOG_LEVEL": "info"}, override=text) == level


def test_unknown_level_is_refused():
    """An unknown level is refused with the name of the variable that set it."""
    with pytest.raises(InvalidConfig, match="OUTBOX_LOG_LEVEL: is not a level; write one of"):
        log_level(None, environ={"OUTBOX_LOG_LEVEL": "loud"})


# -- Kafka -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "producer", "heartbeat", "expected"),
    [
        ({}, {}, "5s", 3000),
        ({}, {"delivery.timeout.ms": 10000}, "5s", 3000),
        ({}, {"delivery.timeout.ms": 1000}, "5s", 1000),
        ({}, {"message.timeout.ms": "1000"}, "5s", 1000),
        ({"delivery.timeout.ms": 1000}, {}, "5s", 1000),
        ({"delivery.timeout.ms": 1000}, {"delivery.timeout.ms": 2000}, "5s", 2000),
        ({}, {"delivery.timeout.ms": 0}, "5s", 3000),
        ({}, {"delivery.timeout.ms": 10000}, "30s", 10000),
    ],
)
def test_send_ends_before_the_lease(base, producer, heartbeat, expected):
    """The delivery timeout is the user's, but at most 60% of the heartbeat timeout; 0 means for ever."""
    limits = Limits(heartbeat_timeout=heartbeat)
    config = HarvestConfig(base_kafka_config=base, producer_kafka_config=producer, limits=limits)
    settings = config.producer_settings()
    assert settings["delivery.timeout.ms"] == expected
    assert "message.timeout.ms" not in settings
    assert config.delivery_timeout == timedelta(milliseconds=expected)


def test_lowered_delivery_timeout_is_said_once(caplog):
    """A lowered delivery timeout is one warning per process; one that is not lowered is none."""
    HarvestConfig(producer_kafka_config={"delivery.timeout.ms": 3000})
    assert not caplog.records
    for _ in range(2):
        HarvestConfig(producer_kafka_config={"delivery.timeout.ms": 10000})
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "delivery.timeout.ms is lowered to 3s"
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("acks", 1),
        ("acks", "0"),
        ("request.required.acks", 1),
        ("enable.idempotence", False),
        ("enable.idempotence", "false"),
        ("transactional.id", "x"),
        ("delivery.report.only.error", True),
        ("delivery.timeout.ms", "soon"),
        ("linger.ms", -1),
        ("linger.ms", 3000),
        ("queue.buffering.max.messages", "many"),
        ("partitioner", "random"),
        ("partitioner", "RANDOM"),
    ],
)
@pytest.mark.parametrize("section", ["base_kafka_config", "producer_kafka_config"])
def test_properties_that_could_lose_records_are_refused(section, name, value):
    """A property that could lose records is refused by its name, where it was set."""
    with pytest.raises(InvalidConfig, match=rf"{section}\.{name.replace('.', '[.]')}: must"):
        HarvestConfig(**{section: {name: value}})


@pytest.mark.parametrize(
    ("settings", "batches"),
    [
        ({}, (1_000_000, False)),
        ({"batch.size": 4096, "message.max.bytes": "50000", "compression.codec": "none"}, (4096, False)),
        ({"message.max.bytes": 2_000_000, "compression.type": "lz4"}, (1_000_000, True)),
    ],
)
def test_what_settings_say_of_batches(settings, batches):
    """Batch settings are the producer's limits and whether batches are compressed."""
    assert HarvestConfig(producer_kafka_config=settings).batch_settings == batches


@pytest.mark.parametrize("partitioner", ["consistent_random", "murmur2_random", "consistent", "fnv1a"])
def test_partitioners_by_key_are_accepted(partitioner):
    """Partitioners that keep the records of a key together are accepted."""
    HarvestConfig(producer_kafka_config={"partitioner": partitioner})


@pytest.mark.parametrize(("name", "value"), [("acks", -1), ("acks", "all"), ("enable.idempotence", "true")])
def test_properties_that_say_what_we_want_are_accepted(name, value):
    """A property that sets our own value is accepted, in every spelling librdkafka knows."""
    settings = HarvestConfig(producer_kafka_config={name: value}).producer_settings()
    assert settings["acks"] == "all"
    assert settings["enable.idempotence"] is True


def test_producer_settings_keep_the_users_and_add_ours():
    """The user's compression, batching and callables are kept; the queue always has room for the records in flight."""

    def oauth(_):
        return "", 0.0

    config = HarvestConfig(
        name="me",
        base_kafka_config={"bootstrap.servers": "b", "oauth_cb": oauth, "statistics.interval.ms": 1000},
        producer_kafka_config={"queue.buffering.max.messages": 10, "linger.ms": 0, "compression.type": "lz4"},
        limits=Limits(max_in_flight_records=200_000),
    )
    assert config.producer_settings() == {
        "bootstrap.servers": "b",
        "oauth_cb": oauth,
        "statistics.interval.ms": 1000,
        "compression.type": "lz4",
        "linger.ms": 0,
        "client.id": "me",
        "message.max.bytes": 16 * 2**20,
        "reconnect.backoff.max.ms": 1000,
        "acks": "all",
        "enable.idempotence": True,
        "delivery.timeout.ms": 3000,
        "socket.timeout.ms": 5000,
        "queue.buffering.max.messages": 400_000,
    }
    assert HarvestConfig().producer_settings()["linger.ms"] == 5


def test_producers_settings_do_not_reach_the_election():
    """NELI's clients get the base settings and the group, none of the producer's."""
    config = HarvestConfig(base_kafka_config={"client.id": "c"}, producer_kafka_config={"compression.type": "lz4"})
    assert config.neli_settings("g") == {"bootstrap.servers": "localhost:9092", "client.id": "c", "group.id": "g"}


def test_leader_names_derive_from_the_outbox():
    """Group and topic derive from the outbox's identity; two identities never share a topic."""
    assert HarvestConfig().leader_names("db.public.outbox") == ("db.public.outbox", "db.public.outbox.neli")
    assert HarvestConfig(leader_group_id="g").leader_names("x") == ("g", "g.neli")
    first, second = (HarvestConfig().leader_names(identity).topic for identity in ("d b.p.o", "d/b.p.o"))
    assert first != second
    assert first.startswith("d_b.p.o-")
    assert len(HarvestConfig().leader_names("x" * 500).topic) <= 249


# -- secrets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        f"host=h password={SECRET} dbname=d",
        f"host=h password = '{SECRET} {SECRET}' dbname=d",
        rf"host=h password=a\ {SECRET} dbname=d",
        f"host=h sslpassword={SECRET}",
        f"postgresql://u:{SECRET}@h/d",
        f"postgresql://u:{SECRET}@{SECRET}@h/d",
        f"postgresql://u:a/{SECRET}@h/d",
        f"postgresql://h/d?user=u&password={SECRET}",
        f"{{'sasl.password': '{SECRET}'}}",
        f'{{"ssl.key.password": "{SECRET}"}}',
        f"sasl.oauthbearer.client.secret={SECRET}",
        f"OUTBOX_KAFKA_SASL_PASSWORD={SECRET}",
        f"ssl.key.pem=-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----",
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
        f"token: {SECRET}",
        f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={SECRET};EndpointSuffix=x",
        f"fs.azure.account.key.shop.dfs.core.windows.net={SECRET}",
        f"Authorization: Bearer {SECRET}",
        f"https://shop.blob.example/c?sv=1&sig={SECRET}&se=2",
        f"got 'postgresql://u:{SECRET}",  # what was cut off behind it
        f"{{'sasl.password': '{SECRET} {SECRET}",
        f'password="{SECRET} {SECRET}',
        f"url=kafka://a:{SECRET},password={SECRET}",
        f"ssl.keystore.password={SECRET} scram_server_key={SECRET}",
        f"authorization: AWS4-HMAC-SHA256 Credential=a/b, Signature={SECRET}",
        f"{{'Authorization': 'Token {SECRET}'}}",
        f"X-API-Key: {SECRET}",
        f"Endpoint=sb://x/;SharedAccessKeyName=a;SharedAccessKey={SECRET};EntityPath=b",
        f"EntityPath=a;sig={SECRET}",
        f"pwd={SECRET}",
        f"{{'password': b'{SECRET} {SECRET}'}}",
    ],
)
def test_redact_hides_secrets(text):
    """Passwords, tokens and keys are hidden in every accepted notation."""
    assert SECRET not in redact(text)
    assert "***" in redact(text)


def test_redact_leaves_the_rest_readable():
    """Host, user and database, which an operator needs, stay readable."""
    assert redact("postgresql://u:x@h:1/d") == "postgresql://u:***@h:1/d"
    assert redact("host=h user=u password=x dbname=d") == "host=h user=u password=*** dbname=d"
    for plain in (
        "key=value, monkey: 1",
        "http://localhost:8080/x, spark://h:7077 and http://[::1]:9464",
        "ssl.key.location=/a ssl.keystore.type=PEM",
        "a@b: the user's own 'words' = 1",
    ):
        assert redact(plain) == plain


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "part",
    [
        *("password", "password ", "password.", "a://b:", "a://", "://:", "scram_", "scram_a", "xxxxxxxxx", "a a a a "),
        *("token=", 'token="', "token=\\", "token: bearer ", "?sig=", "' ", "a=", "\\", "@ "),
        *("-----BEGIN ", "-----BEGIN PRIVATE KEY-----"),
    ],
)
def test_redact_takes_time_by_length(part):
    """Whatever foreign text has in it: a quadratic search would take minutes here."""
    for end in ("", "=", "@", " ="):
        redact(part * (400_000 // len(part)) + end)


def test_config_never_shows_secrets():
    """Neither repr nor str of a config shows a secret of any setting."""
    config = HarvestConfig(
        data_source=f"host=h user=me password='{SECRET} x'",
        base_kafka_config={
            "sasl.username": "alice",
            "sasl.password": SECRET,
            "ssl.key.pem": SECRET,
            "ssl.key.password": SECRET,
            "sasl.oauthbearer.client.secret": SECRET,
        },
        producer_kafka_config={"sasl.oauthbearer.config": f"secret={SECRET}"},
    )
    for shown in (repr(config), str(config), f"{config}"):
        assert SECRET not in shown
        assert "alice" in shown
        assert "user=me" in shown
    assert SECRET in config.data_source


@pytest.mark.parametrize(
    "wrong",
    [
        {"dataSource": f"password='{SECRET}"},
        {"dataSource": [SECRET]},
        {"baseKafkaConfig": {"sasl.password": [SECRET]}},
        {"baseKafkaConfig": SECRET},
        {"baseKafkaConfig": {"acks": SECRET}},
        {"limits": {"markBackoff": SECRET, "maxInFlightRecords": SECRET}},
        {"limits": SECRET},
        {"metricsPort": SECRET},
        {"leaderTopic": f"{SECRET} "},
    ],
)
def test_errors_never_show_values(wrong):
    """No error shows a value, as one in the wrong place may be a password."""
    with pytest.raises(InvalidConfig) as caught:
        load_config({"harvest": wrong})
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_yaml_errors_never_quote_the_file(write):
    """An error in YAML does not quote the file's line, which may hold a password."""
    with pytest.raises(InvalidConfig) as caught:
        load_file(write(f"harvest:\n  dataSource: 'password={SECRET}\n  x: y"))
    assert SECRET not in str(caught.value)


def test_drain_that_outlasts_the_group_is_refused():
    """A drain longer than max.poll.interval.ms is refused, as the group would replace the leader while it drains."""
    assert HarvestConfig(limits={"drain_timeout": "4m"}).limits.drain_timeout == timedelta(minutes=4)
    with pytest.raises(InvalidConfig, match="drain_timeout"):
        HarvestConfig(limits={"drain_timeout": "5m"})
    with pytest.raises(InvalidConfig, match="drain_timeout"):
        HarvestConfig(base_kafka_config={"max.poll.interval.ms": 10_000})


def test_manifest_too_large_for_a_record_is_refused():
    """A mark limit whose manifest would not fit into one record is refused in exactly-once delivery."""
    many = {"mark_query_records": 60_000, "max_in_flight_records": 60_000}
    assert HarvestConfig(limits=many).limits.mark_query_records == 60_000
    with pytest.raises(InvalidConfig, match="mark_query_records"):
        HarvestConfig(delivery="exactly-once", limits=many)


def test_deprecated_name_of_the_unbatched_settings():
    """The old name of `unbatched_producer_settings` works, with a warning."""
    config = HarvestConfig(data_source="postgresql://localhost/db")
    with pytest.warns(DeprecationWarning, match="unbatched_producer_settings"):
        assert config.lone_producer_settings() == config.unbatched_producer_settings()
