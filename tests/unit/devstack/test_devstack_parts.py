"""The parts of the devstack that need no service."""

import hashlib
import os
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from devstack import jars, java
from devstack.cluster import _java_hash
from devstack.errors import BrokerUnavailableError, DevstackError
from devstack.frame_proxy import Api, Request, _frames
from devstack.ports import free_ports, is_free
from devstack.postgres import binaries, claim
from devstack.processes import ServiceProcess, run_watched
from devstack.proxy import TcpProxy
from devstack.truststore import java_trust_options


@pytest.fixture
def echo_port():
    """Yield the port of a server that sends back all that it gets."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo(connection):
            with connection, suppress(ConnectionError):
                while data := connection.recv(1000):
                    connection.sendall(data)

        def serve():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=echo, args=[connection], daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def _say_hello(port):
    with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
        connection.sendall(b"hello")
        return connection.recv(100)


@pytest.fixture
def proxy(echo_port):
    """Yield a proxy before the echo server."""
    with TcpProxy("127.0.0.1", echo_port) as running:
        yield running


@pytest.fixture
def client(proxy):
    """Yield a connection through the proxy that has been used once."""
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=0.3) as connection:
        connection.sendall(b"hello")
        assert connection.recv(100) == b"hello"
        yield connection


def test_cut_holds_bytes_until_restored(proxy, client):
    """A cut connection stays open and silent; restoring it delivers the bytes sent meanwhile."""
    proxy.cut()
    client.sendall(b"held")
    with pytest.raises(TimeoutError):
        client.recv(100)
    proxy.restore()
    assert client.recv(100) == b"held"


def test_cut_can_drop_bytes(proxy, client):
    """With drop, bytes sent during the cut never arrive."""
    proxy.cut(drop=True)
    client.sendall(b"lost")
    with pytest.raises(TimeoutError):
        client.recv(100)
    proxy.restore()
    client.sendall(b"later")
    assert client.recv(100) == b"later"


def test_cut_accepts_new_connections_and_keeps_them_waiting(proxy):
    """A black hole is not a refusal: a new connection is established and answered after the cut."""
    proxy.cut()
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=0.3) as late:
        late.sendall(b"anyone?")
        with pytest.raises(TimeoutError):
            late.recv(100)
        proxy.restore()
        assert late.recv(100) == b"anyone?"


def test_reset_breaks_connections_and_resume_accepts_again(proxy, client):
    """Reset ends connections with RST and refuses new ones; after resume a new one works."""
    proxy.reset()
    with pytest.raises(ConnectionResetError):
        client.recv(100)
    with pytest.raises(ConnectionError):
        _say_hello(proxy.port)
    proxy.resume()
    assert _say_hello(proxy.port) == b"hello"


def test_end_of_a_connection_passes_through(client):
    """If the client ends its side, the server sees the end, and the client gets the server's end."""
    client.shutdown(socket.SHUT_WR)
    assert client.recv(100) == b""


def test_free_ports_are_different_and_below_the_ephemeral_range():
    """Services get ports that outgoing connections never take."""
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert max(ports) < 32_768


def test_a_port_in_use_is_not_free(echo_port):
    """A listening port is never handed out."""
    assert not is_free(echo_port)


def test_a_recycled_pid_is_not_killed(tmp_path):
    """A pid file that names a stranger's process is stale: the process is neither reported nor killed."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as stranger:
        try:
            (tmp_path / "pid").write_text(str(stranger.pid))
            service = ServiceProcess(tmp_path / "pid", "a mark that is not on its command line")
            assert service.pid is None
            service.kill()
            service.terminate()
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_a_process_is_found_again_and_ended(tmp_path):
    """Another object, as in another process, finds a started process by its pid file and ends it."""
    code = "import time; time.sleep(60)"
    ServiceProcess(tmp_path / "pid", str(tmp_path)).spawn(
        [sys.executable, "-c", code, tmp_path], log=tmp_path / "log", env=os.environ
    )
    found = ServiceProcess(tmp_path / "pid", str(tmp_path))
    assert found.pid is not None
    found.terminate()
    assert found.pid is None


def test_a_silent_command_is_given_up(tmp_path):
    """A resolver that hangs silently is stopped after the idle timeout."""
    script = "import time; time.sleep(60)"
    with pytest.raises(DevstackError, match=r"^Tool said nothing for 1 s"):
        run_watched(
            "Tool", [sys.executable, "-c", script], log=tmp_path / "log", on_line=lambda _: None, idle_timeout=1
        )


def test_a_failing_command_says_why(tmp_path):
    """The error of a failed command is one line with its exit code, the log's most telling line, and the log."""
    script = "print('starting'); print('ERROR: no such host'); print('bye'); raise SystemExit(3)"
    with pytest.raises(DevstackError, match=r"^Tool failed with exit code 3: ERROR: no such host \(see .*log\)$"):
        run_watched("Tool", [sys.executable, "-c", script], log=tmp_path / "log", on_line=lambda _: None)


