"""The errors of the service. Errors for users have an HTTP status, a stable code and a problem+json form (RFC 9457)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from service.text import counted, storable

if TYPE_CHECKING:  # every command imports this module, and most commands do not need pydantic, which is slow to import
    from pydantic import ValidationError

    from service.contract.views import Problem

FAILED, USAGE, UNREACHABLE = 1, 2, 3  # exit codes of all commands, the worker's among them


class DynotuneError(Exception):
    """The base of errors that are shown to users. `pointers` name places in the request's body (RFC 6901)."""

    status = 500
    code = "internal"
    title = "Something went wrong in the service"

    def __init__(self, detail: str, pointers: list[dict[str, str]] | None = None) -> None:
        self.detail = storable(detail)
        super().__init__(self.detail)
        self.pointers = [{key: storable(value) for key, value in one.items()} for one in pointers or []]

    def problem(self) -> dict[str, Any]:
        """The error as the body of an application/problem+json answer."""
        body: dict[str, Any] = {
            "type": f"urn:dynotune:{self.code}",
            "title": self.title,
            "status": self.status,
            "code": self.code,
            "detail": self.detail,
        }
        if self.pointers:
            body["errors"] = self.pointers
        return body


class InvalidJob(DynotuneError):
    """The job cannot be run as written."""

    status, code, title = 422, "invalid-job", "The job has a mistake"


class MalformedBody(DynotuneError):
    """The body is not JSON or YAML."""

    status, code, title = 400, "malformed-body", "The body cannot be read"


class BodyTooLarge(DynotuneError):
    """The body is larger than any job is."""

    status, code, title = 413, "body-too-large", "The body is too large"


class NotFound(DynotuneError):
    """No such job, trial or page."""

    status, code, title = 404, "not-found", "Not found"


class NotYet(DynotuneError):
    """What was asked for does not exist yet, or will never exist for this job."""

    status, code, title = 409, "not-yet", "Not there yet"


class BadQuery(DynotuneError):
    """A query parameter is wrong."""

    status, code, title = 422, "bad-query", "A query parameter is wrong"


class Unavailable(DynotuneError):
    """The database does not answer, or its schema is not ready."""

    status, code, title = 503, "unavailable", "The service is not ready"


class Misconfigured(DynotuneError):
    """A setting of this process, or a file it was told to use, cannot be used."""

    code, title = "misconfigured", "A setting cannot be used"


class NotAllowed(DynotuneError):
    """The HTTP method is not allowed on this resource."""

    status, code, title = 405, "not-allowed", "Not allowed"


class SlowBody(DynotuneError):
    """The body comes too slowly."""

    status, code, title = 408, "slow-body", "The body comes too slowly"


class ForeignHost(DynotuneError):
    """The request names a host that this server is not."""

    status, code, title = 421, "foreign-host", "This server is not that host"


class ForeignOrigin(DynotuneError):
    """A page of another site asks for a change."""

    status, code, title = 403, "foreign-origin", "Not from another site"


class Unauthorized(DynotuneError):
    """The request carries no API key, or one that is not valid."""

    status, code, title = 401, "unauthorized", "An API key is needed"


class Forbidden(DynotuneError):
    """The API key may not do this."""

    status, code, title = 403, "forbidden", "The API key may not do this"


class KeyReused(DynotuneError):
    """An Idempotency-Key came with another body before."""

    status, code, title = 422, "idempotency-key-reused", "The Idempotency-Key belongs to another submission"


class TooMany(DynotuneError):
    """The caller has too many open jobs, or asks too often. `seconds` is when to try again."""

    status, code, title = 429, "too-many", "Too many"

    def __init__(self, detail: str, seconds: float = 60.0) -> None:
        super().__init__(detail)
        self.seconds = seconds


class BadUpload(DynotuneError):
    """Data that was sent cannot be kept: it is empty, too large, damaged, or of no kind that is read."""

    status, code, title = 422, "bad-upload", "The data cannot be kept"


