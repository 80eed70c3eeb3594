"""The fixtures for a real Postgres and a Kafka broker, as a pytest plugin.

Services start when the first test asks for them and stop at the end of the session, also on Ctrl-C or SIGTERM. Tests
that run side by side (pytest-xdist) share them; the process that hands out the tests stops them. With
`OUTBOX_DEVSTACK_DIR` naming a stack that `python -m devstack up` started, that one is used and left running.

A test marked `real_broker` fails in CI (environment variable CI) when no real broker can be had, and is skipped with
the reason elsewhere; all others then run on the embedded broker. Tests that kill services use `private_stack` or
`own_stack`, never the shared one.
"""

import os
import re
import shutil
import signal
import sys
import tempfile
import uuid
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from xdist.scheduler import LoadScopeScheduling

from devstack.cluster import KafkaCluster
from devstack.processes import wait_until
from devstack.stack import DevStack

_NEED_KAFKA = {"kafka", "private_stack", "own_stack", "cluster"}
QUICK = {
    # Later than a broker needs to come back: while it is fenced, its coordinator takes the partitions of a transaction
    # that has timed out for deleted, skips their markers and leaves the transaction open for ever ("Couldn't find
    # leader endpoint for partitions"; Kafka 4.3.1). No client can mend that.
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "3000",
    # A broker that gets no CPU for so long is fenced, with all transactions that time out meanwhile: see above.
    "broker.session.timeout.ms": "5000",
    "broker.heartbeat.interval.ms": "300",
}
"""Settings of brokers that notice faults quickly."""
_PROBLEM = pytest.StashKey[str | None]()
_SHARED = pytest.StashKey[DevStack]()
_CHOICES = pytest.StashKey[list[str]]()
_EMBEDDED_PARTITIONS = 4
_CHAOS = "tests/chaos/test_chaos.py"
_QUEUES = ("tests/integration/queue/", "tests/acceptance/test_queue_")
_LONGEST = ("tests/spark/relay/", "tests/spark/pipelines/", *_QUEUES, _CHAOS)
_STACK_DIRECTORY = "stack_directory"
_RECORDS_DIRECTORY = "private_stacks"
_RECORDS = pytest.StashKey[Path]()
_SECONDS_TO_COMPILE = 60
_OF_SERVICES = ["DevstackError", "INVALID_REPLICATION_FACTOR", "Failed to get metadata", "KAFKA-20734"]
"""Errors of brokers, which say nothing about the product.

A starved machine does not let them start or answer in time; and they forget to end transactions in partitions that have
no leader (see `tests.chaos.services`).
"""


def pytest_configure(config):
    """Let SIGTERM end the session as Ctrl-C does, so that fixtures are torn down."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A shell starts its background jobs with Ctrl-C ignored, and the tests' processes would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[_CHOICES] = []


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Give each of the processes that run tests side by side the one stack, which the first that needs it starts."""
    node.workerinput[_STACK_DIRECTORY] = str(_shared_stack(node.config).directory)
    node.workerinput[_RECORDS_DIRECTORY] = str(_records(node.config))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Let one process compile the modules of the tests first; the others, which wait for it, read what it compiled."""
    given = getattr(session.config, "workerinput", None)
    if given is None:
        return (yield)
    compiled = Path(given[_STACK_DIRECTORY]) / f"compiled-{given['testrunuid']}"
    if given["workerid"] != "gw0":
        wait_until(compiled.exists, timeout=_SECONDS_TO_COMPILE)
        return (yield)
    try:
        return (yield)
    finally:
        compiled.parent.mkdir(parents=True, exist_ok=True)
        compiled.touch()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Note the broker that a process of tests used."""
    node.config.stash[_CHOICES].extend(getattr(node, "workeroutput", {}).get("brokers", []))


def pytest_sessionfinish(session):
    """Pass the name of the used broker to the process that hands out the tests."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["brokers"] = session.config.stash[_CHOICES]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Escape lone surrogates in captured output: a report passes between processes as UTF-8."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Keep tests that share something, and at least those of a file, in one process when tests run side by side."""

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = nodeid.partition("::")[0]
            if path == _CHAOS:
                return nodeid  # each takes half a minute, and none shares anything but services
            folder = path.rpartition("/")[0]
            if folder.startswith("tests/spark/") and _asks_for_session(config.rootpath / path):
                return folder
            if path.startswith(_QUEUES):
                return "queues"  # consumer groups, whose names are those of kafka-mq-go
            return path

    config.option.loadscopereorder = False  # the order of `pytest_collection_modifyitems` is the better one
    return Scheduler(config, log)


