"""`python -m tests.chaos.effects`: tasks and records under faults, with a report; `make chaos-effects` calls it."""

import argparse
import signal
import sys
import time
from pathlib import Path

from tests.chaos.effects.run import EffectsRun
from tests.chaos.run import new_seed
from tests.chaos.services import Services


def main() -> int:
    """Run and report; return 0 if the run was clean."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.effects", description=__doc__)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--faults", type=int, default=90, help="of processes and connections, spread over the work")
    parser.add_argument("--seed", type=int, default=None, help="of faults and misfortunes; a new one by default")
    parser.add_argument("--patience", type=float, default=3600.0, help="seconds, after which the rest is left")
    parser.add_argument("--directory", type=Path, default=None, help="for the report, journals and logs")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or its services would outlive it
    seed = options.seed if options.seed is not None else new_seed()
    directory = options.directory or Path(f"/tmp/chaos/effects-{time.strftime('%H%M%S')}-{seed}")  # noqa: S108
    _say(f"effects: {options.tasks} tasks, {options.records} records, seed {seed}, report in {directory}")
    with (
        Services(sides=0) as services,
        EffectsRun(
            services,
            name="effects",
            seed=seed,
            tasks=options.tasks,
            records=options.records,
            directory=directory,
            say=_say,
        ) as effects,
    ):
        report = effects.run(options.faults, options.patience)
    path = report.write(directory)
    _say(f"{report.summary()}\nreport: {path}")
    return 1 if report.problems else 0


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
