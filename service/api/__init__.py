"""The REST API, one router a resource; `create_app` puts them together."""

from service.api.app import create_app

__all__ = ["create_app"]
