"""Events of a job: appending one, and reading those after a given one."""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from service.contract.views import EventView
from service.models import Event


def append(session: Session, job_id: str, kind: str, at: float, **data: Any) -> None:
    """Add an event of a job, as part of the session's transaction."""
    session.add(Event(job_id=job_id, kind=kind, at=at, data=data))


def tail(session: Session, job_id: str, after: int = 0, limit: int = 200) -> tuple[EventView, ...]:
    """Up to `limit` events of the job after the sequence number `after`, oldest first."""
    rows = session.scalars(
        select(Event).where(Event.job_id == job_id, Event.seq > after).order_by(Event.seq).limit(limit)
    )
    return tuple(EventView.of(row) for row in rows)


def last(session: Session, job_id: str) -> int:
    """The sequence number of the job's last event."""
    return session.scalar(select(func.max(Event.seq)).where(Event.job_id == job_id)) or 0
