#!/usr/bin/env python
"""Django's command line for the shop: `python example_project/manage.py migrate`."""

import os
import sys
from pathlib import Path


def main() -> None:
    """Run one command, with the checkout on the path wherever it is called from."""
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
