"""The tests of the shop through Django's client: `python example_project/manage.py test example_project.shop`.

Their transactions really commit (`TransactionTestCase`), as the outbox is about commits.
"""
# ruff: noqa: PT009, PT027  Django's own test runner runs unittest's assertions

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from cryptography.exceptions import InvalidTag
from django.core import mail
from django.core.management import call_command
from django.db import DatabaseError, connection
from django.http import HttpResponse
from django.test import Client, TransactionTestCase
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from example_project.shop.emails import send_confirmation
from example_project.shop.invoices import claim_store, file_invoice
from example_project.shop.models import Order, OrderEvent, OrderLine, Product, StockMovement
from example_project.shop.privacy import unseal
from outbox_core import tracing
from outbox_core.testing.kafka import InProcessKafka
from outbox_django import consume
from outbox_django.models import Outbox
from outbox_django.tasks.library import task_backends
from outbox_django.tasks.models import Result
from outbox_django.tasks.worker import TaskRunner
from outbox_django.testing import OutboxTestMixin
from outbox_queue.testing import InProcessQueue


class ShopTests(OutboxTestMixin, TransactionTestCase):
    """Orders and the records that they stash."""

    def setUp(self) -> None:
        """Make two products."""
        self.pen = Product.objects.create(name="Pen", price_cents=150, stock=10)
        self.ink = Product.objects.create(name="Ink", price_cents=700, stock=1)

    def order(
        self, basket: dict[int, object], customer: str = "Zoë", key: str | None = None, **more: str
    ) -> HttpResponse:
        """Place an order over HTTP."""
        headers = _LOCAL if key is None else {**_LOCAL, "idempotency-key": key}
        document = {"customer": customer, "basket": basket, **more}
        return self.client.post("/orders/", document, content_type="application/json", headers=headers)

    def written(self) -> list[int]:
        """Count the rows of each table that an order writes to."""
        return [model.objects.count() for model in (Order, OrderLine, OrderEvent, StockMovement, Outbox)]

    def test_an_order_is_placed_with_its_messages(self) -> None:
        """An order over HTTP writes the order, takes stock, and stashes one record for each step of both."""
        answer = self.order({self.pen.pk: 3, self.ink.pk: 1})

        self.assertEqual((answer.status_code, answer.json()["total_cents"]), (201, 1150))
        number = answer.json()["order"]
        self.pen.refresh_from_db()
        self.assertEqual((self.pen.stock, self.pen.movements_count), (7, 1))
        placed, *moved = [
            str(event.pk) for event in (*OrderEvent.objects.all(), *StockMovement.objects.order_by("product"))
        ]
        stashed = self.outbox_records
        order = stashed.assert_stashed("shop.orders", key=number, headers={"event-id": placed}, count=1)
        self.assertEqual(json.loads(order.value)["customer"], "Zoë")
        for product, event, quantity, stock in ((self.pen, moved[0], -3, 7), (self.ink, moved[1], -1, 0)):
            value = {"product": product.pk, "order": number, "quantity": quantity, "stock": stock}
            stashed.assert_stashed("shop.stock", key=product.pk, value=value, headers={"event-id": event})
        email = stashed.assert_stashed("shop.messages", key="order-emails", count=1)
        self.assertEqual(json.loads(email.value)["args"], [number])
        rows = [(row.kafka_topic, row.kafka_key) for row in Outbox.objects.order_by("id")]
        self.assertEqual(rows, [(record.topic, record.key) for record in stashed])

    def test_an_order_that_cannot_be_leaves_nothing(self) -> None:
        """Too little stock, an unknown product and bad JSON are refused; neither data nor records are written."""
        for basket, status in (
            ({self.pen.pk: 1, self.ink.pk: 2}, 409),
            ({self.pen.pk: 1, 999: 1}, 404),
            ({self.pen.pk: 0}, 400),
            ({self.pen.pk: "many"}, 400),
            ({}, 400),
        ):
            with self.subTest(basket=basket):
                self.assertEqual(self.order(basket).status_code, status)
                self.assertEqual(self.written(), [0] * 5)
        self.outbox_records.assert_not_stashed()
        for body in ("{", "[" * 100_000, "null"):
            answer = self.client.post("/orders/", body, "application/json", headers=_LOCAL)
            self.assertEqual(answer.status_code, 400)
        for customer in ("", "Zoë\0", "Zoë\nBcc: everybody", "\ud800"):
            self.assertEqual(self.order({self.pen.pk: 1}, customer=customer).status_code, 400)
        self.assertEqual(self.written(), [0] * 5)

    def test_an_order_that_fails_after_its_stash_leaves_nothing(self) -> None:
        """An error after the stash rolls the records back, together with the order."""
        self.client.raise_request_exception = False
        stash_many = "example_project.shop.ordering.outbox.stash_many"
        from outbox_django import stash_many as real

        def stash_and_fail(records: object) -> None:
            real(records)  # type: ignore[arg-type]
            raise DatabaseError("the connection broke")

        with patch(stash_many, stash_and_fail), self.assertLogs("django.request", "ERROR"):
            self.assertEqual(self.order({self.pen.pk: 1}).status_code, 500)
        self.assertEqual(self.written(), [0] * 5)
        self.outbox_records.assert_not_stashed()
        self.assertEqual([record.topic for record in self.outbox_records.rolled_back], ["shop.orders", "shop.stock"])

    def test_a_repeated_request_changes_nothing_twice(self) -> None:
        """A request that comes again with its Idempotency-Key gets the first answer; one without is a new order."""
        answers = [self.order({self.pen.pk: 3}, key="k1") for _ in range(3)]
        self.assertEqual([answer.status_code for answer in answers], [201] * 3)
        self.assertEqual(answers[1].json(), answers[0].json())
        self.assertEqual(answers[2].json(), answers[0].json())
        self.assertEqual(self.written(), [1, 1, 1, 1, 3])
        for key in ("k2", None, None):
            self.assertNotEqual(self.order({self.pen.pk: 1}, key=key).json(), answers[0].json())
        self.assertEqual(self.written(), [4, 4, 4, 4, 12])
        self.pen.refresh_from_db()
        self.assertEqual(self.pen.stock, 4)

    def test_requests_that_overtake_each_other(self) -> None:
        """Of the same request sent by eight threads at once one places the order, and all get it as their answer."""

        def send(_: int) -> tuple[int, object]:
            try:
                answer = Client().post(
                    "/orders/",
                    {"customer": "Zoë", "basket": {self.pen.pk: 2}},
                    content_type="application/json",
                    headers={**_LOCAL, "idempotency-key": "k1"},
                )
                return answer.status_code, answer.json()["order"]
            finally:
                connection.close()

        with ThreadPoolExecutor(8) as clients:
            answers = set(clients.map(send, range(8)))
        self.assertEqual(answers, {(201, Order.objects.get().pk)})
        self.assertEqual(self.written(), [1, 1, 1, 1, 3])

    def test_a_refused_request_frees_its_key(self) -> None:
        """A refused request may come again with the same key; a placed order's key with another basket is refused."""
        self.assertEqual(self.order({self.ink.pk: 2}, key="k1").status_code, 409)
        Product.objects.filter(pk=self.ink.pk).update(stock=2)
        self.assertEqual(self.order({self.ink.pk: 2}, key="k1").status_code, 201)
        self.assertEqual(self.order({self.ink.pk: 1}, key="k1").status_code, 422)
        self.assertEqual(self.order({self.ink.pk: 2}, customer="Ada", key="k1").status_code, 422)
        self.assertEqual(self.order({self.ink.pk: 2}, key="k" * 1001).status_code, 400)
        self.assertEqual(self.written(), [1, 1, 1, 1, 3])

    def test_a_cancelled_order_becomes_a_tombstone(self) -> None:
        """Cancelling puts the products back, stashes a tombstone under the order's key, and works once."""
        number = self.order({self.pen.pk: 3}).json()["order"]
        statuses = [self.client.delete(f"/orders/{number}/", headers=_LOCAL).status_code for _ in range(2)]

        self.assertEqual(statuses, [204, 404])
        self.pen.refresh_from_db()
        self.assertEqual((self.pen.stock, self.pen.movements_count), (10, 2))
        self.outbox_records.assert_stashed("shop.orders", key=number, headers={"number": "1"}, count=1)
        self.outbox_records.assert_stashed("shop.orders", key=number, value=None, headers={"number": "2"}, count=1)

    def test_a_task_becomes_an_email(self) -> None:
        """The task sends the customer the order, and is refused for good if there is none."""
        number = self.order({self.pen.pk: 3}).json()["order"]
        tasks = task_backends["default"]
        jobs = InProcessQueue(tasks.queue("order-emails"), self.outbox_records)
        self.assertEqual(jobs.run(TaskRunner(tasks)), 1)
        (email,) = mail.outbox
        self.assertEqual((email.subject, email.to), (f"Your order {number}", ["zoë@example.org"]))
        self.assertIn("3 x Pen", email.body)
        send_confirmation.enqueue(0)
        jobs.run(TaskRunner(tasks))
        self.assertEqual(len(jobs.dead_letters), 1)
        self.assertEqual([result.status for result in Result.objects.order_by("enqueued_at")], ["SUCCESSFUL", "FAILED"])

    def test_an_email_that_fails_is_tried_again(self) -> None:
        """A mail server that is away costs a delay, and no e-mail."""
        self.order({self.pen.pk: 3})
        tasks = task_backends["default"]
        jobs = InProcessQueue(tasks.queue("order-emails"), self.outbox_records)
        with (
            patch("django.core.mail.EmailMessage.send", side_effect=ConnectionError),
            self.assertLogs("outbox_queue", "WARNING"),
            self.assertRaises(ConnectionError),
        ):
            jobs.run(TaskRunner(tasks))
        self.assertEqual(jobs.run(TaskRunner(tasks)), 0)
        jobs.clock.advance(timedelta(minutes=1))
        self.assertEqual(jobs.run(TaskRunner(tasks)), 1)
        self.assertEqual(len(mail.outbox), 1)

    def test_an_email_goes_to_our_own_domain(self) -> None:
        """Any customer's name becomes a single address in our domain."""
        for customer, address in (
            ("Ada, eve@example.com", "ada.eve.example.com@example.org"),
            ('"a b"@x', "a.b.x@example.org"),
            (".", "customer@example.org"),
        ):
            number = self.order({self.pen.pk: 1}, customer=customer).json()["order"]
            send_confirmation.call(number)
            self.assertEqual(mail.outbox[-1].to, [address])

    def test_an_address_is_encrypted_and_forgotten(self) -> None:
        """Messages show an address only to those who have its customer's key, and to nobody once that is deleted."""
        self.assertEqual(self.order({self.pen.pk: 1}, address="1 Main Street\n").status_code, 400)
        self.assertEqual(self.order({self.pen.pk: 1}, address="1 Main Street").status_code, 201)
        (message,) = (json.loads(record.value) for record in self.outbox_records if record.topic == "shop.orders")
        self.assertNotIn("Main", "".join(str(record.value) for record in self.outbox_records))
        self.assertEqual(unseal("Zoë", "address", message["address"]), "1 Main Street")
        with self.assertRaises(InvalidTag):
            unseal("Zoë", "other", message["address"])
        call_command("forget_customer", "Zoë", stdout=StringIO())
        self.assertIsNone(unseal("Zoë", "address", message["address"]))
        self.assertEqual(Order.objects.get().address, "")

    def test_an_invoice_comes_from_the_claim_store(self) -> None:
        """The record names the PDF, which is in the store; a consumer gets it as if it had come with the record."""
        number = self.order({self.pen.pk: 3}, customer="Zoë (x)").json()["order"]
        with TemporaryDirectory() as folder, self.settings(SHOP_CLAIMS=Path(folder, "claims")):
            self.assertEqual(self.client.post(f"/orders/{number}/invoice/", headers=_LOCAL).status_code, 202)
            self.assertEqual(self.client.post("/orders/0/invoice/", headers=_LOCAL).status_code, 404)
            self.outbox_records.assert_stashed("shop.invoices", key=number, value=b"", count=1)
            paths: list[Path] = []
            InProcessKafka(self.outbox_records).deliver(
                {"shop.invoices": lambda message: paths.append(file_invoice(message, Path(folder)))},
                claim_store=claim_store(),
            )
            pdf = paths[0].read_bytes()
        self.assertTrue(pdf.startswith(b"%PDF-") and pdf.endswith(b"%%EOF\n"))
        self.assertIn("(Zoë \\(x\\)) Tj".encode("cp1252"), pdf)
        self.assertIn(b"(3 x Pen) Tj", pdf)

    def test_a_trace_leads_from_the_request_to_the_consumer(self) -> None:
        """The request, the creation of its records and their processing by a consumer are spans of one trace."""
        exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        tracing.enable(provider)
        self.addCleanup(tracing.disable)
        with patch("opentelemetry.trace.get_tracer_provider", return_value=provider):
            self.order({self.pen.pk: 3})
            consumer = InProcessKafka(self.outbox_records).consumer("shop.orders", group="shipping")
            consume(consumer, lambda _: None, stop=consumer.drained)
        spans = {span.name: span for span in exporter.get_finished_spans()}
        request, created = spans["POST /orders/"], spans["create shop.orders"]
        processed = spans["process shop.orders"]
        self.assertEqual(len({span.context.trace_id for span in (request, created, processed)}), 1)
        self.assertEqual(created.parent.span_id, request.context.span_id)
        self.assertEqual(processed.parent.span_id, created.context.span_id)

    def test_the_front_page_shows_products_and_orders(self) -> None:
        """The page lists products and orders, escaped."""
        self.order({self.pen.pk: 3}, customer="<Zoë>")
        page = self.client.get("/", headers=_LOCAL).content.decode()
        for text in ("Pen", "Ink", "&lt;Zoë&gt;", "3 &times; Pen"):
            self.assertIn(text, page)

    def test_place_orders_counts_what_it_did(self) -> None:
        """The command places exactly so many orders; rolled-back ones are neither in the data nor in the outbox."""
        Product.objects.all().delete()
        output = StringIO()
        call_command("place_orders", "--count=20", "--concurrency=3", "--rollback-share=0.5", stdout=output)

        tally = json.loads(output.getvalue())
        self.assertEqual((tally["placed"], tally["cancelled"]), (20, 2))
        self.assertGreater(tally["rolled_back"]["shop.orders"], 0)
        self.assertEqual(self.written(), [20, 80, 22, 88, 130])


_LOCAL = {"host": "localhost"}
