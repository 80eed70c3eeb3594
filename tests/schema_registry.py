"""A schema registry over HTTP, with the part of Confluent's REST API that its serializers and deserializers call."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit
from uuid import UUID

_NOT_FOUND = 404
_CONFLICT = 409
_CODE_OF_SUBJECT = 40401
_CODE_OF_SCHEMA = 40403


class Registry:
    """Subjects with the versions of their schemas; `requests` has the method and path of each call, in order."""

    def __init__(self):
        self.requests = []
        self.frozen = False  # then it takes no other schema of a subject, as an incompatible one
        self.url = ""
        self._subjects = {}  # subject -> ids of its versions
        self._schemas = []  # the schema of each id, from 1
        self._lock = threading.Lock()

    def answer(self, method, path, body):
        """Return status and body."""
        with self._lock:
            self.requests.append((method, path))
            parts = [unquote(part) for part in urlsplit(path).path.strip("/").split("/")]
            match (method, *parts):
                case ("POST", "subjects", subject, "versions"):
                    return self._register(subject, body)
                case ("POST", "subjects", subject):
                    return self._look_up(subject, body)
                case ("GET", "schemas", "ids", number):
                    return self._schema(int(number))
                case ("GET", "schemas", "guids", guid):
                    return self._schema(UUID(guid).int)
                case ("GET", "subjects", subject, "versions", version):
                    return self._version(subject, version)
            return _NOT_FOUND, {"error_code": _NOT_FOUND, "message": f"HTTP 404 Not Found: {path}"}

    def _register(self, subject, body):
        schema = _schema_of(body)
        versions = self._subjects.setdefault(subject, [])
        if self.frozen and versions and schema not in [self._schemas[number - 1] for number in versions]:
            text = f"Schema being registered is incompatible with an earlier schema for subject {subject!r}"
            return _CONFLICT, {"error_code": _CONFLICT, "message": text}
        if schema not in self._schemas:
            self._schemas.append(schema)
        number = self._schemas.index(schema) + 1
        if number not in versions:
            versions.append(number)
        return 200, self._described(subject, number)

    def _look_up(self, subject, body):
        if subject not in self._subjects:
            return _NOT_FOUND, {"error_code": _CODE_OF_SUBJECT, "message": f"Subject {subject!r} not found."}
        for number in self._subjects[subject]:
            if self._schemas[number - 1] == _schema_of(body):
                return 200, self._described(subject, number)
        return _NOT_FOUND, {"error_code": _CODE_OF_SCHEMA, "message": "Schema not found"}

    def _schema(self, number):
        if not 1 <= number <= len(self._schemas):
            return _NOT_FOUND, {"error_code": _CODE_OF_SCHEMA, "message": "Schema not found"}
        return 200, self._schemas[number - 1]

    def _version(self, subject, version):
        versions = self._subjects.get(subject, [])
        place = len(versions) if version == "latest" else int(version)
        if not 1 <= place <= len(versions):
            return _NOT_FOUND, {"error_code": _CODE_OF_SUBJECT, "message": f"Subject {subject!r} not found."}
        return 200, self._described(subject, versions[place - 1])

    def _described(self, subject, number):
        version = self._subjects[subject].index(number) + 1
        return {
            "subject": subject,
            "id": number,
            "guid": str(UUID(int=number)),
            "version": version,
            **self._schemas[number - 1],
        }


def _schema_of(body):
    return {
        "schemaType": body.get("schemaType", "AVRO"),
        "schema": body["schema"],
        "references": body.get("references", []),
    }


@contextmanager
def registry():
    """Serve a registry on a free port within the context."""
    found = Registry()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self._answer("GET")

        def do_POST(self):
            self._answer("POST")

        def _answer(self, method):
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, answer = found.answer(method, self.path, json.loads(content) if content else None)
            encoded = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
            self.send_header("Content-Length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

        def log_message(self, *_):
            """Keep quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
