"""A shop: orders take stock, and tell the world by Kafka in the same transaction.

`ordering` has the transactions, `messages` what they say; views and commands are doors to them.
"""
