"""Statements with numbered parameters."""

from outbox_core.stores.postgres.table import numbered


def test_a_name_has_one_number_however_often_it_is_used() -> None:
    """The number is that of the first use."""
    assert numbered("SELECT %(b)s, %(a)s, %(b)s::text") == (b"SELECT $1, $2, $1::text", ("b", "a"))


def test_parameters_without_names_are_counted() -> None:
    """Each has a number of its own."""
    text, names = numbered("SELECT %s, %s")
    assert text == b"SELECT $1, $2"
    assert len(names) == 2


def test_a_doubled_percent_sign_is_one() -> None:
    """In texts and as an operator, as psycopg has it."""
    assert numbered("SELECT 'a%%b', 10 %% %(n)s, '%%(n)s'")[0] == b"SELECT 'a%b', 10 % $1, '%(n)s'"
