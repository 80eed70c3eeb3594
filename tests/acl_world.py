"""A broker that denies by default, and principals with exactly the rights that the documentation's tables name."""

import re
from pathlib import Path

from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from devstack.kafka import KafkaBroker

DOCS = Path(__file__).parent.parent / "docs"
_OPERATION = re.compile(r"\b[A-Z][A-Z_]{3,}\b")
TOPIC, GROUP, TRANSACTIONAL_ID = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID


def table_of(page, heading):
    """Return the rows of the first table below a heading of a page: first cell -> the other cells."""
    _, _, below = (DOCS / page).read_text().partition(f"\n{heading}\n")
    assert below, f"{page} has no heading {heading!r}"
    lines = below.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        first, *others = (cell.strip() for cell in line.strip("|").split("|"))
        rows[first] = others
    return rows


class Broker:
    """A broker with one SASL listener, on which only granted operations are allowed.

    Args:
        directory: for its data.
        users: users that may log in; the password is the name with "-secret".
    """

    def __init__(self, directory, users):
        logins = " ".join(f'user_{user}="{user}-secret"' for user in users)
        self.broker = KafkaBroker(
            directory,
            small=True,
            extra_properties={
                "allow.everyone.if.no.acl.found": "false",
                "super.users": "User:ANONYMOUS",  # on the plain listener
                "listener.security.protocol.map": (
                    "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,PROXIED1:SASL_PLAINTEXT,PROXIED2:PLAINTEXT"
                ),
                "listener.name.proxied1.sasl.enabled.mechanisms": "PLAIN",
                "listener.name.proxied1.plain.sasl.jaas.config": (
                    f"org.apache.kafka.common.security.plain.PlainLoginModule required {logins};"
                ),
            },
        )

    def __enter__(self):
        self.broker.start()
        self._proxy = self.broker.proxied(1).start()
        self._admin = AdminClient({"bootstrap.servers": self.broker.bootstrap})
        return self

    def __exit__(self, *_):
        self._proxy.stop()
        self.broker.stop()

    @property
    def bootstrap(self):
        """Return the address of the listener on which all operations are allowed."""
        return self.broker.bootstrap

    def settings(self, user):
        """Return the librdkafka settings of a user."""
        return {
            "bootstrap.servers": self._proxy.bootstrap,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": user,
            "sasl.password": f"{user}-secret",
        }

    def make_topic(self, name, partitions=2, **config):
        """Make a topic as an operator does."""
        self._admin.create_topics([NewTopic(name, partitions, 1, config=config)])[name].result(15)
        return name

    def grant(self, user, kind, name, operations, *, prefixed=False):
        """Grant a user some operations, whose names may stand among other words; no others are ever allowed."""
        pattern = ResourcePatternType.PREFIXED if prefixed else ResourcePatternType.LITERAL
        wanted = [AclOperation[operation] for operation in _OPERATION.findall(operations)]
        assert wanted, operations
        bindings = [
            AclBinding(kind, name, pattern, f"User:{user}", "*", operation, AclPermissionType.ALLOW)
            for operation in wanted
        ]
        for done in self._admin.create_acls(bindings).values():
            done.result(15)

    def revoke_everything(self, user):
        """Take all rights of a user away."""
        everything = AclBindingFilter(
            ResourceType.ANY,
            None,
            ResourcePatternType.ANY,
            f"User:{user}",
            None,
            AclOperation.ANY,
            AclPermissionType.ANY,
        )
        self._admin.delete_acls([everything])[everything].result(15)