def pytest_collection_modifyitems(items):
    """Begin with the longest: the two folders of Spark, that of queues, each of which one process runs, and chaos."""
    items.sort(key=lambda item: not item.nodeid.startswith(_LONGEST))
    for item in items:
        if item.get_closest_marker("alone"):
            item.add_marker(pytest.mark.flaky(reruns=1, only_rerun=_OF_SERVICES))


def pytest_collection_finish(session):
    """Fetch Kafka's jars before the first test, whose timeout a first download would exceed."""
    config = session.config
    if config.option.collectonly or not any(_needs_kafka(item) for item in session.items):
        return
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        config.stash[_PROBLEM] = _shared_stack(config).real_broker_problem()


def pytest_runtest_setup(item):
    """Fail or skip tests that need the real broker where it cannot be had."""
    problem = item.config.stash.get(_PROBLEM, None)
    if problem is None or item.get_closest_marker("real_broker") is None:
        return
    if os.environ.get("CI"):
        pytest.fail(f"needs a real Kafka broker: {problem}", pytrace=False)
    pytest.skip(f"needs a real Kafka broker: {problem}")


def pytest_terminal_summary(terminalreporter, config):
    """Name the broker that the tests used."""
    for line in dict.fromkeys(config.stash[_CHOICES]):
        terminalreporter.write_line(line)


def pytest_unconfigure(config):
    """Stop the shared stack, unless it was running before us, and the private ones of processes that were killed."""
    if _RECORDS in config.stash:
        for directory in map(Path.read_text, config.stash[_RECORDS].iterdir()):
            _end(DevStack(directory))
        shutil.rmtree(config.stash[_RECORDS])
    shared = config.stash.get(_SHARED, None)
    if shared is not None and _is_ours_to_stop(config):
        shared.stop()


@pytest.fixture(scope="session")
def stack(pytestconfig):
    """Return the shared stack; `postgres` and `kafka` start its halves."""
    return _shared_stack(pytestconfig)


@pytest.fixture(scope="session")
def postgres(stack):
    """Return the shared Postgres server, running. Never stop it."""
    stack.start_postgres()
    return stack.postgres


@pytest.fixture(scope="session")
def kafka(stack):
    """Return the shared broker, running; embedded if no real one can be had. Never stop it."""
    stack.start_kafka()
    return stack.kafka


@pytest.fixture
def kafka_bootstrap(kafka):
    """Return the address of the shared broker."""
    return kafka.bootstrap


@pytest.fixture
def database(postgres):
    """Yield the URL of a fresh database, which is dropped afterwards even if sessions are left in it."""
    yield from _fresh_database(postgres)


@pytest.fixture(scope="module")
def _module_stack(pytestconfig):
    with_both = DevStack(small=True, report=_reporter(pytestconfig))
    with _recorded(pytestconfig, with_both.directory):
        yield with_both
        with_both.stop()


@pytest.fixture
def private_stack(_module_stack):
    """Return a stack of this module's own, both services running at the start of each test, which may kill them."""
    _module_stack.start()
    return _module_stack


@pytest.fixture
def private_database(private_stack):
    """Yield the URL of a fresh database in the module's own Postgres, which may be dead at the end of the test."""
    fresh = _fresh_database(private_stack.postgres)
    yield next(fresh)
    private_stack.start_postgres()
    next(fresh, None)


@pytest.fixture
def own_stack(pytestconfig):
    """Yield a factory for started stacks of this test's own: `own_stack(embedded=None, directory=None)`."""
    with ExitStack() as made:

        def make(*, embedded: bool | None = None, directory: Path | None = None) -> DevStack:
            stack = DevStack(directory, embedded, small=True, report=_reporter(pytestconfig))
            made.enter_context(_recorded(pytestconfig, stack.directory))
            made.callback(stack.stop)
            stack.start()
            return stack

        yield make


@pytest.fixture(scope="module")
def own_postgres(pytestconfig):
    """Yield a Postgres server of this module's own, which runs and may be given other settings."""
    stack = DevStack(small=True, report=_reporter(pytestconfig))
    with _recorded(pytestconfig, stack.directory):
        stack.start_postgres()
        yield stack.postgres
        stack.stop()


