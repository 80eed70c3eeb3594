"""The former name of `outbox_core.stores.interface` and `outbox_core.election.interface`."""

import warnings

from outbox_core.stores.interface import *  # noqa: F403
from outbox_core.stores.interface import OversizedValue as Withheld  # noqa: F401
from outbox_core.stores.interface import SequenceSnapshot as Sight  # noqa: F401

warnings.warn(
    "outbox_core.ports is now outbox_core.stores.interface and outbox_core.election.interface",
    DeprecationWarning,
    stacklevel=2,
)


def __getattr__(name: str) -> object:
    # Later: the package of elections needs the Kafka client, which a base installation lacks.
    if name not in {"ElectorFactory", "LeaderElector", "Leadership"}:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from outbox_core.election import interface

    return getattr(interface, name)
