"""/v1/datasets: send a dataset's file to the control plane."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from service import uploads
from service.api.access import SUBMITS
from service.api.bodies import OCTETS
from service.api.context import InContext
from service.api.problems import responses
from service.contract.paths import UPLOAD
from service.contract.views import Upload
from service.errors import BadUpload, Unavailable

router = APIRouter(prefix="/v1/datasets", tags=["datasets"])
BODY = {"required": True, "content": {OCTETS: {"schema": {"type": "string", "format": "binary"}}}}


@router.post(
    "",
    status_code=201,
    openapi_extra={"requestBody": BODY},
    responses=responses(BadUpload, Unavailable),
    dependencies=SUBMITS,
    summary="Send a dataset",
)
async def upload(
    request: Request,
    here: InContext,
    name: Annotated[str, Query(max_length=200, description="The file's name, whose suffix says how it is read.")],
    sha256: Annotated[
        str | None, Query(pattern="^[0-9a-f]{64}$", description="Of the file: what arrives otherwise is refused.")
    ] = None,
) -> Upload:
    """Keep the body as a dataset, whose `source` goes into a job's `dataset.source`.

    Workers that speak HTTP fetch it by themselves; those with the database's URL read it in `uploads` of the
    DYNOTUNE_HOME, which they have to share with this server.
    """
    suffix, most = uploads.suffix_of(name), here.settings.upload_mib << 20
    reserve = here.settings.min_free_disk_bytes
    kept = await uploads.receive(here.settings.uploads, request.stream(), suffix, sha256, most, reserve)
    return Upload(source=f"{UPLOAD}{kept.name}", sha256=kept.stem, bytes=kept.stat().st_size)
