"""The example of docs/spark-project.md registers a flow that Spark's AutoCDC accepts; no Spark runs."""

import pytest
from pyspark.pipelines.graph_element_registry import GraphElementRegistry, graph_element_registration_context
from pyspark.sql import SparkSession

from tests.docs.blocks import BLOCKS

pytest.importorskip("grpc", reason="pipelines of Spark are clients of Spark Connect")


class _Recorded(GraphElementRegistry):
    """The flows that a pipeline's file registers."""

    def __init__(self):
        self.outputs, self.flows, self.changes = [], [], []

    def register_output(self, output):
        self.outputs.append(output.name)

    def register_flow(self, flow):
        self.flows.append(flow.name)

    def register_auto_cdc_flow(self, flow):
        self.changes.append(flow)

    def register_sql(self, sql_text, file_path):
        raise NotImplementedError


class _Session:
    """A session that takes formats."""

    def __init__(self):
        self.dataSource, self.registered = self, []

    def register(self, source):
        self.registered.append(source.name())


def test_the_example_feeds_auto_cdc(monkeypatch):
    """The view of change events is the source of a flow, by their key, sequence and deletions."""
    (example,) = (
        block.text for block in BLOCKS if block.page == "docs/spark-project.md" and block.language == "python"
    )
    session, found = _Session(), _Recorded()
    monkeypatch.setattr(SparkSession, "active", lambda: session)
    with graph_element_registration_context(found):
        exec(example, {})  # noqa: S102  the page's own
    assert "outbox_kafka" in session.registered
    assert found.outputs == ["order_changes", "orders"]
    assert found.flows == ["order_changes"]
    (flow,) = found.changes
    assert (flow.source, flow.target) == ("order_changes", "orders")
    named = " ".join(map(str, [*flow.keys, flow.sequence_by, flow.apply_as_deletes, *flow.except_column_list]))
    assert [name in named for name in ("_topic", "_key", "_sequence", "_deleted", "_problem")] == [True] * 5
