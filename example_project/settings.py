"""The shop's Django settings.

The environment gives the addresses of the services, in the variables that `python -m devstack up` prints:

    SHOP_DATABASE_DSN        the shop's database; else OUTBOX_POSTGRES_DSN
    OUTBOX_KAFKA_BOOTSTRAP   the Kafka cluster
"""

import os
from pathlib import Path

from django.core.management.utils import get_random_secret_key
from psycopg.conninfo import conninfo_to_dict

_DSN = os.environ.get("SHOP_DATABASE_DSN") or os.environ.get(
    "OUTBOX_POSTGRES_DSN", "postgresql://postgres@127.0.0.1:5432/shop"
)
_SERVER = conninfo_to_dict(_DSN)

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _SERVER.get("dbname", ""),
        "USER": _SERVER.get("user", ""),
        "PASSWORD": _SERVER.get("password", ""),
        "HOST": _SERVER.get("host", ""),
        "PORT": _SERVER.get("port", ""),
    }
}

# All that the outbox needs: the application, and where its harvester finds Kafka. (The second one is for its tasks.)
INSTALLED_APPS = ["outbox_django", "outbox_django.tasks", "example_project.shop"]
OUTBOX = {"KAFKA": {"bootstrap.servers": os.environ.get("OUTBOX_KAFKA_BOOTSTRAP", "localhost:9092")}}

# The e-mails are tasks, which `manage.py run_tasks` runs: see shop/emails.py. Their results are kept in a table.
TASKS = {
    "default": {
        "BACKEND": "outbox_django.tasks.OutboxTaskBackend",
        "QUEUES": ["order-emails"],
        "OPTIONS": {
            "queue": {
                "bootstrap_servers": os.environ.get("OUTBOX_KAFKA_BOOTSTRAP", "localhost:9092"),
                "message_topic": "shop.messages",
                "marker_topic": "shop.markers",
            },
        },
    },
}
EMAIL_BACKEND = os.environ.get("SHOP_EMAIL_BACKEND", "django.core.mail.backends.console.EmailBackend")
EMAIL_FILE_PATH = os.environ.get("SHOP_EMAIL_FOLDER")
DEFAULT_FROM_EMAIL = "shop@example.org"

# Where the PDFs of invoices go, which are too large for Kafka: a folder that consumers have, too.
SHOP_CLAIMS = os.environ.get("SHOP_CLAIMS", Path(__file__).parents[1] / ".devstack" / "claims")

DEBUG = os.environ.get("SHOP_DEBUG") == "1"
# Nothing here signs anything that must outlive the process. A key that is published with the code would be none.
SECRET_KEY = os.environ.get("SHOP_SECRET_KEY") or get_random_secret_key()
ALLOWED_HOSTS = os.environ.get("SHOP_HOSTS", "localhost,127.0.0.1").split(",")
ROOT_URLCONF = "example_project.urls"
MIDDLEWARE = ["example_project.shop.tracing.trace_requests", "django.middleware.common.CommonMiddleware"]
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}]
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
