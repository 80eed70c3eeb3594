"""A FastAPI application whose endpoints share one injected session with the dependency that finds their user."""

from typing import Annotated

from fastapi import Depends, FastAPI, Header, HTTPException, Request
from sqlalchemy import create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import outbox_sqlalchemy as outbox


class Base(DeclarativeBase):
    """The application's models, with the tables of outbox and inbox."""


outbox.make_outbox_table(Base.metadata)
outbox.make_inbox_table(Base.metadata)


class User(Base):
    """A user, who is known by a token."""

    __tablename__ = "users"
    token: Mapped[str] = mapped_column(primary_key=True)


class Item(Base):
    """An item of a user."""

    __tablename__ = "items"
    id: Mapped[int] = mapped_column(primary_key=True)
    owner: Mapped[str]
    name: Mapped[str]


def make_engine(url):
    """Return an engine with the pool of SQLAlchemy's defaults."""
    return create_engine(outbox.sqlalchemy_url(url), pool_timeout=10)


def get_session(request: Request):
    """Yield the session of a request."""
    with Session(request.app.state.engine, expire_on_commit=False) as session:
        yield session


Injected = Annotated[Session, Depends(get_session)]


def get_user(session: Injected, token: Annotated[str, Header()]):
    """Return the user of a request; the session has begun a transaction then."""
    user = session.scalar(select(User).where(User.token == token))
    if user is None:
        raise HTTPException(401)
    return user


CurrentUser = Annotated[User, Depends(get_user)]
app = FastAPI()


def account_of(request):
    """Return the namespace of a request's key."""
    return f"items-api/{request.headers['token']}"


def item_again(name: str, request: Request, session: Injected, user: CurrentUser):
    """Answer a repeat from what the first request committed."""
    del request
    item = session.scalars(select(Item).where(Item.owner == user.token, Item.name == name)).one()
    return {"id": item.id}


@app.post("/items/{name}", status_code=201)
@outbox.idempotent(account_of, repeated=item_again)
def add_item(name: str, request: Request, session: Injected, user: CurrentUser):
    """Add an item, and announce it."""
    del request
    item = Item(owner=user.token, name=name)
    session.add(item)
    session.flush()
    outbox.stash(session, outbox.OutboxRecord("items", item.id, {"name": name}))
    if name == "forbidden":
        raise HTTPException(422)
    return {"id": item.id}
