"""Webhooks as the API takes and answers them."""

from __future__ import annotations

from pydantic import Field

from service.contract.job import Asked
from service.contract.views import View

URL = "https://ci.example.com/hooks/dynotune"


class WebhookRequest(Asked):
    """A URL that is to be told when jobs end."""

    url: str = Field(min_length=1, max_length=2000, examples=[URL])


class WebhookView(View):
    """A webhook, and how its messages fare. Times are seconds since 1970 (UTC)."""

    id: str
    url: str = Field(examples=[URL])
    owner: str | None = Field(
        description="Owner of the API key that created the webhook. Its messages are about this owner's jobs; a "
        "webhook of an admin, or of a server without keys, is told of all jobs."
    )
    created_at: float
    disabled_at: float | None = Field(
        description="When its receiver answered 410, or its owner's keys were revoked, which ends all messages."
    )
    waiting: int = Field(description="Messages that are still to be delivered.")
    last_tried_at: float | None
    last_error: str | None = Field(
        description="Why the last attempt failed; null where it was delivered, or none was made."
    )


class WebhookMade(View):
    """A webhook that was made. The secret, by which its receiver checks signatures, is not shown again."""

    id: str
    secret: str = Field(examples=["whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"])


class WebhookList(View):
    """Webhooks, the oldest first."""

    items: list[WebhookView]
