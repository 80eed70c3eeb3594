"""Tasks and consumed records under faults: every effect exactly as often as its acceptance.

`make chaos-effects` runs it at full size; here OUTBOX_TEST_EFFECTS_TASKS and OUTBOX_TEST_EFFECTS_RECORDS say how much.
"""

import os
import uuid

import pytest

from tests.chaos.effects.run import EffectsRun
from tests.chaos.run import new_seed

TASKS = int(os.environ.get("OUTBOX_TEST_EFFECTS_TASKS", "300"))
RECORDS = int(os.environ.get("OUTBOX_TEST_EFFECTS_RECORDS", "3000"))
FAULTS = 15
PATIENCE = 600 + TASKS / 5 + RECORDS / 20

pytestmark = [pytest.mark.alone, pytest.mark.complete, pytest.mark.real_broker, pytest.mark.timeout(PATIENCE + 300)]


def test_every_effect_as_often_as_its_acceptance(services, tmp_path, say):
    """Cut connections, swallowed errors, receivers that raise, rebalances and kills lose and repeat no effect."""
    seed = int(os.environ.get("OUTBOX_TEST_SEED", new_seed()))
    say(f"seed {seed}, logs in {tmp_path}")
    name = f"effects_{uuid.uuid4().hex[:6]}"
    with EffectsRun(
        services, name=name, seed=seed, tasks=TASKS, records=RECORDS, directory=tmp_path, say=say
    ) as effects:
        report = effects.run(FAULTS, PATIENCE)
    say(report.summary())
    assert not report.problems, report.write(tmp_path).read_text()
    assert report.retried
    assert report.misfortunes["record: swallows an error"]
