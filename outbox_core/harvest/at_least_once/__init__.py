"""At-least-once delivery: mark, publish in lanes, purge or reset."""