def test_too_old_java_is_named(monkeypatch, tmp_path):
    """Java 11 alone is no Java for Kafka 4; the error names its version."""
    old = tmp_path / "bin" / "java"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    old.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(BrokerUnavailableError, match="version 11"):
        java.find_java()


def test_a_folder_without_a_postgres_is_named(monkeypatch, tmp_path):
    """The error names the variable and the folder."""
    monkeypatch.setenv("OUTBOX_DEVSTACK_POSTGRES", str(tmp_path))
    with pytest.raises(DevstackError, match=f"OUTBOX_DEVSTACK_POSTGRES={tmp_path} is not a folder with"):
        binaries()


def test_cached_jars_need_no_resolver(monkeypatch, tmp_path):
    """Resolved jars are used without Maven, Java or network."""
    monkeypatch.setenv("OUTBOX_DEVSTACK_CACHE", str(tmp_path))
    monkeypatch.setattr(jars, "run_watched", None)
    (tmp_path / f"kafka-{jars.KAFKA_VERSION}").mkdir()
    assert jars.kafka_jars(tmp_path / "no-java", print) == tmp_path / f"kafka-{jars.KAFKA_VERSION}"


def test_a_failed_resolution_leaves_no_jars_behind(monkeypatch, tmp_path):
    """If every resolver fails, the error names each failure and the cache holds no partial result."""

    def fail(name, *_, **__):
        raise DevstackError(f"{name} has no network")

    monkeypatch.setenv("OUTBOX_DEVSTACK_CACHE", str(tmp_path))
    monkeypatch.setattr(jars, "run_watched", fail)
    monkeypatch.setattr(jars.shutil, "which", lambda _: "/opt/mvn")
    with pytest.raises(BrokerUnavailableError, match=r"Maven has no network; then .* has no network"):
        jars.kafka_jars(tmp_path / "java", lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_truststore_is_readable_by_java(tmp_path):
    """Java's own keytool lists the machine's authorities in the truststore."""
    options = java_trust_options(tmp_path)
    if not options:
        pytest.skip("this machine has no CA bundle")
    keytool = java.find_java().with_name("keytool")
    if not keytool.exists():
        pytest.skip("this Java has no keytool")
    listed = subprocess.run(
        [keytool, "-list", "-keystore", tmp_path / "truststore.p12", "-storepass", "changeit"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert listed.stdout.count("trustedCertEntry") > 10


def _request(api, version, body, client_id=b"me", tags=b""):
    header = struct.pack(">hhih", api, version, 7, len(client_id)) + client_id + tags
    return Request(struct.pack(">i", len(header + body)) + header + body)


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("version", [1, 3])
def test_an_end_of_a_transaction_is_understood(version, commits):
    """The end of a transaction is read with its client, transactional.id and outcome, in both formats of strings."""
    end = struct.pack(">qh?", 4000, 3, commits)
    if version < 3:
        request = _request(Api.END_TXN, version, struct.pack(">h", 4) + b"mine" + end)
    else:
        a_tag = b"\x01\x05\x02xy"  # one field, number 5, two bytes
        request = _request(Api.END_TXN, version, b"\x05mine" + end + b"\0", tags=a_tag)
    assert (request.transactional_id, request.commits, request.client_id) == ("mine", commits, "me")
    assert request.name == f"END_TXN {'commit' if commits else 'abort'}"


@pytest.mark.parametrize(
    ("request_", "transactional_id"),
    [
        (_request(Api.PRODUCE, 7, struct.pack(">h", -1) + b"..."), None),
        (_request(Api.PRODUCE, 7, struct.pack(">h", 4) + b"mine..."), "mine"),
        (_request(Api.INIT_PRODUCER_ID, 4, b"\x05mine...", tags=b"\0"), "mine"),
        (_request(Api.INIT_PRODUCER_ID, 4, b"\0...", tags=b"\0"), None),
        (_request(Api.FETCH, 11, b"\0\4mine"), None),
        (_request(99, 0, b""), None),
    ],
)
def test_a_request_names_its_transactional_id(request_, transactional_id):
    """A request names its transactional.id, or None if it has none."""
    assert request_.transactional_id == transactional_id
    assert request_.commits is None


def test_frames_are_taken_whole_however_they_arrive():
    """Each frame comes out once, whether its bytes arrive singly or with others; an incomplete frame waits."""
    sent = [_request(Api.FETCH, 1, bytes(size)).frame for size in (0, 5, 300)]
    unread, taken = bytearray(), []
    for byte in b"".join(sent):
        unread.append(byte)
        taken += _frames(unread)
    assert taken == sent
    unread += b"".join(sent) + sent[0][:-1]
    assert list(_frames(unread)) == sent
    assert bytes(unread) == sent[0][:-1]


def test_what_is_no_frame_ends_the_connection():
    """An impossible length ends the connection instead of waiting for so many bytes."""
    with pytest.raises(ConnectionAbortedError, match="not Kafka's protocol"):
        list(_frames(bytearray(b"GET / HTTP/1.1")))


@pytest.mark.parametrize(
    ("text", "value"), [("", 0), ("hello", 99162322), ("polygenelubricants", 0), ("coordinated-1", 676563824)]
)
def test_transactional_ids_are_hashed_as_kafka_does(text, value):
    """A transactional.id is hashed as in Kafka: the absolute value of Java's hash, or 0 where that has none."""
    assert _java_hash(text) == value


def test_jars_that_are_not_pinned_are_never_started(tmp_path, monkeypatch):
    """A listed jar is accepted; a changed or unlisted one is named in the error."""
    pinned = tmp_path / "jars.sha256"
    pinned.write_text(f"{hashlib.sha256(b'good').hexdigest()}  a.jar\n")
    monkeypatch.setattr(jars, "_PINNED", pinned)
    folder = tmp_path / "jars"
    folder.mkdir()
    (folder / "a.jar").write_bytes(b"good")
    jars.check_hashes(folder)
    (folder / "a.jar").write_bytes(b"evil")
    with pytest.raises(DevstackError, match=r"a\.jar has the SHA-256"):
        jars.check_hashes(folder)
    (folder / "a.jar").unlink()
    (folder / "b.jar").write_bytes(b"good")
    with pytest.raises(DevstackError, match=r"b\.jar is not listed"):
        jars.check_hashes(folder)


def test_every_jar_of_kafka_is_pinned():
    """The pinned hashes cover the started release, and the logging binding without which it is silent."""
    pinned = jars.pinned_hashes()
    assert {f"kafka_2.13-{jars.KAFKA_VERSION}.jar", "slf4j-simple-1.7.36.jar"} <= pinned.keys()
    assert all(len(bytes.fromhex(digest)) == 32 for digest in pinned.values())


@pytest.mark.parametrize("planted", ["link", "file", "open folder"])
def test_a_folder_that_somebody_else_may_have_made_is_not_used(tmp_path, planted):
    """A link, a file or an open folder under the foreseeable name in the temporary folder is refused, and kept."""
    place = tmp_path / "kafka-outbox-postgres-0123"
    if planted == "link":
        (tmp_path / "elsewhere").mkdir()
        place.symlink_to(tmp_path / "elsewhere")
    elif planted == "file":
        place.touch()
    else:
        place.mkdir()
        place.chmod(0o777)
    with pytest.raises(DevstackError, match="not a folder of our own"):
        claim(place, 0o711)
    if planted == "open folder":
        assert place.stat().st_mode & 0o777 == 0o777


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what belongs to others")
def test_a_folder_of_another_user_is_not_used(tmp_path):
    """A folder of another user is refused even if it is closed to all others."""
    place = tmp_path / "theirs"
    place.mkdir(mode=0o700)
    os.chown(place, 65534, 65534)
    with pytest.raises(DevstackError, match="not a folder of our own"):
        claim(place, 0o711)


def test_a_folder_of_our_own_is_used_again(tmp_path):
    """The second start uses the folder that the first has made."""
    for _ in range(2):
        claim(tmp_path / "ours", 0o711)
    assert (tmp_path / "ours").stat().st_mode & 0o777 == 0o711
