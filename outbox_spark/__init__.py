"""Apache Spark for the outbox and Kafka topics. Needs the extra `[spark]`; importing it imports no PySpark."""
