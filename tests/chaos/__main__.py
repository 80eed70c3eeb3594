"""`python -m tests.chaos`: a long chaos run with a report; `make chaos` calls it."""

import argparse
import signal
import sys
import time
from pathlib import Path

from tests.chaos.ill import CREW
from tests.chaos.run import ChaosRun, new_seed
from tests.chaos.schedule import DECKS, LONGEST_ILLNESS_SECONDS
from tests.chaos.services import SIDES, Services
from tests.chaos.worker import BREACHES

_OUTBOXES, _RATE, _KEYS = 5, 2000.0, 25
# So few records of so many keys that slow links and a backlog of a minute are no overload.
_OUTBOXES_OF_THE_ILL, _RATE_OF_THE_ILL, _KEYS_OF_THE_ILL = 2, 80.0, 100


def main() -> int:
    """Run and report; return 0 if the run was clean."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--mode", choices=["exactly-once", "at-least-once"], default="exactly-once")
    parser.add_argument("--seed", type=int, default=None, help="of the schedule; a new one by default")
    parser.add_argument("--outboxes", type=int, help=f"{_OUTBOXES} by default, {_OUTBOXES_OF_THE_ILL} in deck one")
    parser.add_argument("--rate", type=float, help="records per second, of all outboxes together")
    parser.add_argument("--keys", type=int, help=f"on each topic; {_KEYS} by default, {_KEYS_OF_THE_ILL} in deck one")
    parser.add_argument("--least-faults", type=int, default=0, help="go on until so many faults were done")
    parser.add_argument("--late-requests", type=int, default=0, help="go on until so many have arrived late")
    parser.add_argument("--least-records", type=int, default=0, help="go on until so many have been delivered")
    parser.add_argument("--brokers", type=int, choices=[1, 3], default=1)
    parser.add_argument("--deck", choices=DECKS, default="all", help="which faults: see tests/chaos/schedule.py")
    parser.add_argument("--longest-illness", type=float, default=LONGEST_ILLNESS_SECONDS, help="seconds, in deck one")
    parser.add_argument("--breach", choices=list(BREACHES), default="", help="a rule that harvesters break")
    parser.add_argument("--hostile", action="store_true", help="hostile rows are written all the time")
    parser.add_argument(
        "--two-leaders", action="store_true", help="no faults, but harvesters that always believe to lead"
    )
    parser.add_argument("--directory", type=Path, default=None, help="for the report, journals and logs")
    options = parser.parse_args()
    one_is_ill = options.deck == "one"
    outboxes = options.outboxes or (_OUTBOXES_OF_THE_ILL if one_is_ill else _OUTBOXES)
    rate = options.rate or (_RATE_OF_THE_ILL if one_is_ill else _RATE)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or its services would outlive it
    seed = options.seed if options.seed is not None else new_seed()
    directory = options.directory or Path(f"/tmp/chaos/{options.mode}-{time.strftime('%H%M%S')}-{seed}")  # noqa: S108
    _say(f"chaos: {options.mode}, {options.brokers} broker(s), deck {options.deck}, seed {seed}, report in {directory}")
    mixed = options.mode == "exactly-once" and options.deck in {"faults", "all"}
    leading = "always" if options.two_leaders else "mixed" if mixed else "elected"
    with (
        Services(options.brokers, sides=CREW * outboxes if one_is_ill else SIDES) as services,
        ChaosRun(
            services,
            delivery=options.mode,
            seed=seed,
            outboxes=outboxes,
            records_per_second=rate,
            keys=options.keys or (_KEYS_OF_THE_ILL if one_is_ill else _KEYS),
            directory=directory,
            leading=leading,
            limits={"mark_query_records": 25} if options.two_leaders else None,  # many small transactions
            deck=options.deck,
            breach=options.breach,
            hostile=options.hostile,
            longest_illness=options.longest_illness,
            say=_say,
        ) as chaos,
    ):
        report = chaos.run(
            60 * options.minutes,
            least_faults=options.least_faults,
            late_requests=options.late_requests,
            least_records=options.least_records,
            faults=not options.two_leaders,
        )
        sides = [outbox.committed_by_side for outbox in chaos.outboxes]
    path = report.write(directory)
    _say(f"{report.summary()}\ntransactions by each harvester's side: {sides}\nreport: {path}")
    return 1 if report.problems else 0


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
