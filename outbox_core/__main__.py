"""`python -m outbox_core` is `outbox`."""

import sys

from outbox_core.cli import main

sys.exit(main())
