"""Message queues with individual acknowledgement over two Kafka topics, wire-compatible with kafka-mq-go."""
