"""`python -m outbox_spark`: the command `outbox-spark`, also for `spark-submit`."""

import sys

from outbox_spark.cli import main

sys.exit(main())
