"""Settings of a shop with ATOMIC_REQUESTS."""

import os

from psycopg.conninfo import conninfo_to_dict

_SERVER = conninfo_to_dict(os.environ["HOST_DATABASE"])
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _SERVER["dbname"],
        "USER": _SERVER["user"],
        "PASSWORD": _SERVER.get("password", ""),
        "HOST": _SERVER["host"],
        "PORT": _SERVER["port"],
        "ATOMIC_REQUESTS": True,
    }
}
INSTALLED_APPS = ["shop", "outbox_django"]
ROOT_URLCONF = "shop.views"
SECRET_KEY = "only for tests"
USE_TZ = True
