"""Refuses query parameters that a route does not have, and those given twice: ignoring them would hide a mistake."""

from __future__ import annotations

from fastapi import Request
from fastapi.routing import APIRoute

from service.errors import BadQuery


async def known_parameters(request: Request) -> None:
    """Raise BadQuery when the request has a query parameter that its route does not know, or has one twice."""
    route = request.scope.get("route")
    if not isinstance(route, APIRoute):
        return
    names = [one.alias for one in route.dependant.query_params]
    given = [name for name, _ in request.query_params.multi_items()]
    for name in given:
        if name not in names:
            known = f"there are: {', '.join(names)}" if names else "it takes none"
            raise BadQuery(f"{request.url.path} has no query parameter {name[:80]!r}; {known}.")
        if given.count(name) > 1:
            raise BadQuery(f"The query parameter {name} is there {given.count(name)} times; give it once.")
