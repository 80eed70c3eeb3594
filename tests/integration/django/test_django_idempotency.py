"""`outbox_django.idempotent` on a real Postgres: a repeated request has its effect once."""

import json
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import pytest
from django.contrib.auth.models import Group
from django.db import connection, transaction
from django.http import FileResponse, HttpResponse, JsonResponse, StreamingHttpResponse
from django.test import RequestFactory

import outbox_django as outbox
from outbox_core.errors import OutboxError
from outbox_django.models import Inbox, Outbox
from tests.integration.django.django_fixtures import django_db_modify_db_settings

__all__ = ["django_db_modify_db_settings"]

pytestmark = pytest.mark.django_db(transaction=True)

_requests = RequestFactory()


def _again(request, status=201):
    """Answer from what the first request has committed, or with 422."""
    name = json.loads(request.body)["name"]
    first = Group.objects.first()
    return JsonResponse({"id": first.pk}, status=status) if first.name == name else HttpResponse(status=422)


@outbox.idempotent(lambda request: request.headers.get("Account", "groups-api"), repeated=_again)
def make_group(request, status=201):
    """Make a group, and stash a record; `status` is the answer's."""
    with transaction.atomic():
        group = Group.objects.create(name=json.loads(request.body)["name"])
        outbox.stash(outbox.OutboxRecord(topic="groups", key=group.pk, value=b"v"))
    if status == 500:
        raise RuntimeError("after the work")
    return JsonResponse({"id": group.pk}, status=status)


def _post(key, name="a", status=201, view=make_group, account=None):
    headers = {} if key is None else {"Idempotency-Key": key}
    if account is not None:
        headers["Account"] = account
    request = _requests.post("/", {"name": name}, content_type="application/json", headers=headers)
    return view(request, status=status)


def _rows():
    return [model.objects.count() for model in (Group, Outbox, Inbox)]


def test_a_repeat_is_answered_from_the_first():
    """A repeat changes nothing, and says 422 if it asks for something else; without a key each request is a new one."""
    first, second = _post("k"), _post("k")
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.content == second.content
    assert _post("k", name="b").status_code == 422
    assert _rows() == [1, 1, 1]
    assert _post("k", name="b", account="another").status_code == 201
    assert _post(None, name="c").status_code == 201
    assert _rows() == [3, 3, 2]


def test_a_request_that_fails_frees_its_key():
    """An answer of 400 or more, and an exception, roll back the work with its key, which may come again."""
    assert _post("k", status=409).status_code == 409
    with pytest.raises(RuntimeError):
        _post("k", status=500)
    assert _rows() == [0, 0, 0]
    assert _post("k").status_code == 201
    assert _rows() == [1, 1, 1]


def _streams():
    return StreamingHttpResponse(Group.objects.create(name=name).name for name in "ab")


@pytest.mark.parametrize("key", ["k", None])
@pytest.mark.parametrize("make", [_streams, lambda: (number for number in "ab"), dict])
def test_answers_that_are_made_after_the_commit(make, key):
    """An answer that is no response yet, or whose body is, is refused, and nothing is kept; a file may be sent."""

    @outbox.idempotent("groups-api", repeated=_again)
    def view(request, status):
        del request, status
        Group.objects.create(name="before")
        return answers.pop()

    answers = [FileResponse(BytesIO(b"a file")), make()]
    with pytest.raises(OutboxError, match="do the work first, and return a finished answer"):
        _post(key, view=view)
    assert _rows() == [0, 0, 0]
    assert b"".join(_post(key, view=view)) == b"a file"
    assert _rows() == [1, 0, int(key is not None)]


def test_inside_the_transaction_of_a_request():
    """In a transaction that ATOMIC_REQUESTS has begun, a refusal undoes the view's part of it."""
    with transaction.atomic():
        Group.objects.create(name="of a middleware")
        assert _post("k", status=409).status_code == 409
    assert _rows() == [1, 0, 0]


def test_requests_that_overtake_each_other():
    """Of the same request at once, one does the work, and all get its answer."""

    def send(_):
        try:
            return _post("k").content
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as clients:
        assert len(set(clients.map(send, range(4)))) == 1
    assert _rows() == [1, 1, 1]


def test_keys_that_cannot_be():
    """A key that is too long, and a missing one that is required, are answered 400; an async view is refused."""
    strict = outbox.idempotent("groups-api", repeated=_again, required=True)(_never)
    assert b"Idempotency-Key: " in _post("k" * 1001).content
    assert _post("k" * 1001).status_code == _post("").status_code == 400
    assert (answer := _post(None, view=strict)).status_code == 400
    assert b"the header Idempotency-Key is missing" in answer.content
    assert _rows() == [0, 0, 0]
    with pytest.raises(TypeError, match="_later is asynchronous"):
        outbox.idempotent("groups-api", repeated=_again)(_later)


def _never(*_, **__):
    raise AssertionError


async def _later(*_, **__):
    raise AssertionError
