"""Records that confluent-kafka does not produce: header names that are not UTF-8, times outside any calendar.

They are produced by the librdkafka inside its wheel, through ctypes.
"""

import ctypes
from pathlib import Path

import confluent_kafka

_ANY_TOPIC, _PARTITION, _VALUE, _KEY, _MESSAGE_FLAGS, _TIMESTAMP, _HEADER = 1, 3, 4, 5, 7, 8, 9
_COPY = 2
_IS_PRODUCER = 0
_ERROR_SIZE = 512
_FLUSH_MS = 30_000

NOT_UTF8 = b"caf\xe9"
"""A header name in Latin-1."""


class _Memory(ctypes.Structure):
    _fields_ = (("pointer", ctypes.c_char_p), ("size", ctypes.c_size_t))


class _Header(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("value", ctypes.c_char_p), ("size", ctypes.c_ssize_t))


class _Content(ctypes.Union):
    _fields_ = (
        ("text", ctypes.c_char_p),
        ("int32", ctypes.c_int32),
        ("int64", ctypes.c_int64),
        ("memory", _Memory),
        ("header", _Header),
        ("padding", ctypes.c_char * 64),
    )


class _Field(ctypes.Structure):
    """librdkafka's `rd_kafka_vu_t`."""

    _fields_ = (("kind", ctypes.c_int), ("content", _Content))


def produce_raw(bootstrap, topic, value, *, key=None, partition=0, headers=(), timestamp_ms=None):
    """Write a record with header names in bytes, and wait until Kafka has it."""
    library = _library()
    producer = _producer(library, bootstrap)
    try:
        fields = [
            _Field(_ANY_TOPIC, _Content(text=topic.encode())),
            _Field(_PARTITION, _Content(int32=partition)),
            _Field(_VALUE, _Content(memory=_Memory(value, len(value)))),
            _Field(_MESSAGE_FLAGS, _Content(int32=_COPY)),
        ]
        if key is not None:
            fields.append(_Field(_KEY, _Content(memory=_Memory(key, len(key)))))
        if timestamp_ms is not None:
            fields.append(_Field(_TIMESTAMP, _Content(int64=timestamp_ms)))
        fields += [_Field(_HEADER, _Content(header=_Header(name, data, len(data)))) for name, data in headers]
        refused = library.rd_kafka_produceva(producer, (_Field * len(fields))(*fields), ctypes.c_size_t(len(fields)))
        assert not refused
        assert library.rd_kafka_flush(producer, _FLUSH_MS) == 0
    finally:
        library.rd_kafka_destroy(producer)


def _library():
    (path,) = (Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs").glob("librdkafka*")
    library = ctypes.CDLL(str(path))
    library.rd_kafka_conf_new.restype = ctypes.c_void_p
    library.rd_kafka_new.restype = ctypes.c_void_p
    library.rd_kafka_produceva.restype = ctypes.c_void_p
    library.rd_kafka_produceva.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    library.rd_kafka_flush.argtypes = (ctypes.c_void_p, ctypes.c_int)
    library.rd_kafka_destroy.argtypes = (ctypes.c_void_p,)
    library.rd_kafka_conf_set.argtypes = (ctypes.c_void_p, *(ctypes.c_char_p,) * 3, ctypes.c_size_t)
    library.rd_kafka_new.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)
    return library


def _producer(library, bootstrap):
    error = ctypes.create_string_buffer(_ERROR_SIZE)
    settings = library.rd_kafka_conf_new()
    refused = library.rd_kafka_conf_set(settings, b"bootstrap.servers", bootstrap.encode(), error, _ERROR_SIZE)
    assert refused == 0, error.value
    producer = library.rd_kafka_new(_IS_PRODUCER, settings, error, _ERROR_SIZE)
    assert producer, error.value
    return producer
