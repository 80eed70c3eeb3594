"""Migration operations of the outbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from django.db.migrations.operations.base import Operation

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


class SetStorageParameters(Operation):
    """Give a model's table the storage parameters of a queue (`outbox_core.schema.STORAGE_PARAMETERS`).

    Unlike RunSQL it leaves out the databases that do not have the table, and knows the table's name as the model does.
    """

    reversible = True
    reduces_to_sql = True
    elidable = False

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name

    def state_forwards(self, app_label: str, state: ProjectState) -> None:
        """Change nothing: Django's models know no storage parameters."""

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Set them."""
        del from_state
        settings = ", ".join(f"{name} = {value}" for name, value in STORAGE_PARAMETERS.items())
        self._alter(app_label, schema_editor, to_state, f"SET ({settings})")

    def database_backwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Go back to the server's defaults."""
        del from_state
        self._alter(app_label, schema_editor, to_state, f"RESET ({', '.join(STORAGE_PARAMETERS)})")

    def describe(self) -> str:
        """Return the line of `migrate --plan`."""
        return f"Set the storage parameters of a queue on {self.model_name}"

    def _alter(self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, state: ProjectState, action: str) -> None:
        model = state.apps.get_model(app_label, self.model_name)
        if self.allow_migrate_model(schema_editor.connection.alias, model):
            table = schema_editor.quote_name(model._meta.db_table)  # noqa: SLF001  Django's documented API
            schema_editor.execute(f"ALTER TABLE {table} {action}")


class AddChecks(Operation):
    """Give a model's table CHECK constraints, without looking at the rows it has (`schema.add_checks_sql`).

    Args:
        model_name: the model.
        checks: conditions by the constraints' names.
    """

    reversible = True
    reduces_to_sql = True
    elidable = False

    def __init__(self, model_name: str, checks: Mapping[str, str]) -> None:
        self.model_name = model_name
        self.checks = checks

    def state_forwards(self, app_label: str, state: ProjectState) -> None:
        """Change nothing: the models do not declare these constraints."""

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Add them."""
        del from_state
        self._run(app_label, schema_editor, to_state, add_checks_sql)

    def database_backwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Drop them."""
        del from_state
        self._run(app_label, schema_editor, to_state, drop_checks_sql)

    def describe(self) -> str:
        """Return the line of `migrate --plan`."""
        return f"Add CHECK constraints to {self.model_name}"

    def _run(
        self,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        state: ProjectState,
        statements: Callable[[TableName, Mapping[str, str]], str],
    ) -> None:
        model = state.apps.get_model(app_label, self.model_name)
        if self.allow_migrate_model(schema_editor.connection.alias, model):
            schema_editor.execute(statements(_name_of(model), self.checks), params=None)


class NotifyOnInsert(Operation):
    """Give the outbox the trigger that tells harvesters with `OUTBOX["NOTIFY"]` of inserts.

    For a migration of the project's own, since the trigger has its price for writers:

        class Migration(migrations.Migration):
            dependencies = [("outbox_django", "0001_initial")]
            operations = [NotifyOnInsert()]
    """

    reversible = True
    reduces_to_sql = True
    elidable = False

    def state_forwards(self, app_label: str, state: ProjectState) -> None:
        """Change nothing: Django's models know no triggers."""

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Make function and trigger."""
        del app_label, from_state
        self._run(schema_editor, to_state, notify_sql)

    def database_backwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Drop them."""
        del app_label, to_state
        self._run(schema_editor, from_state, drop_notify_sql)

    def describe(self) -> str:
        """Return the line of `migrate --plan`."""
        return "Tell harvesters of inserts into the outbox"

    def _run(
        self, schema_editor: BaseDatabaseSchemaEditor, state: ProjectState, statements: Callable[[TableName], str]
    ) -> None:
        model = state.apps.get_model("outbox_django", "Outbox")
        if self.allow_migrate_model(schema_editor.connection.alias, model):
            schema_editor.execute(statements(_name_of(model)), params=None)  # None: a % in the name is one


class GrantRights(Operation):
    """Give the outbox's roles their rights, column by column, as `outbox schema --grants` prints them.

    For a migration of the project's own, run by the owner of the tables. The roles have to exist:

        class Migration(migrations.Migration):
            dependencies = [("outbox_django", "0004_checks")]
            operations = [GrantRights(writer="shop_app", harvester="outbox_harvester")]

    Backwards it takes back what was granted, but for USAGE of the schema.

    Args:
        writer: the role of the applications that stash.
        harvester: the role of the harvester, and of the commands that look at the outbox.
    """

    reversible = True
    reduces_to_sql = True
    elidable = False

    def __init__(self, writer: str, harvester: str) -> None:
        self.writer = writer
        self.harvester = harvester

    def state_forwards(self, app_label: str, state: ProjectState) -> None:
        """Change nothing: Django's models know no rights."""

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Grant them."""
        del app_label, from_state
        self._run(schema_editor, to_state, grant_statements)

    def database_backwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Revoke them."""
        del app_label, to_state
        self._run(schema_editor, from_state, revoke_statements)

    def describe(self) -> str:
        """Return the line of `migrate --plan`."""
        return f"Grant {self.writer} and {self.harvester} their rights on the outbox"

    def _run(
        self,
        schema_editor: BaseDatabaseSchemaEditor,
        state: ProjectState,
        statements: Callable[[TableName, str, str, Literal["binary", "text"]], list[str]],
    ) -> None:
        model = state.apps.get_model("outbox_django", "Outbox")
        if self.allow_migrate_model(schema_editor.connection.alias, model):
            for statement in statements(_name_of(model), self.writer, self.harvester, outbox_settings().layout):
                schema_editor.execute(statement, params=None)


def _name_of(model: type[Model]) -> TableName:
    table = model._meta.db_table  # noqa: SLF001  Django's documented API
    return TableName.parse(table) if table.startswith('"') else TableName(table)
