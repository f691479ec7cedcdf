"""Who a request comes from: checks its API key, what the key may do, whose jobs it sees, and how often it may ask."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Annotated

from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from service import access, jobs
from service.access import ANYBODY, Caller, Scope
from service.api.context import Context, InContext, Reading
from service.contract.internal import PATH
from service.db import now, reading
from service.errors import Forbidden, Unauthorized
from service.models import Job

# No key made by `access.create` has this owner's name, so that nobody shares what the owner has.
ADMIN = Caller(id="settings", owner="(settings)", scopes=frozenset({Scope.admin}))
bearer = HTTPBearer(auto_error=False, description="An API key; `dynotune keys create` makes one.")


async def caller(
    request: Request, here: InContext, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]
) -> Caller:
    """Who asks: anybody where no keys are asked for, else the owner of the request's key. Unauthorized, TooMany.

    Requests of workers are not counted: they are the more, the more workers there are, and a worker that is refused
    loses its task.
    """
    if credentials is None:
        if here.keys_required:
            raise Unauthorized("This server wants an API key: send it as `Authorization: Bearer KEY`.")
        return ANYBODY
    found = await run_in_threadpool(_known, here, credentials.credentials, request.url.path.startswith(PATH))
    if found is None:
        raise Unauthorized("The API key is not valid: it is unknown, or it was revoked.")
    return found


Called = Annotated[Caller, Depends(caller)]


def _known(here: Context, token: str, of_a_worker: bool) -> Caller | None:
    if here.settings.admin_key and access.same(token, here.settings.admin_key.get_secret_value()):
        return ADMIN
    with reading(here.engine) as session:
        found, at = access.caller(session, token), now(session)
    if found is not None:
        if not (of_a_worker and found.may(Scope.worker)):
            here.rate_limit.count(found.id)
        if found.used_at is None or found.used_at < at - access.USED_SECONDS:
            access.used(here.engine, found.id, at)
    return found


@lru_cache
def needs(scope: Scope) -> Callable[[Caller], Awaitable[None]]:
    """A dependency that raises Forbidden unless the caller's key has the scope."""

    async def check(who: Called) -> None:
        if not who.may(scope):
            has = ", ".join(sorted(who.scopes)) or "none"
            raise Forbidden(f"This needs an API key with the scope {scope}; yours has {has}.")

    return check


READS = [Depends(needs(Scope.read))]
SUBMITS = [Depends(needs(Scope.submit))]
ADMINISTERS = [Depends(needs(Scope.admin))]
WORKS = [Depends(needs(Scope.worker))]


def visible(job_id: str, session: Reading, who: Called) -> Job:
    """The job of the path, where the caller may see it; else NotFound, as for one that is not there."""
    return jobs.get(session, job_id, who.sees)


Visible = Annotated[Job, Depends(visible)]


def exists(job_id: str, here: InContext, who: Called) -> str:
    """The id of the path's job, where the caller may see it; for long requests, as it keeps no session open."""
    with reading(here.engine) as session:
        return jobs.get(session, job_id, who.sees).id


Existing = Annotated[str, Depends(exists)]
