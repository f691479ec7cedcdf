"""Messages to webhooks, written in the transaction of what they tell; `service/webhooks.py` sends them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import String, bindparam, or_, select
from sqlalchemy.orm import Session

from service.contract.states import JobStatus
from service.enqueue import new_id
from service.models import Delivery, Webhook
from service.tuples import JobRow

# The webhooks that are told of an owner's jobs. Their rows are locked, so that none is deleted or disabled before its
# message is there, and in the order of their ids, as whoever disables them does, so that neither waits for the other.
TOLD = (
    select(Webhook.id)
    .where(or_(Webhook.sees.is_(None), Webhook.sees == bindparam("owner", type_=String)), Webhook.disabled_at.is_(None))
    .order_by(Webhook.id)
    .with_for_update(read=True)
)


def announce(session: Session, job: JobRow, status: JobStatus, error: str | None, now: float) -> None:
    """Write a message for every webhook whose owner sees the job: it has ended in that status, with that error."""
    wanted = session.scalars(TOLD, {"owner": job.owner}).all()
    if not wanted:
        return
    labels = job.spec.get("labels") or {}
    data = {"id": job.id, "name": job.name, "status": status, "error": error, "labels": labels}
    session.add_all(message(webhook_id, f"job.{status}", data, now) for webhook_id in wanted)


def message(webhook_id: str, kind: str, data: dict[str, Any], now: float) -> Delivery:
    """A message that is to be sent at once, with the three fields of a Standard Webhooks body."""
    body = {"type": kind, "timestamp": datetime.fromtimestamp(now, UTC).isoformat(), "data": data}
    return Delivery(
        webhook_id=webhook_id, message_id=new_id(), body=json.dumps(body), attempts=0, due_at=now, created_at=now
    )
