"""The redelivery tracker: messages that were not finished in time are delivered again."""
