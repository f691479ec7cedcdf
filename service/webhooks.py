"""Webhooks: tell a user's own server that a job has ended, signed as Standard Webhooks are (standardwebhooks.com).

A message is written in the same transaction as the end of the job, so none is lost. A control plane sends it, again
after growing rests, about as the specification proposes them, until the receiver answers with a 2xx status. Only public
addresses are sent to unless DYNOTUNE_WEBHOOK_PRIVATE says otherwise: else whoever may submit a job could have the
control plane ask servers of its own network. No secret is kept in the database: a webhook's secret is derived from its
id and the control plane's own (DYNOTUNE_WEBHOOK_KEY, or a file in DYNOTUNE_HOME).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import random
import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from sqlalchemy import Engine, delete, func, select, update
from sqlalchemy.orm import Session
from standardwebhooks.webhooks import Webhook as Signer

from service import __version__, messages
from service.access import Caller
from service.contract.webhook import WebhookView
from service.db import now as time_of
from service.db import reading
from service.enqueue import new_id
from service.errors import BadWebhook, NotFound, TooMany
from service.models import Delivery, Webhook
from service.transactions import Transactions

RESTS = (5.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0, 50400.0, 72000.0, 86400.0)  # seconds between attempts
JITTER = 0.2  # of a rest, so that receivers that were away are not asked for everything at once
SENDING_SECONDS = 120.0  # for which no other control plane sends a message that one has begun to send
TIMEOUT_SECONDS = 15.0  # of an attempt
AT_ONCE = 4  # messages that are sent at the same time
MOST = 20  # webhooks of one owner
NAT64 = ipaddress.ip_network("64:ff9b::/96")  # IPv4 addresses as a gateway translates them (RFC 6052)
GONE = 410  # the receiver wants no further messages
MOST_REASON = 200  # characters


@dataclass(frozen=True)
class Message:
    """A message that is due: what is sent where, and how often it was tried before."""

    seq: int
    webhook_id: str
    message_id: str
    url: str
    body: str
    attempts: int


class Webhooks(Transactions):
    """Makes, lists and deletes webhooks, and sends their messages.

    Their secrets are derived from `key`; with `private`, addresses of private networks are sent to as well.
    """

    def __init__(self, engine: Engine, key: bytes, private: bool, clock: Callable[[], float] = time.time) -> None:
        super().__init__(engine, clock)
        self.key, self._private = key, private

    def create(self, url: str, caller: Caller) -> str:
        """Make a webhook; its id. BadWebhook where the URL cannot be sent to, TooMany where the owner has enough."""
        check(url, self._private)
        with self.writing() as (session, now):
            count = session.scalar(select(func.count()).select_from(Webhook).where(Webhook.owner == caller.owner)) or 0
            if count >= MOST:
                raise TooMany(f"There are {count} webhooks, and {MOST} is the most that an owner may have.")
            webhook_id = new_id()
            session.add(Webhook(id=webhook_id, url=url, owner=caller.owner, sees=caller.sees, created_at=now))
        return webhook_id

    def listed(self, caller: Caller) -> list[WebhookView]:
        """The webhooks that the caller sees, the oldest first."""
        with reading(self.engine) as session:
            return [
                self._view(session, row)
                for row in session.scalars(select(Webhook).order_by(Webhook.created_at, Webhook.id))
                if caller.sees in (None, row.owner)
            ]

    def _view(self, session: Session, row: Webhook) -> WebhookView:
        mine = Delivery.webhook_id == row.id
        waiting = session.scalar(select(func.count()).select_from(Delivery).where(mine, Delivery.due_at.is_not(None)))
        last = session.scalars(select(Delivery).where(mine).order_by(Delivery.tried_at.desc().nulls_last())).first()
        return WebhookView(
            id=row.id,
            url=row.url,
            owner=row.owner,
            created_at=row.created_at,
            disabled_at=row.disabled_at,
            waiting=waiting or 0,
            last_tried_at=last.tried_at if last else None,
            last_error=last.error if last else None,
        )

    def delete(self, webhook_id: str, caller: Caller) -> None:
        """Delete a webhook and its messages; NotFound."""
        with self.writing() as (session, _):
            row = session.get(Webhook, webhook_id)
            if row is None or caller.sees not in (None, row.owner):
                raise NotFound(f"There is no webhook {webhook_id!r}.")
            session.execute(delete(Webhook).where(Webhook.id == webhook_id))

    def test(self, webhook_id: str, caller: Caller) -> None:
        """Queue a message of the type `webhook.test`; NotFound. A webhook that was disabled is tried again."""
        with self.writing() as (session, now):
            row = session.get(Webhook, webhook_id)
            if row is None or caller.sees not in (None, row.owner):
                raise NotFound(f"There is no webhook {webhook_id!r}.")
            row.disabled_at = None
            session.add(messages.message(webhook_id, "webhook.test", {"id": webhook_id}, now))

    def send(self) -> None:
        """Send all messages that are due, a few at the same time, so that one slow receiver holds up few others."""
        while messages := self.due():
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(self._send, messages))

    def _send(self, message: Message) -> None:
        try:
            status = post(message, self.key, self._private)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, BadWebhook) as error:
            self.sent(message, None, str(error) or type(error).__name__)
        else:
            self.sent(message, status, None)

    def due(self) -> list[Message]:
        """A few messages to be sent now, the oldest first; for a while no other control plane is given them."""
        with reading(self.engine) as session:  # nothing is written, and nobody kept waiting, where none is due
            if session.scalar(select(Delivery.seq).where(Delivery.due_at <= time_of(session)).limit(1)) is None:
                return []
        with self.writing() as (session, now):
            wanted = (
                select(Delivery, Webhook.url)
                .join(Webhook, Webhook.id == Delivery.webhook_id)
                .where(Delivery.due_at <= now)
                .order_by(Delivery.due_at, Delivery.seq)
                .limit(AT_ONCE)
                .with_for_update(skip_locked=True, of=Delivery)
            )
            found = []
            for row, url in session.execute(wanted):
                row.due_at = now + SENDING_SECONDS
                found.append(Message(row.seq, row.webhook_id, row.message_id, url, row.body, row.attempts))
            return found

    def sent(self, message: Message, status: int | None, error: str | None) -> None:
        """Note an attempt: delivered, to be tried again after a rest, or given up; 410 disables the webhook."""
        delivered = status is not None and 200 <= status < 300
        last = message.attempts >= len(RESTS) or status == GONE
        with self.writing() as (session, now):
            rest = None if delivered or last else RESTS[message.attempts] * random.uniform(1 - JITTER, 1 + JITTER)
            session.execute(
                update(Delivery)
                .where(Delivery.seq == message.seq)
                .values(
                    attempts=message.attempts + 1,
                    due_at=None if rest is None else now + rest,
                    tried_at=now,
                    error=None if delivered else (error or f"it answered {status}")[:MOST_REASON],
                )
            )
            if status == GONE:
                session.execute(update(Webhook).where(Webhook.id == message.webhook_id).values(disabled_at=now))
                waiting = (Delivery.webhook_id == message.webhook_id, Delivery.due_at.is_not(None))
                session.execute(update(Delivery).where(*waiting).values(due_at=None))


def post(message: Message, key: bytes, private: bool) -> int:
    """Send a message; the status of the answer. BadWebhook where its host has an address that is not sent to.

    The connection goes to the address that was checked, so that a name cannot point to another one a moment later.
    """
    address, url = check(message.url, private), urlsplit(message.url)
    host, at = f"[{address}]" if ":" in address else address, datetime.now(UTC)
    signature = Signer(secret(key, message.webhook_id)).sign(message.message_id, at, message.body)
    headers = {
        "host": url.netloc.rpartition("@")[2],
        "user-agent": f"dynotune/{__version__}",
        "content-type": "application/json",
        "webhook-id": message.message_id,
        "webhook-timestamp": str(int(at.timestamp())),
        "webhook-signature": signature,
    }
    target = url._replace(netloc=host if url.port is None else f"{host}:{url.port}", fragment="").geturl()
    with httpx.Client(timeout=TIMEOUT_SECONDS, trust_env=False, follow_redirects=False) as client:
        named = {"sni_hostname": url.hostname}
        with client.stream("POST", target, content=message.body, headers=headers, extensions=named) as answer:
            return answer.status_code


def check(url: str, private: bool) -> str:
    """The address that the URL's host has; BadWebhook where it cannot be sent to."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BadWebhook(f"url: {error}.") from error
    if parts.scheme not in ("http", "https") or not host or parts.username or parts.password:
        raise BadWebhook("url must be http:// or https:// and a host, without a name or a password in it.")
    try:
        found = socket.getaddrinfo(host, port or 443, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise BadWebhook(f"url: the host {host!r:.100} is not known ({error}).") from error
    addresses = [str(one[4][0]) for one in found]
    if not private and not all(map(_is_public, addresses)):
        raise BadWebhook(
            f"url: the host {host!r:.100} is in a private network; DYNOTUNE_WEBHOOK_PRIVATE=yes on the control plane "
            "allows it."
        )
    return addresses[0]


def _is_public(address: str) -> bool:
    """Whether an address is one machine's on the internet; one that is translated counts as what it stands for."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        translated = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF) if found in NAT64 else None
        found = found.ipv4_mapped or found.sixtofour or translated or found
    return found.is_global and not found.is_multicast


def secret(key: bytes, webhook_id: str) -> str:
    """The secret of a webhook, by which its receiver checks signatures."""
    return f"whsec_{base64.b64encode(hmac.new(key, webhook_id.encode(), hashlib.sha256).digest()).decode()}"


def own_key(given: str | None, home: Path) -> bytes:
    """The control plane's own secret: the setting's, or that of a file which only its user can read."""
    if given is not None:
        return given.encode()
    file = home / "webhook.key"
    if not file.exists():
        partial = file.with_suffix(f".{secrets.token_hex(4)}")
        partial.touch(mode=0o600)
        partial.write_text(secrets.token_urlsafe(32))
        try:
            file.hardlink_to(partial)  # fails where another process was first, whose key then counts
        except FileExistsError:
            pass
        finally:
            partial.unlink()
    return file.read_text().encode()
