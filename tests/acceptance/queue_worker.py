"""A process that works on a queue, badly: it acknowledges most messages, and gives back, forgets or extends others.

Each action is a line of its journal, written before or after the call as the verdict needs it, so that a SIGKILL
loses no line.
"""

import json
import os
import random
import signal
import sys
import time
from datetime import timedelta

from outbox_queue import QueueConfig, QueueService

POISON = b"poison"


def main():
    """Work on a queue until SIGTERM."""
    settings = json.loads(sys.argv[1])
    service = QueueService(QueueConfig(**settings["config"]))
    journal = os.open(settings["journal"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(what, message):
        os.write(journal, f"{what} {message.payload.decode()} {message.attempt}\n".encode())

    with service.queue(settings["queue"]).consumer() as consumer:
        signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
        for message in consumer:
            note("got", message)
            if message.payload.startswith(POISON):
                message.nack(reason="poison")
                continue
            chance = random.random()
            if chance < 0.03:
                message.nack(delay=timedelta(milliseconds=random.randrange(400)))
            elif chance < 0.035:
                message.interrupt()
            else:
                if chance < 0.05:
                    message.extend(timedelta(seconds=4))
                elif chance < 0.052:
                    time.sleep(0.05)
                message.ack()
                note("ack", message)


if __name__ == "__main__":
    main()
