"""Invoices: PDFs, too large for a topic, so that their records are claim checks.

The PDF goes to a store in the call that stashes; the record names it, and a consumer that is given the store gets the
PDF as if it had come with the record. `outbox claims list --store FOLDER` finds those of orders that rolled back.
"""

from __future__ import annotations

from pathlib import Path

from confluent_kafka import Message
from django.conf import settings
from django.db import transaction

from example_project.shop.models import Order
from outbox_core.claims import FolderStore
from outbox_django import OutboxRecord, OutboxTable

INVOICES = "shop.invoices"
_LARGEST_VALUE_BYTES = 500  # a real one would allow much more


def claim_store() -> FolderStore:
    """Return the store of the PDFs, for the shop and for consumers."""
    return FolderStore(settings.SHOP_CLAIMS)


@transaction.atomic
def send_invoice(order_id: int) -> None:
    """Stash an order's invoice; Order.DoesNotExist if there is no such order."""
    order = Order.objects.get(pk=order_id)
    lines = [f"{line.quantity} x {line.product.name}" for line in order.lines.select_related("product")]
    pdf = _pdf([f"Invoice of order {order.pk}", order.customer, *lines, f"{order.total_cents / 100:.2f}"])
    table = OutboxTable("outbox", claim_store=claim_store(), claim_check_above=_LARGEST_VALUE_BYTES)
    table.stash(OutboxRecord(INVOICES, key=order.pk, value=pdf, headers={"content-type": "application/pdf"}))


def file_invoice(message: Message, folder: Path) -> Path:
    """Handle a record of the topic: keep the PDF in a folder."""
    path = folder / f"{message.key().decode()}.pdf"
    path.write_bytes(message.value())
    return path


def _pdf(lines: list[str]) -> bytes:
    """Return a page of text."""
    shown = b"".join(b"(%s) Tj T*\n" % _escaped(line) for line in lines)
    content = b"BT /F1 14 Tf 18 TL 72 770 Td\n%sET" % shown
    fonts = b"<< /Font << /F1 5 0 R >> >>"
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents 4 0 R /Resources %s >>" % fonts,
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    ]
    pdf, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, start=1):
        places.append(len(pdf))
        pdf += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    count = len(objects) + 1
    start = len(pdf)
    pdf += b"xref\n0 %d\n0000000000 65535 f \n%s" % (count, table)
    return pdf + b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (count, start)


def _escaped(text: str) -> bytes:
    plain = text.encode("cp1252", errors="replace")
    return plain.replace(b"\\", b"\\\\").replace(b"(", b"\\(").replace(b")", b"\\)")
