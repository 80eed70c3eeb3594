"""Settings of the tests of a shop: on SQLite, though it runs on PostgreSQL."""

DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
INSTALLED_APPS = ["shop", "outbox_django"]
SILENCED_SYSTEM_CHECKS = ["outbox_django.E005"]
SECRET_KEY = "only for tests"
USE_TZ = True
