"""Every error is answered as application/problem+json (RFC 9457)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from sqlalchemy.exc import DataError, DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from service.contract.views import Problem
from service.db import damaged, lacks_schema, unavailable
from service.errors import (
    MOST_MISTAKES,
    BadQuery,
    BodyTooLarge,
    DynotuneError,
    Forbidden,
    ForeignHost,
    ForeignOrigin,
    MalformedBody,
    NotAllowed,
    NotFound,
    SlowBody,
    TooMany,
    Unauthorized,
    Unavailable,
    UnsupportedType,
    pointer,
)

MEDIA = "application/problem+json"
PROBLEM = {"$ref": "#/components/schemas/Problem"}
EXAMPLE = "One sentence: what is wrong, where, and what to do."
RETRY_SECONDS = 5
WITH_KEYS = (BadQuery, Unauthorized, Forbidden, TooMany)
BEFORE_A_CHANGE = (ForeignHost, ForeignOrigin, UnsupportedType, BodyTooLarge, SlowBody)


def answer(error: DynotuneError) -> JSONResponse:
    """The HTTP answer for an error, with the headers that say when to try again, or how to say who asks."""
    headers = {}
    if isinstance(error, Unavailable):
        headers["Retry-After"] = str(RETRY_SECONDS)
    elif isinstance(error, TooMany):
        headers["Retry-After"] = str(math.ceil(error.seconds))
    elif isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.problem(), status_code=error.status, media_type=MEDIA, headers=headers)


def responses(*errors: type[DynotuneError]) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI entries of a route for the errors that it may answer with: one a status, with an example an error."""
    entries: dict[int | str, dict[str, Any]] = {}
    for error in sorted(set(errors), key=lambda one: one.code):
        content: dict[str, Any] = {"schema": PROBLEM, "examples": {}}
        entry = entries.setdefault(error.status, {"description": "", "content": {MEDIA: content}})
        _add(entry, error.title, {error.code: {"value": error(EXAMPLE).problem()}})
    return entries


def _add(entry: dict[str, Any], titles: str, examples: dict[str, Any]) -> None:
    """Add errors to the entry of their status: their titles and their examples by code."""
    entry["description"] = "; ".join(filter(None, (entry["description"], titles)))
    entry["content"][MEDIA]["examples"] |= examples


def described(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """The application's own description, with the problem that `responses` refers to, and what each route may answer.

    The application looks at every request before a route does (service/api/guard.py, bodies.py).
    """
    plain = app.openapi

    @cache
    def document() -> dict[str, Any]:
        found = plain()
        found["components"]["schemas"].setdefault("Problem", Problem.model_json_schema())
        for operations in found["paths"].values():
            for method, operation in operations.items():
                errors: tuple[type[DynotuneError], ...] = (ForeignHost,) if method == "get" else BEFORE_A_CHANGE
                if "security" in operation:
                    errors += WITH_KEYS
                for status, response in responses(*errors).items():
                    entry = operation["responses"].get(str(status), {})
                    if MEDIA in entry.get("content", {}):
                        _add(entry, response["description"], response["content"][MEDIA]["examples"])
                    else:  # none yet, or the framework's own, which `install` replaces
                        operation["responses"][str(status)] = response
        return found

    return document


def install(app: FastAPI) -> None:
    """Register the handlers that answer every error as a problem."""

    @app.exception_handler(DynotuneError)
    async def _ours(_request: Request, error: DynotuneError) -> JSONResponse:
        return answer(error)

    @app.exception_handler(RequestValidationError)
    async def _query(request: Request, error: RequestValidationError) -> JSONResponse:
        mistakes = [
            {
                "pointer": pointer(tuple(item["loc"])),
                "detail": f"{item['loc'][-1]}: {item['msg']}{_meaning(request, item['loc'])}.",
            }
            for item in error.errors()[:MOST_MISTAKES]
        ]
        return answer(BadQuery(" ".join(mistake["detail"] for mistake in mistakes), mistakes))

    @app.exception_handler(HTTPException)
    async def _routing(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 405:
            refused = answer(NotAllowed(f"{request.method} is not allowed on {request.url.path}."))
            refused.headers["Allow"] = ", ".join(_allowed(request))
            return refused
        if isinstance(error.__cause__, DynotuneError):  # raised while the body was read
            return answer(error.__cause__)
        if error.status_code == 404:
            return answer(NotFound(f"There is nothing at {request.url.path}; the API is described at /docs."))
        return answer(MalformedBody(f"The request cannot be read: {error.detail}."))

    @app.exception_handler(DBAPIError)
    async def _database(_request: Request, error: DBAPIError) -> JSONResponse:
        if isinstance(error, DataError):  # the body has been validated, so the value is in the path or the query
            return answer(BadQuery("The request holds a value that no database keeps, such as a NUL."))
        if isinstance(error, OperationalError) or lacks_schema(error) or damaged(error):
            return answer(unavailable(error))
        raise error

    @app.exception_handler(PoolTimeoutError)
    async def _busy(_request: Request, _error: PoolTimeoutError) -> JSONResponse:
        return answer(Unavailable("All connections to the database are busy; try again in a moment."))

    @app.exception_handler(ClientDisconnect)
    async def _gone(_request: Request, _error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # nobody reads it


def _meaning(request: Request, location: tuple[Any, ...]) -> str:
    """What a query parameter's description says, in brackets, to stand behind a complaint about its value."""
    route = request.scope.get("route")
    if location[0] != "query" or not isinstance(route, APIRoute):
        return ""
    found = (one.field_info.description for one in route.dependant.query_params if one.alias == location[-1])
    return f" ({told})" if (told := next(found, None)) else ""


def _allowed(request: Request) -> list[str]:
    """The methods that some route has for the request's path; starlette's own Allow names those of one route only."""
    routes = request.app.routes
    found = {
        method
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes)
    }
    return sorted(found | ({"HEAD"} if "GET" in found else set()))
