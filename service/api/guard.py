"""Keeps web pages out: a request must name this server as its host, come from no other site, and say what it sends.

A page that a user has open can send requests to a server on the same machine. Three checks stop it:

- The Host must be a name of this server. A page whose own name was made to lead here (DNS rebinding) sends its own.
- A request that changes something must not come from another site. Browsers tell in Sec-Fetch-Site, older ones in
  Origin; the rule is the one of Go's `net/http.CrossOriginProtection`.
- Its body must be said to be JSON or YAML, which a form cannot say.

What a proxy on the same machine hands on looks local, whoever sent it. Where the server asks for no API keys, requests
with a proxy's headers are therefore refused.

Programs such as curl send neither Origin nor Sec-Fetch-Site, so they only have to say what they send.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.bodies import OCTETS, TYPES, UPLOADS
from service.api.problems import answer
from service.errors import DynotuneError, ForeignHost, ForeignOrigin, Unauthorized, UnsupportedType

CHANGES_NOTHING = ("GET", "HEAD", "OPTIONS")
# Headers that proxies add; and paths that tell nothing but whether the service lives, which proxies ask for themselves.
FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via")
HEALTH = ("/healthz", "/readyz")
FROM_HERE = ("same-origin", "none")  # values of Sec-Fetch-Site; `none` is a user's own click or address bar


class Guard:
    """Refuses what another site's page sends, as the ASGI middleware that stands before all others.

    `served_on` is the host that the server listens on, `allowed` further names that it answers to. Where it does not
    ask for keys, what a proxy marks as handed on is refused too, as it may come from anybody.
    """

    def __init__(self, app: ASGIApp, served_on: str, allowed: Iterable[str], asks_for_keys: bool) -> None:
        self._app, self._asks_for_keys = app, asks_for_keys
        self._beyond_loopback = not is_loopback(served_on)
        names = {served_on, *allowed}
        if self._beyond_loopback:
            names.add(socket.gethostname())
        self._names = {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer with the reason why not (the ASGI interface)."""
        if scope["type"] == "http" and (error := self._refused(scope)):
            await answer(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refused(self, scope: Scope) -> DynotuneError | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            return ForeignHost(
                f"This server is not known as {', '.join(hosts)[:200]!r}; if it should be, "
                "name the host in DYNOTUNE_ALLOWED_HOSTS on the server."
            )
        name = next((one for one in FORWARDED if one in headers), None)
        if name and not self._asks_for_keys and scope["path"] not in HEALTH:
            return Unauthorized(
                f"A proxy sent this request ({name}), and this server asks for no API keys, so whoever reaches the "
                "proxy could do everything; set DYNOTUNE_REQUIRE_KEYS=yes on the server."
            )
        if scope["method"] in CHANGES_NOTHING:
            return None
        if _is_of_another_site(headers, hosts[0]):
            return ForeignOrigin("Another site's page sent this request, and such requests may not change anything.")
        kinds = headers.getlist("content-type")
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        is_upload = scope["path"] == UPLOADS
        read = kinds == [OCTETS] if is_upload else _is_read(kinds)
        if (kinds or has_body) and not read:
            wanted = OCTETS if is_upload else "application/json or application/yaml"
            given = ", ".join(kinds)[:200] or "missing"
            return UnsupportedType(f"The body's Content-Type is {given}; it must be {wanted}.")
        return None

    def _is_ours(self, host: str) -> bool:
        """Whether a Host header names this server. An address cannot be rebound, so any will do beyond loopback."""
        try:
            parts = urlsplit(f"//{host}")
            name, _port = parts.hostname or "", parts.port
        except ValueError:
            return False
        if parts.netloc != host or "@" in host:
            return False
        return name in self._names or is_loopback(name) or (self._beyond_loopback and _is_address(name))


def _is_of_another_site(headers: Headers, host: str) -> bool:
    """Whether a browser says that the request comes from a page of another origin."""
    if sites := headers.getlist("sec-fetch-site"):
        return any(site not in FROM_HERE for site in sites)
    return any(origin.partition("://")[2].lower() != host.lower() for origin in headers.getlist("origin"))


def _is_read(kinds: list[str]) -> bool:
    return len(kinds) == 1 and kinds[0].partition(";")[0].strip().lower() in TYPES


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(name: str) -> bool:
    """Whether a name or an address always leads to the machine itself (RFC 6761, section 6.3, for the names)."""
    if _is_address(name):
        return ipaddress.ip_address(name).is_loopback
    return name == "localhost" or name.endswith(".localhost")
