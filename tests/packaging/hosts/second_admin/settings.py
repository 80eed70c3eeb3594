"""Settings of a project with two sites for its staff."""

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
    }
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
    "django.middleware.csrf.CsrfViewMiddleware",
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
OUTBOX = {"KAFKA": {"bootstrap.servers": "127.0.0.1:1"}}  # nothing here needs Kafka
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
ROOT_URLCONF = "sites"
STATIC_URL = "/static/"
SECRET_KEY = "only for tests"
USE_TZ = True
