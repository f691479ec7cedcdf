"""/v1/webhooks: URLs that are told when jobs end."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool

from service import webhooks
from service.access import Caller
from service.api.access import READS, SUBMITS, Called
from service.api.bodies import body_of
from service.api.context import Context, InContext
from service.api.problems import responses
from service.contract.webhook import URL, WebhookList, WebhookMade, WebhookRequest
from service.errors import BadWebhook, InvalidJob, MalformedBody, NotFound
from service.validate import parse

router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"])


@router.post(
    "",
    status_code=201,
    openapi_extra=body_of(WebhookRequest, {"url": URL}),
    responses=responses(InvalidJob, MalformedBody, BadWebhook),
    dependencies=SUBMITS,
    summary="Make a webhook",
)
async def create(request: Request, here: InContext, who: Called) -> WebhookMade:
    """Have a URL told when jobs end, with messages as Standard Webhooks describes them (standardwebhooks.com)."""
    return await run_in_threadpool(_create, await request.body(), here, who)


def _create(body: bytes, here: Context, who: Caller) -> WebhookMade:
    """Check the URL and keep it. Runs in a thread, because it looks up a host and waits for the database."""
    made = here.webhooks.create(parse(body, WebhookRequest).url, who)
    return WebhookMade(id=made, secret=webhooks.secret(here.webhooks.key, made))


@router.get("", dependencies=READS, summary="List webhooks")
def listed(here: InContext, who: Called) -> WebhookList:
    """The webhooks of the caller's owner, an admin's of all, the oldest first, with what became of the last message."""
    return WebhookList(items=here.webhooks.listed(who))


@router.post(
    "/{webhook_id}/test",
    status_code=204,
    responses=responses(NotFound),
    dependencies=SUBMITS,
    summary="Send a test message",
)
def test(webhook_id: str, here: InContext, who: Called) -> None:
    """Queue a message of the type `webhook.test`, also to one that was ended by a 410 or with its owner's last key.

    Such a webhook is used again from then on, and tells of no more than the caller may see. Where messages wait after
    failures, the oldest of them is sent at once in place of the test; once one is received, the others follow.
    """
    here.webhooks.test(webhook_id, who)


@router.delete(
    "/{webhook_id}",
    status_code=204,
    responses=responses(NotFound),
    dependencies=SUBMITS,
    summary="Delete a webhook",
)
def delete(webhook_id: str, here: InContext, who: Called) -> None:
    """Delete a webhook, with the messages that wait."""
    here.webhooks.delete(webhook_id, who)
