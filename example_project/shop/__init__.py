"""A shop: orders take stock, and stash Kafka records in the same transaction.

`ordering` has the transactions, `messages` their records; views and commands are doors to them.
"""
