"""Django settings of the tests.

No server is named here: importing this starts nothing. `tests.integration.django.django_fixtures` points the aliases
at the devstack's Postgres when the first Django test asks for a database.
"""

SECRET_KEY = "only for tests"
USE_TZ = True
TIME_ZONE = "UTC"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # the default takes a tenth of a second
ALLOWED_HOSTS = ["testserver"]
ROOT_URLCONF = "tests.django_urls"
STATIC_URL = "/static/"

DATABASES = {
    alias: {"ENGINE": "django.db.backends.postgresql", "NAME": f"kafka_outbox_{alias}"}
    for alias in ("default", "other")
}

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "outbox_django",
    "outbox_django.tasks",
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
            ],
        },
    },
]

OUTBOX = {"KAFKA": {"bootstrap.servers": "localhost:9092"}}

TASKS = {
    "default": {
        "BACKEND": "outbox_django.tasks.OutboxTaskBackend",
        "QUEUES": ["default", "second"],
        "OPTIONS": {
            "queue": {"bootstrap_servers": "localhost:9092", "message_topic": "messages", "marker_topic": "markers"}
        },
    },
}
