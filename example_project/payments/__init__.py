"""A payment service on SQLAlchemy's async sessions: money moves, and Kafka hears of it in the same transaction.

`paying` has the transaction, `messages` its records; `app` (HTTP) and `__main__` (command line) are doors to it.
"""
