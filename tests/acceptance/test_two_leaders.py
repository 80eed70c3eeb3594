"""Two harvesters that both believe to lead: the database keeps them apart, row by row."""

import time

import psycopg
import pytest

pytestmark = [pytest.mark.alone, pytest.mark.real_broker]

_LOAD_SECONDS = 6.0

_AUDIT = """
CREATE TABLE audit (
    action text, row_id bigint, old_leader uuid, new_leader uuid,
    process text DEFAULT current_setting('application_name')
);
CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.audit (action, row_id, old_leader, new_leader)
    VALUES (TG_OP, OLD.id, OLD.leader_id, CASE TG_OP WHEN 'UPDATE' THEN NEW.leader_id END);
    RETURN NULL;
END $$;
CREATE TRIGGER audit AFTER UPDATE OR DELETE ON outbox_both FOR EACH ROW EXECUTE FUNCTION audit();
"""


@pytest.fixture
def audited(make_site, database, kafka_bootstrap):
    """Return a site with two harvesters that always lead, and 2% failing deliveries, so that there are resets."""
    site = make_site(
        "both",
        database,
        kafka_bootstrap,
        load={"records_per_second": 200},
        always_leads=True,
        misreported=0.02,
        limits={"io_error_backoff": "100ms"},
    )
    with psycopg.connect(database) as connection:
        connection.execute(_AUDIT)
    return site


def test_two_leaders_leave_each_others_rows_alone(audited, database, say):
    """Purges and resets touch only rows with an own mark, though each leader takes the other's rows; none is lost."""
    audited.start(harvesters=2)
    time.sleep(_LOAD_SECONDS)
    verdict = audited.settle()
    own = {f"kafka-outbox {process.name}": set(process.leader_ids()) for process in audited.fleet.processes}
    with psycopg.connect(database) as connection:
        trail = connection.execute(
            "SELECT action, row_id, old_leader::text, new_leader::text, process FROM audit"
        ).fetchall()
    purges = [row for row in trail if row[0] == "DELETE"]
    resets = [row for row in trail if row[0] == "UPDATE" and row[3] is None]
    thefts = [row for row in trail if row[3] is not None and row[2] is not None and row[2] not in own[row[4]]]
    say(f"{verdict}; {len(purges)} purges, {len(resets)} resets, {len(thefts)} rows marked that the other had marked")
    verdict.assert_complete()
    assert not [row for row in purges if row[2] not in own[row[4]]]
    assert not [row for row in resets if row[2] not in own[row[4]]]
    assert len(purges) == verdict.committed
    assert resets
    assert thefts, "the two never met"
