"""Webhooks: tell a user's own server that a job has ended, signed as Standard Webhooks are (standardwebhooks.com).

A message is written in the same transaction as the end of the job, so none is lost. A control plane sends it, again
after growing rests, about as the specification proposes them, until the receiver answers with a 2xx status. Only public
addresses are sent to unless DYNOTUNE_WEBHOOK_PRIVATE says otherwise: else whoever may submit a job could have the
control plane ask servers of its own network. No secret is kept in the database: a webhook's secret is derived from its
id and the control plane's own (DYNOTUNE_WEBHOOK_KEY, or a file in DYNOTUNE_HOME).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import ipaddress
import os
import random
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property, partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from sqlalchemy import ColumnElement, Engine, delete, func, select, update
from sqlalchemy.orm import Session, aliased
from standardwebhooks.webhooks import Webhook as Signer

from service import __version__, logs, messages
from service.access import Caller
from service.contract.webhook import WebhookView
from service.db import reading
from service.enqueue import new_id
from service.errors import BadWebhook, Misconfigured, NotFound, TooMany
from service.models import Delivery, Webhook
from service.text import first_line
from service.threads import in_daemon
from service.transactions import Transactions

log = logs.logger("dynotune.webhooks")
RESTS = (5.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0, 50400.0, 72000.0, 86400.0)  # seconds between attempts
JITTER = 0.2  # of a rest, so that receivers that were away are not asked for everything at once
SENDING_SECONDS = 120.0  # for which no other control plane sends a message that one has begun to send
TIMEOUT_SECONDS = 15.0  # for finding a host's address, and for an attempt once it is known
AT_ONCE = 60  # messages that are sent at the same time: more than an owner has webhooks, all of which may hang
IN_A_ROW = 20  # messages of one webhook, before others have a turn
LOOK_UPS = 2 * AT_ONCE  # of hosts at the same time: one that is given up goes on in its thread, up to a minute
TRIES = 100  # of reading the key's file, a hundredth of a second apart
MOST = 20  # webhooks of one owner
NAT64 = ipaddress.ip_network("64:ff9b::/96")  # IPv4 addresses as a gateway translates them (RFC 6052)
IPV6 = ipaddress.ip_network("2000::/3")  # all that is given out on the internet
# Addresses within a network that Python takes for public ones: protocols' own, relays, Azure's host, documentation.
WITHIN = [ipaddress.ip_network(one) for one in ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32", "3fff::/20")]
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

    Their secrets are derived from what `key` gives, which is asked for once there is a webhook; with `private`,
    addresses of private networks are sent to as well.
    """

    def __init__(
        self, engine: Engine, key: Callable[[], bytes], private: bool, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(engine, clock)
        self._made_key, self._private = key, private
        self._lookups = threading.BoundedSemaphore(LOOK_UPS)
        self._sending: dict[str, asyncio.Task[None]] = {}  # by webhook
        self._is_ending = False

    @cached_property
    def key(self) -> bytes:
        """The control plane's own secret."""
        return self._made_key()

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
        mine = select(Delivery).where(Delivery.webhook_id == row.id)
        last = session.scalars(mine.order_by(Delivery.tried_at.desc().nulls_last()).limit(1)).first()
        return WebhookView(
            id=row.id,
            url=row.url,
            owner=row.owner,
            created_at=row.created_at,
            disabled_at=row.disabled_at,
            waiting=_count_waiting(session, row.id),
            last_tried_at=last.tried_at if last else None,
            last_error=last.error if last else None,
        )

    def delete(self, webhook_id: str, caller: Caller) -> None:
        """Delete a webhook and its messages; NotFound."""
        with self.writing() as (session, _):
            session.execute(delete(Webhook).where(Webhook.id == _own(session, webhook_id, caller).id))

    def test(self, webhook_id: str, caller: Caller) -> None:
        """Queue a message of the type `webhook.test`; NotFound, or TooMany while another message is being sent.

        Where messages rest after failures, the oldest of them is sent at once in its place. A webhook that was disabled
        is used again, and tells of no more than the caller may see.
        """
        with self.writing() as (session, now):
            row = _own(session, webhook_id, caller)
            resting = _resting(webhook_id, now)
            oldest = session.scalar(select(func.min(Delivery.seq)).where(*resting))
            if oldest is not None:
                session.execute(update(Delivery).where(Delivery.seq == oldest).values(due_at=now))
                return
            if _count_waiting(session, webhook_id):
                raise TooMany(f"Another message to the webhook {webhook_id} is still to be delivered.")
            if row.disabled_at is not None:
                row.disabled_at, row.sees = None, row.sees or caller.sees
            session.add(messages.message(webhook_id, "webhook.test", {"id": webhook_id}, now))

    async def begin(self) -> None:
        """Begin to send what is due: one message of each webhook at a time, so that none holds up the others'."""
        for message in await asyncio.to_thread(self.due, frozenset(self._sending)):
            task = self._sending[message.webhook_id] = asyncio.create_task(self._send_some(message))
            task.add_done_callback(partial(self._over, message.webhook_id))

    def _over(self, webhook_id: str, task: asyncio.Task[None]) -> None:
        del self._sending[webhook_id]
        if not task.cancelled() and (error := task.exception()):
            log.warning("a message's attempt cannot be noted", webhook=webhook_id, reason=first_line(error))

    async def send(self) -> None:
        """Send what is due at the end of the control plane, one message of each webhook, and wait until it is sent."""
        self._is_ending = True
        was_busy = bool(self._sending)
        await self._round()
        if was_busy:  # what was being sent may have kept another message of its webhook waiting
            await self._round()

    async def _round(self) -> None:
        await self.begin()
        if self._sending:
            await asyncio.wait(self._sending.values())

    async def _send_some(self, message: Message) -> None:
        """Send a message, and if it is delivered some more that wait for its webhook, one after the other."""
        for number in range(1, IN_A_ROW + 1):
            if not await self._send(message) or number == IN_A_ROW or self._is_ending:
                return  # what is taken from the queue has to be sent, so no other one is taken
            following = await asyncio.to_thread(self.due, (), message.webhook_id)
            if not following:
                return
            message = following[0]

    async def _send(self, message: Message) -> bool:
        """Send a message once; whether it was delivered."""
        status, error = None, None
        try:
            address = await self._looked_up(message.url)
            async with asyncio.timeout(TIMEOUT_SECONDS):
                status = await post(message, address, self.key)
        except TimeoutError:
            error = f"it did not answer within {TIMEOUT_SECONDS:.0f} s"
        except Exception as problem:  # noqa: BLE001 - whatever it is, the message must not be tried for ever
            error = str(problem) or type(problem).__name__
        return await asyncio.to_thread(self.sent, message, status, error)

    async def _looked_up(self, url: str) -> str:
        """The address of the URL's host; BadWebhook where that is not known in time, or is not sent to."""
        if not self._lookups.acquire(blocking=False):
            raise BadWebhook("url: its host was not looked for, as too many others are not found.")

        def look() -> str:
            try:
                return check(url, self._private)
            finally:
                self._lookups.release()

        try:
            found = in_daemon(look, "look-up of a host")  # which may take a minute
        except RuntimeError:  # no thread can be started at the moment
            self._lookups.release()
            raise
        try:
            return await asyncio.wait_for(asyncio.wrap_future(found), TIMEOUT_SECONDS)
        except TimeoutError:
            raise BadWebhook(f"url: its host was not found within {TIMEOUT_SECONDS:.0f} s.") from None

    def due(self, busy: Collection[str] = (), only: str | None = None) -> list[Message]:
        """The next message of some webhooks that are not busy; for a while no other control plane is given them.

        With `only`, that of this webhook. Those that were tried longest ago come first, so that none waits for the
        backlog of others.
        """
        if len(busy) >= AT_ONCE:
            return []
        with reading(self.engine) as session:  # nothing is written, and nobody kept waiting, where none is due
            waiting = select(Delivery.seq).where(Delivery.due_at <= self.now(session), _of(only, busy))
            if session.scalar(waiting.limit(1)) is None:
                return []
        with self.writing() as (session, now):
            first, each = func.min(Delivery.seq), aliased(Delivery)
            mine = each.webhook_id == Delivery.webhook_id
            tried = select(func.max(each.tried_at)).where(mine).scalar_subquery()
            firsts = (
                select(first)
                .join(Webhook, Webhook.id == Delivery.webhook_id)
                .where(Delivery.due_at <= now, Webhook.disabled_at.is_(None), _of(only, busy))
                .group_by(Delivery.webhook_id)
                .order_by(tried.nulls_first(), first)
                .limit(AT_ONCE - len(busy))
            )
            wanted = (
                select(Delivery, Webhook.url)
                .join(Webhook, Webhook.id == Delivery.webhook_id)
                .where(Delivery.seq.in_(firsts), Delivery.due_at <= now, Webhook.disabled_at.is_(None))
                .with_for_update(skip_locked=True, of=Delivery)
            )
            found = []
            for row, url in session.execute(wanted):
                row.due_at = now + SENDING_SECONDS
                found.append(Message(row.seq, row.webhook_id, row.message_id, url, row.body, row.attempts))
            return found

    def sent(self, message: Message, status: int | None, error: str | None) -> bool:
        """Note an attempt: delivered, to be tried again after a rest, or given up; 410 disables the webhook.

        Returns whether it was delivered. If so, its receiver works again: the webhook's other messages rest no more.
        """
        delivered = status is not None and 200 <= status < 300
        with self.writing() as (session, now):
            hook = session.get(Webhook, message.webhook_id, with_for_update=True)
            last = message.attempts >= len(RESTS) or status == GONE or hook is None or hook.disabled_at is not None
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
            if delivered:
                session.execute(update(Delivery).where(*_resting(message.webhook_id, now)).values(due_at=now))
            if status == GONE and hook is not None:
                hook.disabled_at = now
                session.execute(update(Delivery).where(*_waiting(hook.id)).values(due_at=None))
        return delivered


def _own(session: Session, webhook_id: str, caller: Caller) -> Webhook:
    """The webhook, locked, where the caller may see it; else NotFound."""
    row = session.get(Webhook, webhook_id, with_for_update=True)
    if row is None or caller.sees not in (None, row.owner):
        raise NotFound(f"There is no webhook {webhook_id!r}.")
    return row


def _of(only: str | None, busy: Collection[str]) -> ColumnElement[bool]:
    """The condition that a message is of that webhook, or of none that is busy."""
    return Delivery.webhook_id == only if only is not None else Delivery.webhook_id.not_in(busy)


def _waiting(webhook_id: str) -> tuple[ColumnElement[bool], ...]:
    return Delivery.webhook_id == webhook_id, Delivery.due_at.is_not(None)


def _resting(webhook_id: str, now: float) -> tuple[ColumnElement[bool], ...]:
    """The condition that a webhook's message waits for long after a failure, and that nobody is sending it now."""
    return Delivery.webhook_id == webhook_id, Delivery.due_at > now + SENDING_SECONDS


def _count_waiting(session: Session, webhook_id: str) -> int:
    return session.scalar(select(func.count()).select_from(Delivery).where(*_waiting(webhook_id))) or 0


@cache
def tls() -> ssl.SSLContext:
    """What checks receivers' certificates. Made once, as to read the authorities takes tens of milliseconds."""
    return httpx.create_ssl_context(trust_env=False)


async def post(message: Message, address: str, key: bytes) -> int:
    """Send a message; the status of the answer.

    The connection goes to the address that was checked, so that a name cannot point to another one a moment later.
    """
    url = urlsplit(message.url)
    host, at = f"[{address}]" if ":" in address else address, datetime.now(UTC)
    signature = Signer(secret(key, message.webhook_id)).sign(message.message_id, at, message.body)
    headers = {
        "host": url.netloc,
        "user-agent": f"dynotune/{__version__}",
        "content-type": "application/json",
        "webhook-id": message.message_id,
        "webhook-timestamp": str(int(at.timestamp())),
        "webhook-signature": signature,
    }
    target = url._replace(netloc=host if url.port is None else f"{host}:{url.port}", fragment="").geturl()
    # httpx's timeout is one of each read, which a slow receiver never meets; the caller's is one of the whole attempt.
    async with httpx.AsyncClient(verify=tls(), timeout=None, trust_env=False, follow_redirects=False) as client:
        named = {"sni_hostname": url.hostname}
        async with client.stream("POST", target, content=message.body, headers=headers, extensions=named) as answer:
            return answer.status_code


def check(url: str, private: bool) -> str:
    """The address that the URL's host has; BadWebhook where it cannot be sent to."""
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise BadWebhook("url must be of plain ASCII characters; write other names of hosts in Punycode (xn--...).")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BadWebhook(f"url: {error}.") from error
    if parts.scheme not in ("http", "https") or not host or parts.username or parts.password:
        raise BadWebhook("url must be http:// or https:// and a host, without a name or a password in it.")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
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
    given_out = found.version == 4 or found in IPV6
    return given_out and found.is_global and not found.is_multicast and not any(found in one for one in WITHIN)


def secret(key: bytes, webhook_id: str) -> str:
    """The secret of a webhook, by which its receiver checks signatures."""
    return f"whsec_{base64.b64encode(hmac.new(key, webhook_id.encode(), hashlib.sha256).digest()).decode()}"


def signing_secret(given: str | None, home: Path) -> bytes:
    """The control plane's own secret: the setting's, or that of a file which only its user can read."""
    if given is not None:
        return given.strip().encode()
    file = home / "webhook.key"
    with contextlib.suppress(FileExistsError):  # another process was first, whose key then counts
        made = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        os.write(made, secrets.token_urlsafe(32).encode())
        os.close(made)
    for _ in range(TRIES):
        if key := file.read_bytes():
            return key
        time.sleep(0.01)  # the other process is about to write it
    raise Misconfigured(f"{file} is empty; delete it, and webhooks get new secrets.")
