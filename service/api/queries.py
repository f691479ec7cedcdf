"""Refuses query parameters that a route does not have, and those given twice: ignoring them would hide a mistake.

NUL characters, which no database keeps, and overlong names are refused here as well, so that no route meets them.
"""

from __future__ import annotations

from fastapi import Request
from fastapi.routing import APIRoute

from service.errors import BadQuery, NotFound

MOST_CHARACTERS = 200  # of a name in a path


async def known_parameters(request: Request) -> None:
    """Raise BadQuery when the request has a query parameter that its route does not know, or has one twice.

    BadQuery as well for a parameter with a NUL character, and NotFound for a path with one or with an endless name.
    """
    route = request.scope.get("route")
    if not isinstance(route, APIRoute):
        return
    for part in map(str, request.path_params.values()):
        if "\0" in part or len(part) > MOST_CHARACTERS:
            raise NotFound(f"There is nothing of the name {part[:80]!r}{'…' * (len(part) > 80)}.")
    names = [one.alias for one in route.dependant.query_params]
    given = [name for name, _ in request.query_params.multi_items()]
    for name in given:
        if name not in names:
            known = f"there are: {', '.join(names)}" if names else "it takes none"
            raise BadQuery(f"{request.url.path} has no query parameter {name[:80]!r}; {known}.")
        if given.count(name) > 1:
            raise BadQuery(f"The query parameter {name} is there {given.count(name)} times; give it once.")
        if "\0" in request.query_params[name]:
            raise BadQuery(f"The query parameter {name} holds a NUL character, which nothing here has.")
