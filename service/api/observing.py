"""What every answer gets: a request id, security headers, a line in the log, and the time it took."""

from __future__ import annotations

import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service import logs
from service.api.problems import answer
from service.contract.internal import PATH
from service.counters import HTTP_SECONDS
from service.errors import DynotuneError

log = logs.logger("dynotune.api")
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
# Requests that come every few seconds whether anything happens or not: they are logged where they do not succeed, or at
# the level debug.
POLLS, WORKERS = (f"{PATH}/claim", f"{PATH}/renew", "/healthz", "/readyz", "/metrics"), f"{PATH}/workers/"
PAGES = ("/docs", "/redoc")  # of the API's description: pages with scripts of their own, all others are data
SHOWS_NOTHING = "default-src 'none'; frame-ancestors 'none'"
SHOWS_PAGES = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; worker-src 'self' blob:; frame-ancestors 'none'"
)


class Observed:
    """Gives each request an id, or keeps the one that it came with, and adds headers that browsers heed.

    The headers keep browsers from guessing types, from showing answers in other sites' frames, and from keeping them
    (OWASP, REST Security Cheat Sheet).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and observe its answer (the ASGI interface)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        began = time.perf_counter()
        status: int | None = None

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = request_id
                headers["X-Content-Type-Options"] = "nosniff"
                headers["X-Frame-Options"] = "DENY"
                headers["Referrer-Policy"] = "no-referrer"
                headers["Content-Security-Policy"] = SHOWS_PAGES if scope["path"].startswith(PAGES) else SHOWS_NOTHING
                headers.setdefault("Cache-Control", "no-cache" if "etag" in headers else "no-store")
            await send(message)

        with logs.bound(request_id=request_id):
            try:
                await self._app(scope, receive, observed)
            except Exception:
                log.exception("a mistake of the service")
                if status is not None:  # the answer has begun: the connection is all that can be ended
                    raise
                mistake = DynotuneError("This is a mistake of the service; its log has the details.")
                await answer(mistake)(scope, receive, observed)
            finally:
                seconds = time.perf_counter() - began
                # Paths and methods that a caller makes up would each begin a series that is kept for ever.
                route = getattr(scope.get("route"), "path", "other")
                method = scope["method"] if scope["method"] in METHODS else "other"
                HTTP_SECONDS.labels(method, route, status).observe(seconds)
                path = scope["path"].encode("unicode_escape").decode()
                told = {"method": method, "path": path, "status": status}
                is_poll = path in POLLS or (path.startswith(WORKERS) and method == "PUT")
                level = logging.DEBUG if is_poll and status is not None and status < 300 else logging.INFO
                log.log(level, "request", seconds=round(seconds, 4), **told)
