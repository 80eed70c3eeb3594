"""Settings of a project whose connections go through a pooler of transactions, but for a direct one."""

import os

from psycopg.conninfo import conninfo_to_dict


def _database(url, **settings):
    server = conninfo_to_dict(url)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": server["dbname"],
        "USER": server["user"],
        "PASSWORD": server.get("password", ""),
        "HOST": server["host"],
        "PORT": server["port"],
        **settings,
    }


DATABASES = {
    "default": _database(os.environ["HOST_POOLER"], DISABLE_SERVER_SIDE_CURSORS=True),
    "direct": _database(os.environ["HOST_DATABASE"], TEST={"MIRROR": "default"}),
}
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "outbox_django",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
OUTBOX = {"DIRECT_DATABASE": "direct", "KAFKA": {"bootstrap.servers": os.environ["HOST_KAFKA"]}}
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
ROOT_URLCONF = "urls"
STATIC_URL = "/static/"
SECRET_KEY = "only for tests"
USE_TZ = True
