"""API keys: who calls, what they may do, and whose jobs they see.

A key is `dyno_<id>_<secret>`. Only the SHA-256 digest of the secret is kept, which is enough for a secret of 256 random
bits: such a secret cannot be guessed, so that a slow hash, as for passwords, would gain nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from sqlalchemy import Engine, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from service.db import now
from service.errors import BadQuery, NotFound
from service.models import ApiKey, Delivery, Webhook

PREFIX = "dyno"
KEY = re.compile(rf"{PREFIX}_([0-9a-f]{{8}})_([A-Za-z0-9_-]{{43}})")
USED_SECONDS = 60.0  # between two notes of a key's last use, so that most requests write nothing


class Scope(StrEnum):
    """What a key may do. `submit` includes `read`; `admin` includes everything, and sees the jobs of all owners."""

    read = "read"
    submit = "submit"
    worker = "worker"
    admin = "admin"


@dataclass(frozen=True)
class Caller:
    """Who a request comes from. `sees` is the owner whose jobs the caller sees, and None where it sees all."""

    id: str = ""
    owner: str | None = None
    sees: str | None = None
    scopes: frozenset[Scope] = field(default_factory=lambda: frozenset(Scope))
    most_open_jobs: int | None = None
    used_at: float | None = None

    def may(self, scope: Scope) -> bool:
        """Whether the caller's scopes include this one."""
        included = {scope, Scope.admin} | ({Scope.submit} if scope is Scope.read else set())
        return bool(included & self.scopes)


ANYBODY = Caller()  # where no keys are asked for: may do everything


def caller(session: Session, token: str) -> Caller | None:
    """Who the key belongs to, or None when there is no such key, or it was revoked."""
    parts = KEY.fullmatch(token)
    row = session.get(ApiKey, parts[1]) if parts else None
    if parts is None or row is None or row.revoked_at is not None:
        return None
    if not hmac.compare_digest(row.digest, _digest(parts[2])):
        return None
    scopes = frozenset(map(Scope, row.scopes))
    sees = None if Scope.admin in scopes else row.owner
    return Caller(row.id, row.owner, sees, scopes, row.most_open_jobs, row.used_at)


def used(engine: Engine, key_id: str, at: float) -> None:
    """Remember when the key was used. A request does not fail because that cannot be written."""
    with contextlib.suppress(SQLAlchemyError), Session(engine) as session, session.begin():
        session.execute(update(ApiKey).where(ApiKey.id == key_id).values(used_at=at))


def is_valid(session: Session, key_id: str) -> bool:
    """Whether the key is still there and was not revoked."""
    row = session.get(ApiKey, key_id)
    return row is not None and row.revoked_at is None


def create(engine: Engine, owner: str, scopes: Iterable[Scope], most_open_jobs: int | None = None) -> str:
    """Make a key and return it. It cannot be shown again, since only its digest is kept. BadQuery for a bad owner."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}", owner):
        raise BadQuery(f"An owner is up to 100 letters, digits, dots, dashes, underscores and @, not {owner!r:.120}.")
    key_id, secret = secrets.token_hex(4), secrets.token_urlsafe(32)
    with Session(engine) as session, session.begin():
        session.add(
            ApiKey(
                id=key_id,
                digest=_digest(secret),
                owner=owner,
                scopes=sorted(set(scopes)),
                most_open_jobs=most_open_jobs,
                created_at=now(session),
            )
        )
    return f"{PREFIX}_{key_id}_{secret}"


def revoke(engine: Engine, key_id: str) -> None:
    """Make a key invalid from now on, and end webhooks that no other key of its owner could make; NotFound."""
    with Session(engine) as session, session.begin():
        row = session.get(ApiKey, key_id) if re.fullmatch("[0-9a-f]{8}", key_id) else None
        if row is None:
            raise NotFound(f"There is no key {key_id!r}; `dynotune keys ls` shows the ids.")
        # All of them, or two that are revoked at once would each take the other for one that is left.
        session.scalars(select(ApiKey.id).where(ApiKey.owner == row.owner).order_by(ApiKey.id).with_for_update()).all()
        row.revoked_at = row.revoked_at or now(session)
        session.flush()
        _disable_webhooks(session, row.owner)


def _disable_webhooks(session: Session, owner: str) -> None:
    """End the webhooks that tell of more than the owner's keys may still see: of all jobs, or of the owner's own."""
    left = session.scalars(select(ApiKey).where(ApiKey.owner == owner, ApiKey.revoked_at.is_(None))).all()
    if any(Scope.admin in row.scopes for row in left):
        return
    # Locked in the order in which the end of a job locks them, whose messages are then there to be ended as well.
    session.scalars(select(Webhook.id).where(Webhook.owner == owner).order_by(Webhook.id).with_for_update()).all()
    ended = update(Webhook).where(Webhook.owner == owner, Webhook.disabled_at.is_(None))
    session.execute((ended.where(Webhook.sees.is_(None)) if left else ended).values(disabled_at=now(session)))
    theirs = select(Webhook.id).where(Webhook.owner == owner, Webhook.disabled_at.is_not(None))
    session.execute(update(Delivery).where(Delivery.webhook_id.in_(theirs)).values(due_at=None))


def listed(session: Session) -> list[ApiKey]:
    """All keys, the oldest first."""
    return list(session.scalars(select(ApiKey).order_by(ApiKey.created_at, ApiKey.id)))


def has_admin(session: Session) -> bool:
    """Whether there is a key that may do everything, and so can be used to begin with."""
    return any(Scope.admin in row.scopes and row.revoked_at is None for row in listed(session))


def same(one: str, other: str) -> bool:
    """Whether two keys are the same, in a time that does not tell how much of them agrees."""
    return hmac.compare_digest(one.encode(), other.encode())


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
