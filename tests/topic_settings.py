"""Changes of a topic's settings that are in force when a test goes on."""

from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from devstack.processes import wait_until
from outbox_core.kafka import topic_settings

_PATIENCE_SECONDS = 20


def alter_topic(bootstrap, topic, settings):
    """Change settings (name -> value) of a topic, and wait until the broker, which hears of it later, applies them."""
    client = {"bootstrap.servers": bootstrap}
    changes = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in settings.items()
    ]
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=changes)
    admin = AdminClient(client)  # lives until it has answered
    admin.incremental_alter_configs([resource])[resource].result(_PATIENCE_SECONDS)
    applied = wait_until(lambda: settings.items() <= topic_settings(client, topic).items(), _PATIENCE_SECONDS)
    assert applied, f"{topic} does not apply {settings}"
