"""The former module of the seams."""

import importlib
import sys

import pytest

from outbox_core.election import interface as election
from outbox_core.stores import interface as stores


def test_former_module_has_the_names_of_today():
    """Importing the former module warns, and its protocols and values are those of the modules that replaced it."""
    sys.modules.pop("outbox_core.ports", None)
    with pytest.warns(DeprecationWarning, match="outbox_core.stores.interface"):
        ports = importlib.import_module("outbox_core.ports")
    assert ports.OutboxStore is stores.OutboxStore
    assert ports.LeaderElector is election.LeaderElector
    assert (ports.Sight, ports.Withheld) == (stores.SequenceSnapshot, stores.OversizedValue)
