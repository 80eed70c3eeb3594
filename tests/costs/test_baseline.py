"""The baseline of costs: written, read, and compared."""

from tests.costs.baseline import TOLERATED, Costs, read_baseline, what_grew, write_baseline

_TOTALS = dict.fromkeys(TOLERATED, 2.0)
_ACCEPTED = Costs(_TOTALS, {"statements": {'DELETE FROM "outbox"': 0.002}, "Python calls": {"a.py:send": 1.0}})


def test_what_was_written_is_read(tmp_path):
    """The file has the totals and the parts of each delivery, quotes in statements included."""
    path = tmp_path / "baseline.toml"
    assert read_baseline(path) == {}
    write_baseline({"exactly-once": _ACCEPTED, "at-least-once": _ACCEPTED}, path)
    assert read_baseline(path) == {"exactly-once": _ACCEPTED, "at-least-once": _ACCEPTED}


def test_what_grew_is_said():
    """Growth beyond what is tolerated is named with its parts, the largest first; smaller growth, and less, is not."""
    assert what_grew("exactly-once", _ACCEPTED, _ACCEPTED) == []
    totals = {**_TOTALS, "WAL bytes": 2.05, "rows read": 1.0, "Python calls": 3.5}
    calls = {"a.py:send": 1.5, "b.py:check": 2.0}
    (sentence,) = what_grew("exactly-once", _ACCEPTED, Costs(totals, {"Python calls": calls}))
    assert sentence.splitlines() == [
        "exactly-once: Python calls for a record grew from 2.0000 to 3.5000 (+75.0%, where 5% is tolerated)",
        "    0.0000 -> 2.0000 b.py:check",
        "    1.0000 -> 1.5000 a.py:send",
    ]