@pytest.fixture(scope="session")
def _cluster(pytestconfig):
    directory = Path(tempfile.mkdtemp(prefix="kafka-outbox-cluster-"))
    options = {"extra_properties": QUICK, "report": _reporter(pytestconfig)}
    made = KafkaCluster(directory / "cluster", sides=3, links=True, **options)
    with _recorded(pytestconfig, directory):
        yield made
        made.stop()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def cluster(_cluster):
    """Return three brokers of the session's own, all in sync at the start of each test, which may kill them."""
    _cluster.start()
    return _cluster


@pytest.fixture
def topic_name():
    """Return a factory for topic names (or group names) that no other test uses: `topic_name("orders")`."""

    def make(prefix: str = "test") -> str:
        return f"{prefix}-{uuid.uuid4().hex[:12]}"

    return make


@pytest.fixture
def make_topic(request, topic_name):
    """Return a factory for topics, which returns the name.

    `make_topic(partitions=4, config={...}, name=None, bootstrap=None, replicas=1)`

    On the shared broker unless `bootstrap` names another. The embedded broker knows only topics of 4 partitions
    without settings; a test that asks it for others is skipped.
    """

    def make(partitions=_EMBEDDED_PARTITIONS, *, config=None, name=None, bootstrap=None, replicas=1) -> str:
        topic = name or topic_name()
        address = bootstrap or request.getfixturevalue("kafka_bootstrap")
        if bootstrap is None and request.getfixturevalue("kafka").is_embedded:
            _make_embedded_topic(address, topic, partitions, config)
            return topic
        admin = AdminClient({"bootstrap.servers": address})
        asked = NewTopic(topic, num_partitions=partitions, replication_factor=replicas, config=config or {})
        admin.create_topics([asked], operation_timeout=10)[topic].result(timeout=15)
        return topic

    return make


def as_role(url: str, role: str) -> str:
    """Return the same database for another role; roles of tests need no password."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{role}@{rest.rpartition('@')[2]}"


@cache
def _asks_for_session(path):
    """Tell whether a test or fixture of this file uses the Spark session."""
    return re.search(r"^def \w+\([^)]*\bspark\b", path.read_text(), re.MULTILINE) is not None


def _needs_kafka(item):
    return bool(_NEED_KAFKA & set(item.fixturenames)) or item.get_closest_marker("real_broker") is not None


def _make_embedded_topic(bootstrap, topic, partitions, config):
    if partitions != _EMBEDDED_PARTITIONS or config:
        pytest.skip(f"the embedded broker makes only plain topics of {_EMBEDDED_PARTITIONS} partitions")
    Producer({"bootstrap.servers": bootstrap}).list_topics(topic, timeout=10)


def _shared_stack(config) -> DevStack:
    stack = config.stash.get(_SHARED, None)
    if stack is None:
        given = os.environ.get("OUTBOX_DEVSTACK_DIR")
        directory = given or getattr(config, "workerinput", {}).get(_STACK_DIRECTORY)
        stack = config.stash[_SHARED] = DevStack(directory, small=True, report=_reporter(config))
        if given and not stack.is_running:
            pytest.exit(f"OUTBOX_DEVSTACK_DIR={given}: nothing runs there; python -m devstack up --dir {given}")
    return stack


def _records(config) -> Path:
    """Return the folder of the session's records: a file with the directory of each private stack."""
    given = getattr(config, "workerinput", {}).get(_RECORDS_DIRECTORY)
    if given is not None:
        return Path(given)
    if _RECORDS not in config.stash:
        config.stash[_RECORDS] = Path(tempfile.mkdtemp(prefix="kafka-outbox-records-"))
    return config.stash[_RECORDS]


@contextmanager
def _recorded(config, directory):
    """Record a private stack until it is stopped: Ctrl-C ends the processes of `pytest -n` before they stop theirs."""
    record = _records(config) / uuid.uuid4().hex
    record.write_text(str(directory))
    yield
    record.unlink()


def _end(stack):
    """Stop a stack that a killed process has left, and remove its directory."""
    stack.stop()
    stack.postgres.remove()
    shutil.rmtree(stack.directory, ignore_errors=True)


def _is_ours_to_stop(config):
    """Tell whether the shared stack ends with this process."""
    return not os.environ.get("OUTBOX_DEVSTACK_DIR") and not hasattr(config, "workerinput")


def _reporter(config):
    """Show downloads as they happen, and keep the choice of broker for the summary."""

    def report(step: str) -> None:
        if step.startswith("Kafka: "):
            config.stash[_CHOICES].append(step)
        elif not step.startswith("starting"):
            sys.stderr.write(f"{step}\n")

    return report


def _fresh_database(server):
    name = f"test_{uuid.uuid4().hex[:12]}"
    yield server.create_database(name)
    server.drop_database(name)
