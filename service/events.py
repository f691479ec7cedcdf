"""Events of a job: appending one, and reading those after a given one."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.models import Event


def append(session: Session, job_id: str, kind: str, at: float, **data: Any) -> None:
    """Add an event of a job, as part of the session's transaction."""
    session.add(Event(job_id=job_id, kind=kind, at=at, data=data))


def tail(session: Session, job_id: str, after: int = 0, limit: int = 200) -> list[dict[str, Any]]:
    """Up to `limit` events of the job after the sequence number `after`, oldest first."""
    rows = session.scalars(
        select(Event).where(Event.job_id == job_id, Event.seq > after).order_by(Event.seq).limit(limit)
    )
    return [{"seq": row.seq, "at": row.at, "kind": row.kind, "data": row.data} for row in rows]
