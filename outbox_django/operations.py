"""Migration operations of the outbox."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db.migrations.operations.base import Operation

from outbox_core.schema import STORAGE_PARAMETERS

if TYPE_CHECKING:
    from django.db.backends.base.schema import BaseDatabaseSchemaEditor
    from django.db.migrations.state import ProjectState


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
        """What `migrate --plan` shows."""
        return f"Set the storage parameters of a queue on {self.model_name}"

    def _alter(self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, state: ProjectState, action: str) -> None:
        model = state.apps.get_model(app_label, self.model_name)
        if self.allow_migrate_model(schema_editor.connection.alias, model):
            table = schema_editor.quote_name(model._meta.db_table)  # noqa: SLF001  Django's documented API
            schema_editor.execute(f"ALTER TABLE {table} {action}")
