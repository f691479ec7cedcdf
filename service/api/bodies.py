"""Bodies of requests and answers: types, description, limits of size and time, and HEAD answered without a body."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.problems import answer
from service.contract.base import Contract
from service.contract.internal import PATH
from service.errors import BodyTooLarge, SlowBody

TYPES = ("application/json", "application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")  # of a request
OCTETS = "application/octet-stream"  # of a dataset that is sent
UPLOADS = "/v1/datasets"  # where datasets are sent to: the route limits their size
BODY_SECONDS = 30.0  # in which a request's body must arrive


def body_of(model: type[Contract], example: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI entry of a body that a route reads by itself, as JSON or YAML.

    The models that it refers to must be among the document's schemas already, through an answer that holds them.
    """
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    content = {TYPES[0]: {"schema": schema, "example": example}, TYPES[1]: {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


class _Answered(Exception):
    """The head of an answer has been sent, and nothing else was asked for."""


class HeadAsGet:
    """Answers HEAD as GET without the body (RFC 9110, section 9.3.2)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on (the ASGI interface)."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def headed(message: Message) -> None:
            if message["type"] == "http.response.body":
                await send({"type": "http.response.body", "body": b""})
                raise _Answered
            await send(message)

        try:
            await self._app({**scope, "method": "GET"}, receive, headed)
        except* _Answered:  # a stream would otherwise go on
            pass


class LimitBody:
    """Refuses a body over the limit before it is in memory, also when its length is not announced; and a slow one.

    Workers send results, which may be larger than what users send.
    """

    def __init__(self, app: ASGIApp, limit: int, of_workers: int) -> None:
        self._app, self._limit, self._of_workers = app, limit, of_workers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, counting the bytes of its body (the ASGI interface)."""
        if scope["type"] != "http" or scope["path"] == UPLOADS:
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        limit = self._of_workers if scope["path"].startswith(PATH) else self._limit
        error = BodyTooLarge(f"The body is larger than {limit} bytes; a job is a few kilobytes.")
        if announced.isdigit() and int(announced) > limit:
            await answer(error)(scope, receive, send)
            return
        size, complete = 0, False
        until = asyncio.get_running_loop().time() + BODY_SECONDS

        async def counted() -> Message:
            nonlocal size, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError:
                raise SlowBody(f"The body was not there within {BODY_SECONDS:.0f} s.") from None
            complete = not message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > limit:
                raise error
            return message

        await self._app(scope, counted, send)
