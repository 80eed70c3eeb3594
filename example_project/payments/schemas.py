"""The payments' JSON Schema: with a schema registry (PAYMENTS_SCHEMA_REGISTRY_URL) no payment without it gets out.

Needs `pip install 'confluent-kafka[json,schemaregistry]'`. Without the variable values are plain JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from outbox_core.formats.serializer import Serializer

PAYMENTS = "payments.payments"

_ID = {"type": "integer", "minimum": 1}
PAYMENT = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "title": "Payment",
    "type": "object",
    "properties": {"payer": _ID, "payee": _ID, "amount_cents": {"type": "integer", "exclusiveMinimum": 0}},
    "required": ["payer", "payee", "amount_cents"],
    "additionalProperties": False,
}


def serializers(environ: Mapping[str, str] = os.environ) -> dict[str, Serializer]:
    """Return the serializers by topic; none without a registry."""
    url = environ.get("PAYMENTS_SCHEMA_REGISTRY_URL")
    if not url:
        return {}
    from confluent_kafka.schema_registry import SchemaRegistryClient, header_schema_id_serializer
    from confluent_kafka.schema_registry.json_schema import JSONSerializer

    # The schema's id in a header: the value stays the plain JSON that the event's content type says.
    options = {"schema.id.serializer": header_schema_id_serializer}
    return {PAYMENTS: JSONSerializer(json.dumps(PAYMENT), SchemaRegistryClient({"url": url}), conf=options)}
