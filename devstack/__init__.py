"""A real Postgres and a real Kafka broker for the demo, the tests and the benchmarks; not shipped in the wheel.

Everything runs on 127.0.0.1 and needs neither containers nor an installed server: Postgres comes out of a wheel, the
broker is Kafka's own main class started from jars that are resolved once into a cache folder. Where no broker can be
had, librdkafka's mock cluster stands in (see `devstack.embedded` for its limits).

    from devstack.stack import DevStack

    with DevStack() as stack:
        psycopg.connect(stack.postgres.dsn)
        Producer({"bootstrap.servers": stack.kafka.bootstrap})

From a shell: `python -m devstack up`, `status`, `down`.
"""
