"""Migration operations of the outbox."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db.migrations.operations.base import Operation

from outbox_core.retention.archive import archive_statements, drop_archive_statements
from outbox_core.schema import (
    STORAGE_PARAMETERS,
    TableName,
    add_checks_sql,
    drop_checks_sql,
    drop_notify_sql,
    grant_statements,
    notify_sql,
    revoke_statements,
)
from outbox_django.settings import outbox_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from django.db.backends.base.schema import BaseDatabaseSchemaEditor
    from django.db.migrations.state import ProjectState
    from django.db.models import Model

__all__ = [
    "AddChecks",
    "ArchivePublished",
    "GrantRights",
    "NotifyOnInsert",
    "SetStorageParameters",
]


class _TableOperation(Operation):
    """SQL for a model's table in databases that have it, which changes nothing of the state of Django's models.

    Unlike RunSQL it leaves out the databases that do not have the table, and knows the table's name as the model does.
    """

    reversible = True
    reduces_to_sql = True
    elidable = False
    app_label: str | None = None  # of the model; None for the migration's own app
    model_name: str

    def state_forwards(self, app_label: str, state: ProjectState) -> None:
        """Change nothing."""

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        del from_state
        self._run(app_label, schema_editor, to_state, self.forwards)

    def database_backwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        self._run(app_label, schema_editor, from_state if self.app_label else to_state, self.backwards)

    def forwards(self, table: TableName) -> list[str]:
        raise NotImplementedError

    def backwards(self, table: TableName) -> list[str]:
        raise NotImplementedError

    def _run(
        self,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        state: ProjectState,
        statements: Callable[[TableName], list[str]],
    ) -> None:
        model = state.apps.get_model(self.app_label or app_label, self.model_name)
        if self.allow_migrate_model(schema_editor.connection.alias, model):
            for statement in statements(_name_of(model)):
                schema_editor.execute(statement, params=None)  # None: a % in the name is one


class SetStorageParameters(_TableOperation):
    """An operation that gives a model's table the storage parameters of a queue."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name

    def forwards(self, table: TableName) -> list[str]:
        """Set them."""
        settings = ", ".join(f"{name} = {value}" for name, value in STORAGE_PARAMETERS.items())
        return [f"ALTER TABLE {table.quoted} SET ({settings})"]

    def backwards(self, table: TableName) -> list[str]:
        """Go back to the server's defaults."""
        return [f"ALTER TABLE {table.quoted} RESET ({', '.join(STORAGE_PARAMETERS)})"]

    def describe(self) -> str:
        """Return the line of `migrate --plan`."""
        return f"Set the storage parameters of a queue on {self.model_name}"


class AddChecks(_TableOperation):
    """An operation that gives a model's table CHECK constraints (conditions by name), without checking its rows."""

    def __init__(self, model_name: str, checks: Mapping[str, str]) -> None:
        self.model_name = model_name
        self.checks = checks

    def forwards(self, table: TableName) -> list[str]:
        """Add them."""
        return [add_checks_sql(table, self.checks)]

    def backwards(self, table: TableName) -> list[str]:
        """Drop them."""
        return [drop_checks_sql(table, self.checks)]

    def describe(self) -> str:
        """Return the line of `migrate --plan`."""
        return f"Add CHECK constraints to {self.model_name}"


class NotifyOnInsert(_TableOperation):
    """The trigger that notifies harvesters with `OUTBOX["NOTIFY"]` of inserts into the outbox.

    For a migration of the project's own, since the trigger has its price for writers:

        class Migration(migrations.Migration):
            dependencies = [("outbox_django", "0001_initial")]
            operations = [NotifyOnInsert()]
    """

    app_label = "outbox_django"
    model_name = "Outbox"

    def forwards(self, table: TableName) -> list[str]:
        """Make function and trigger."""
        return [notify_sql(table)]

    def backwards(self, table: TableName) -> list[str]:
        """Drop them."""
        return [drop_notify_sql(table)]

    def describe(self) -> str:
        """Return the line of `migrate --plan`."""
        return "Tell harvesters of inserts into the outbox"


class ArchivePublished(_TableOperation):
    """The archive of the outbox, for harvesters with `OUTBOX["RETENTION"] = "archive"`.

    For a migration of the project's own; backwards it drops the archive with all that is in it:

        class Migration(migrations.Migration):
            dependencies = [("outbox_django", "0001_initial")]
            operations = [ArchivePublished()]
    """

    app_label = "outbox_django"
    model_name = "Outbox"

    def forwards(self, table: TableName) -> list[str]:
        """Make table, partitions and function."""
        return archive_statements(table)

    def backwards(self, table: TableName) -> list[str]:
        """Drop them."""
        return drop_archive_statements(table)

    def describe(self) -> str:
        """Return the line of `migrate --plan`."""
        return "Make the archive of the outbox"


class GrantRights(_TableOperation):
    """The rights of the outbox's roles, column by column, as `outbox schema --grants` prints them.

    For a migration of the project's own, run by the owner of the tables, behind all that makes them: tables that are
    not there yet get no rights. An outbox without a schema is in `public`. The roles have to exist:

        class Migration(migrations.Migration):
            dependencies = [("outbox_django", "0005_history")]
            operations = [GrantRights(writer="shop_app", harvester="outbox_harvester")]

    Backwards it revokes the granted rights, but for USAGE of the schema. The `writer` is the role of the applications
    that stash, the `harvester` that of the harvester and of the commands that look at the outbox.
    """

    app_label = "outbox_django"
    model_name = "Outbox"

    def __init__(self, writer: str, harvester: str) -> None:
        self.writer = writer
        self.harvester = harvester

    def forwards(self, table: TableName) -> list[str]:
        """Grant them."""
        return grant_statements(table, self.writer, self.harvester, outbox_settings().layout)

    def backwards(self, table: TableName) -> list[str]:
        """Revoke them."""
        return revoke_statements(table, self.writer, self.harvester, outbox_settings().layout)

    def describe(self) -> str:
        """Return the line of `migrate --plan`."""
        return f"Grant {self.writer} and {self.harvester} their rights on the outbox"


def _name_of(model: type[Model]) -> TableName:
    table = model._meta.db_table  # noqa: SLF001  Django's documented API
    return TableName.parse(table) if table.startswith('"') else TableName(table)
