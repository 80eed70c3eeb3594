"""The wire format of queues: markers, headers, topics and client settings."""
