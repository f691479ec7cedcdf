"""Hostile requests, and the answer that each gets: (what it is, Content-Type, body, status, code), and so on."""

from __future__ import annotations

J, Y, OCTETS = "application/json", "application/yaml", "application/octet-stream"
JOB = '{"name": "t", "model": {"source": "model", "weights": "random"}, "dataset": {"source": "data.jsonl"}}'
MALFORMED, INVALID = (400, "malformed-body"), (422, "invalid-job")
Body = tuple[str, str, str | bytes, tuple[int, str]]
Asked = tuple[str, str, dict[str, str], str | bytes | None, tuple[int, str]]


def plus(more: str) -> str:
    """The job with another section."""
    return f"{JOB[:-1]}, {more}}}"


def named(name: str) -> str:
    """The job with another name, as JSON writes it."""
    return JOB.replace('"t"', name)


def of(source: str) -> str:
    """The job with other data."""
    return JOB.replace("data.jsonl", source)


BODIES: list[Body] = [
    ("nothing", J, "", MALFORMED),
    ("null", J, "null", MALFORMED),
    ("a list", J, "[]", MALFORMED),
    ("a number", J, "5", MALFORMED),
    ("a text", J, '"job"', MALFORMED),
    ("half an object", J, "{", MALFORMED),
    ("a key twice", J, '{"name": "a", "name": "b"}', MALFORMED),
    ("a key twice, YAML", Y, "name: a\nname: b", MALFORMED),
    ("1,000 lists in each other", J, "[" * 1000, MALFORMED),
    ("1,000 lists in each other, YAML", Y, "[" * 1000, MALFORMED),
    ("200 lists in each other, closed", J, '{"name": ' + "[" * 200 + "]" * 200 + "}", INVALID),
    ("no number", J, plus('"training": {"epochs": NaN}'), MALFORMED),
    ("an infinite number", J, plus('"hardware": {"memory_gib": Infinity}'), MALFORMED),
    ("a number that overflows", J, plus('"hardware": {"memory_gib": 1e999}'), INVALID),
    ("5,000 digits", J, plus('"training": {"seed": ' + "9" * 5000 + "}"), MALFORMED),
    ("5,000 hexadecimal digits", Y, "name: 0x" + "f" * 5000, INVALID),
    ("base 60", Y, "name: " + "1:" * 5000 + "1", INVALID),
    ("not UTF-8", J, b"\xff\xfe{}", MALFORMED),
    ("UTF-16", J, '{"name": "a"}'.encode("utf-16"), MALFORMED),
    ("Latin-1", Y, b"name: caf\xe9", MALFORMED),
    ("NUL", J, plus('"labels": {"a": "\\u0000"}'), INVALID),
    ("half a character", J, plus('"labels": {"a": "\\ud800"}'), INVALID),
    ("a control character", Y, b"name: a\x07b", MALFORMED),
    ("aliases that grow", Y, "a: &a [x, x]\nb: &b [*a, *a]\nname: [*b, *b]", MALFORMED),
    ("an alias to itself", Y, "a: &a [*a]", MALFORMED),
    ("an unknown alias", Y, "name: *nobody", MALFORMED),
    ("a merge key", Y, "a: &a {name: b}\n<<: *a", MALFORMED),
    ("a Python object", Y, "name: !!python/object/apply:os.system ['true']", MALFORMED),
    ("an unknown tag", Y, "name: !secret x", MALFORMED),
    ("bytes", Y, "name: !!binary aGk=", MALFORMED),
    ("a set", Y, "name: !!set {a, b}", MALFORMED),
    ("two documents", Y, "name: a\n---\nname: b", MALFORMED),
    ("tabs", Y, "model:\n\tsource: m", MALFORMED),
    ("a list as a key", Y, "? [a, b]\n: c", MALFORMED),
    ("a mapping as a key", Y, "{{a: b}: c}", MALFORMED),
    ("only a comment", Y, "# name: a", MALFORMED),
    ("an unclosed text", Y, 'name: "a', MALFORMED),
    ("a directive", Y, "%YAML 9.9\n---\nname: a", MALFORMED),
    ("10,000 unknown keys", J, "{" + ",".join(f'"k{n}": 1' for n in range(10_000)) + "}", MALFORMED),
    ("100,000 elements", Y, "a: [" + "1," * 100_000 + "]", MALFORMED),
    ("10,000 labels", J, plus('"labels": {' + ",".join(f'"k{n}": "v"' for n in range(10_000)) + "}"), MALFORMED),
    ("over a megabyte", J, '"' + "a" * (1 << 20) + '"', (413, "body-too-large")),
    ("a name of 100,000 characters", J, named('"' + "n" * 100_000 + '"'), INVALID),
    ("a name that clears the screen", J, named('"\\u001b[2J\\u001b[H"'), INVALID),
    ("a name of two lines", J, named('"a\\nb"'), INVALID),
    ("a name from right to left", J, named('"\\u202egnp.exe"'), INVALID),
    ("a path out of the folders", J, of("../../../../etc/passwd"), INVALID),
    ("an absolute path", J, of("/etc/passwd"), INVALID),
    ("a device", J, of("/dev/zero"), INVALID),
    ("a key of the user", J, of("~/.ssh/id_rsa"), INVALID),
    ("a path with NUL", J, of("data.jsonl\\u0000.txt"), INVALID),
    ("a URL", J, of("http://169.254.169.254/latest"), INVALID),
    ("a file URL", J, of("file:///etc/passwd"), INVALID),
    ("an upload that is none", J, of("upload:../../etc/passwd"), INVALID),
    ("an upload that is not there", J, of("upload:" + "0" * 64 + ".jsonl"), INVALID),
    ("a wrong regular expression", J, plus('"lora": {"target_modules": "(("}'), INVALID),
    ("one that takes minutes", J, plus('"lora": {"target_modules": "(?i)' + "[a-\\uffff]" * 20_000 + '"}'), INVALID),
    ("an adapter of 10^12", J, plus('"lora": {"r": 1000000000000}'), INVALID),
    ("no epochs", J, plus('"training": {"epochs": 0}'), INVALID),
    ("a negative rate", J, plus('"training": {"learning_rate": -1}'), INVALID),
    ("a batch of 10^18", J, plus('"training": {"effective_batch_size": 1000000000000000000}'), INVALID),
    ("true for a number", J, plus('"training": {"effective_batch_size": true}'), INVALID),
    ("a text for a number", J, plus('"search": {"minutes": "1; DROP TABLE jobs"}'), INVALID),
    ("10^9 trials", J, plus('"search": {"trials": 1000000000}'), INVALID),
    ("no minutes", J, plus('"search": {"minutes": 0}'), INVALID),
    ("a lever of Python's", J, plus('"search": {"fixed": {"__class__": "x"}}'), INVALID),
    ("a priority of 10^30", J, plus('"priority": 1000000000000000000000000000000'), INVALID),
    ("a price below nothing", J, plus('"hardware": {"price_per_hour": -1}'), INVALID),
]
SUBMIT, LIST, WEBHOOK = "POST /v1/jobs", "GET /v1/jobs", "POST /v1/webhooks"
SENT = "POST /v1/datasets?name="
QUERY, MISSING, HOOK, DATA = (422, "bad-query"), (404, "not-found"), (422, "bad-webhook"), (422, "bad-upload")
TYPE, ORIGIN, HOST = (415, "unsupported-media-type"), (403, "foreign-origin"), (421, "foreign-host")
METHOD, KEY = (405, "not-allowed"), (401, "unauthorized")
REQUESTS: list[Asked] = [
    ("plain text", SUBMIT, {"content-type": "text/plain"}, JOB, TYPE),
    ("no type", SUBMIT, {"content-type": ""}, JOB, TYPE),
    ("a form", SUBMIT, {"content-type": "application/x-www-form-urlencoded"}, "name=a", TYPE),
    ("a form with files", SUBMIT, {"content-type": "multipart/form-data; boundary=x"}, JOB, TYPE),
    ("from another site", SUBMIT, {"content-type": J, "origin": "http://evil.example"}, JOB, ORIGIN),
    ("from a file", SUBMIT, {"content-type": J, "origin": "null"}, JOB, ORIGIN),
    ("across sites", SUBMIT, {"content-type": J, "sec-fetch-site": "cross-site"}, JOB, ORIGIN),
    ("for another host", SUBMIT, {"content-type": J, "host": "evil.example"}, JOB, HOST),
    ("reading by another name", LIST, {"host": "evil.example"}, None, HOST),
    ("a name like ours", "GET /healthz", {"host": "127.0.0.1.evil.example"}, None, HOST),
    ("a long idempotency key", SUBMIT, {"content-type": J, "idempotency-key": "k" * 201}, JOB, QUERY),
    ("a blank in it", SUBMIT, {"content-type": J, "idempotency-key": "a b"}, JOB, QUERY),
    ("an unknown key", LIST, {"authorization": "Bearer dyno_00000000_" + "x" * 43}, None, KEY),
    ("SQL for a key", LIST, {"authorization": "Bearer ' OR 1=1 --"}, None, KEY),
    ("no jobs", f"{LIST}?limit=0", {}, None, QUERY),
    ("10^9 jobs", f"{LIST}?limit=1000000000", {}, None, QUERY),
    ("many jobs", f"{LIST}?limit=many", {}, None, QUERY),
    ("5,000 digits", f"{LIST}?limit={'9' * 5000}", {}, None, QUERY),
    ("a page before the first", f"{LIST}?cursor=-1", {}, None, QUERY),
    ("a page after the last", f"{LIST}?cursor=99999999999999999999", {}, None, QUERY),
    ("SQL for a page", f"{LIST}?cursor=1%20OR%201=1", {}, None, QUERY),
    ("an unknown status", f"{LIST}?status=gone", {}, None, QUERY),
    ("NUL for a status", f"{LIST}?status=%00", {}, None, QUERY),
    ("half a label", f"{LIST}?label=team", {}, None, QUERY),
    ("NUL in a label", f"{LIST}?label=a%00b=c", {}, None, QUERY),
    ("NUL in a name", f"{LIST}?name=a%00", {}, None, QUERY),
    ("a long name", f"{LIST}?name={'n' * 201}", {}, None, QUERY),
    ("no time", f"{LIST}?created_after=nan", {}, None, QUERY),
    ("a time that overflows", f"{LIST}?created_after=1e999", {}, None, QUERY),
    ("an unknown parameter", f"{LIST}?dry_run=1", {}, None, QUERY),
    ("one for a submission", f"{SUBMIT}?dry_run=1", {"content-type": J}, JOB, QUERY),
    ("a parameter twice", f"{LIST}?limit=1&limit=2", {}, None, QUERY),
    ("a path upwards", "GET /v1/jobs/../../etc/passwd", {}, None, MISSING),
    ("the same, quoted", "GET /v1/jobs/%2e%2e%2f%2e%2e", {}, None, MISSING),
    ("NUL for an id", "GET /v1/jobs/%00", {}, None, MISSING),
    ("an emoji for an id", "GET /v1/jobs/%F0%9F%92%A9", {}, None, MISSING),
    ("half a character for an id", "GET /v1/jobs/%ff", {}, None, MISSING),
    ("5,000 characters for an id", f"GET /v1/jobs/{'a' * 5000}", {}, None, MISSING),
    ("waiting backwards", "GET /v1/jobs/none?wait=-1", {}, None, QUERY),
    ("waiting for ever", "GET /v1/jobs/none?wait=1e9", {}, None, QUERY),
    ("since a word", "GET /v1/jobs/none?since=first", {}, None, QUERY),
    ("a file for an export", "GET /v1/jobs/none/exports/..%2f..%2fetc%2fpasswd", {}, None, MISSING),
    ("an export of no job", "GET /v1/jobs/none/exports/train.py", {}, None, MISSING),
    ("trials of no job", "GET /v1/jobs/none/trials", {}, None, MISSING),
    ("the recommendation of no job", "GET /v1/jobs/none/recommendation", {}, None, MISSING),
    ("SQL for an event", "GET /v1/jobs/none/events/stream", {"last-event-id": "'; --"}, None, MISSING),
    ("deleting all", "DELETE /v1/jobs", {}, None, METHOD),
    ("deleting nothing", "DELETE /v1/jobs/none", {}, None, MISSING),
    ("putting", "PUT /v1/jobs/none", {"content-type": J}, "{}", METHOD),
    ("patching", "PATCH /v1/jobs/none", {"content-type": J}, "{}", METHOD),
    ("tracing", "TRACE /v1/jobs", {}, None, METHOD),
    ("asking for leave", "OPTIONS /v1/jobs", {"origin": "http://evil.example"}, None, METHOD),
    ("cancelling from another site", "POST /v1/jobs/none/cancel", {"origin": "http://evil.example"}, None, ORIGIN),
    ("stopping nothing", "POST /v1/jobs/none/stop", {}, None, MISSING),
    ("cloning nothing", "POST /v1/jobs/none/clone", {"content-type": J}, "{}", MISSING),
    ("looking at nothing", "POST /v1/jobs:validate", {"content-type": J}, "{}", INVALID),
    ("estimating nothing", "POST /v1/estimates", {"content-type": J}, "{}", INVALID),
    ("in no memory", "POST /v1/estimates", {"content-type": J}, f'{{"spec": {JOB}, "memory_gib": 0}}', INVALID),
    ("in all memory", "POST /v1/estimates", {"content-type": J}, f'{{"spec": {JOB}, "memory_gib": 1e999}}', INVALID),
    ("no estimate", "GET /v1/estimates/none", {}, None, MISSING),
    ("draining nobody", "POST /v1/workers/none/drain", {}, None, MISSING),
    ("no data", f"{SENT}a.jsonl", {"content-type": OCTETS}, "", DATA),
    ("a path for data", f"{SENT}../../a.sh", {"content-type": OCTETS}, "x", DATA),
    ("a pickle", f"{SENT}a.pkl", {"content-type": OCTETS}, "x", DATA),
    ("no digest", f"{SENT}a.jsonl&sha256=zz", {"content-type": OCTETS}, "x", QUERY),
    ("another digest", f"{SENT}a.jsonl&sha256={'0' * 64}", {"content-type": OCTETS}, "{}", DATA),
    ("a cloud's secrets", WEBHOOK, {"content-type": J}, '{"url": "http://169.254.169.254/"}', HOOK),
    ("gopher", WEBHOOK, {"content-type": J}, '{"url": "gopher://example.com"}', HOOK),
    ("half an address", WEBHOOK, {"content-type": J}, '{"url": "http://[::1"}', HOOK),
    ("a header in a URL", WEBHOOK, {"content-type": J}, '{"url": "http://localhost\\r\\nX: y/"}', HOOK),
    ("a webhook upwards", "DELETE /v1/webhooks/..%2f", {}, None, MISSING),
    ("a claim", "POST /internal/v1/claims", {"content-type": J}, "{}", MISSING),
    ("nowhere", "GET /nowhere", {}, None, MISSING),
    ("a parameter for figures", "GET /metrics?x=1", {}, None, QUERY),
]