class BadWebhook(DynotuneError):
    """A webhook's URL cannot be sent to: it is none, its host is not known, or is in a private network."""

    status, code, title = 422, "bad-webhook", "The webhook cannot be used"


class UnsupportedType(DynotuneError):
    """The body is not said to be JSON or YAML."""

    status, code, title = 415, "unsupported-media-type", "The body must be JSON or YAML"


class LeaseLost(DynotuneError):
    """A worker has lost the lease of the task that it writes about, so its write is refused."""

    status, code, title = 409, "lease-lost", "The lease is lost"


class Drained(DynotuneError):
    """A worker was told to end once it has no task: it gets no further ones."""

    status, code, title = 410, "drained", "The worker is to end"


OTHER_VERSION = "Another version of dynotune wrote this job, and this one cannot read it; submit it again."


class OtherVersion(DynotuneError):
    """A worker is of another version than the control plane or the database: it waits until both are of one."""

    status, code, title = 426, "other-version", "The versions differ"


class NotOurs(OtherVersion):
    """A worker on the database cannot read a job of another version: it leaves the job to others."""


class Refusal(DynotuneError):
    """A control plane refused what a worker said, and would do so again."""

    status, code, title = 422, "refused", "The control plane refused"


class BrokerUnavailable(Exception):
    """The queue does not answer at the moment; the same call of a worker may succeed later."""


class Unreachable(Exception):
    """A client's control plane does not answer."""


class Refused(Exception):
    """The control plane answered a client with a problem; `problem` is its body, `code` its stable name."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem
        self.code = problem.code


def pointer(location: tuple[Any, ...]) -> str:
    """The JSON pointer (RFC 6901) of a location as pydantic reports it."""
    return "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in location)


EXPECTED = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "a mapping"),
    **dict.fromkeys(("tuple_type", "list_type"), "a list"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "finite_number": "a finite number",
    "string_type": "text",
}
MOST_MISTAKES = 20  # that an answer tells
# For a union, pydantic adds the branch that it tried to an error's location. Its parts begin with, or are:
UNION_NOISE = ("literal[", "dict[", "tuple[")
JSON_NOISE = ("float", "dict", "list", "str", "[key]")


def sentences(error: ValidationError) -> list[dict[str, str]]:
    """One sentence, with its pointer, for each place with a mistake; of several complaints about a place, the first."""
    found: dict[str, dict[str, str]] = {}
    for item in error.errors():
        place = tuple(part for part in item["loc"] if not str(part).startswith(UNION_NOISE) and part not in JSON_NOISE)
        if place == ("baseline",) and item["type"] == "literal_error":
            continue  # the complaint about the union's other branch, a mapping, says what is wrong inside it
        name = f"{'.'.join(str(part) for part in place):.200}" or "the job"
        found.setdefault(name, {"pointer": pointer(place), "detail": _sentence(name, dict(item))})
    return list(found.values())


def _sentence(name: str, item: dict[str, Any]) -> str:
    context, kind, given = item.get("ctx", {}), item["type"], f"{item['input']!r:.80}"
    if kind == "missing":
        return f"{name} is missing."
    if kind == "extra_forbidden":
        return f"{name} is not a known field."
    if kind == "literal_error":
        return f"{name} must be {context['expected']}, not {given}."
    if kind == "value_error":
        return f"{name}: {context['error']}."
    if kind in EXPECTED:
        key = "a key " if item["loc"][-1] == "[key]" else ""
        return f"{name}: {key}must be {EXPECTED[kind]}, not {given}."
    text = item["msg"][0].lower() + item["msg"][1:]
    return f"{name}: {text.replace('input should', 'should')}, not {given}."


def invalid_job(error: ValidationError) -> InvalidJob:
    """The error that tells a user all mistakes of a job."""
    mistakes = sentences(error)
    told = mistakes[:MOST_MISTAKES]
    more = len(mistakes) - len(told)
    last = [f"There {'is' if more == 1 else 'are'} {counted(more, 'more mistake', 'more mistakes')}."] if more else []
    return InvalidJob(" ".join([mistake["detail"] for mistake in told] + last), told)
