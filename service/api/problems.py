"""Every error is answered as application/problem+json (RFC 9457); request bodies that are too large are refused."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import DataError, DBAPIError, OperationalError, TimeoutError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.contract.views import Problem
from service.db import lacks_schema, unavailable
from service.errors import BadQuery, BodyTooLarge, DynotuneError, NotAllowed, NotFound, Unavailable, pointer

MEDIA = "application/problem+json"


def answer(error: DynotuneError) -> JSONResponse:
    """The HTTP answer for an error."""
    return JSONResponse(error.problem(), status_code=error.status, media_type=MEDIA)


def responses(*errors: type[DynotuneError]) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI entries of a route for the errors that it may answer with."""
    example = "One sentence: what is wrong, where, and what to do."
    return {
        error.status: {
            "description": error.title,
            "content": {MEDIA: {"schema": Problem.model_json_schema(), "example": error(example).problem()}},
        }
        for error in errors
    }


def install(app: FastAPI) -> None:
    """Register the handlers that answer every error as a problem."""

    @app.exception_handler(DynotuneError)
    async def _ours(_request: Request, error: DynotuneError) -> JSONResponse:
        return answer(error)

    @app.exception_handler(RequestValidationError)
    async def _query(_request: Request, error: RequestValidationError) -> JSONResponse:
        mistakes = [
            {"pointer": pointer(tuple(item["loc"])), "detail": f"{item['loc'][-1]}: {item['msg']}."}
            for item in error.errors()
        ]
        return answer(BadQuery(" ".join(mistake["detail"] for mistake in mistakes), mistakes))

    @app.exception_handler(HTTPException)
    async def _routing(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 405:
            return answer(NotAllowed(f"{request.method} is not allowed on {request.url.path}."))
        return answer(NotFound(f"There is nothing at {request.url.path}; the API is described at /docs."))

    @app.exception_handler(DBAPIError)
    async def _database(_request: Request, error: DBAPIError) -> JSONResponse:
        if isinstance(error, DataError):  # the body has been validated, so the value is in the path or the query
            return answer(BadQuery("The request holds a value that no database keeps, such as a NUL."))
        if isinstance(error, OperationalError) or lacks_schema(error):
            return answer(unavailable(error))
        raise error

    @app.exception_handler(TimeoutError)
    async def _busy(_request: Request, _error: TimeoutError) -> JSONResponse:
        return answer(Unavailable("All connections to the database are busy; try again in a moment."))

    @app.exception_handler(Exception)  # uvicorn logs the traceback all the same
    async def _ours_to_repair(_request: Request, _error: Exception) -> JSONResponse:
        return answer(DynotuneError("This is a mistake of the service; its log has the details."))


class LimitBody:
    """Refuses a body over the limit before it is in memory, also when the request does not announce its length."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, counting the bytes of its body (the ASGI interface)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        error = BodyTooLarge(f"The body is larger than {self._limit} bytes; a job is a few kilobytes.")
        if announced.isdigit() and int(announced) > self._limit:
            await answer(error)(scope, receive, send)
            return
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._limit:
                raise error
            return message

        await self._app(scope, counted, send)
