"""Rules of consumers, each broken on purpose."""
from contextlib import contextmanager
CONSUMER_RULES = {}
@contextmanager
def consumers_broken(name):
    yield
