"""Workers as an Indexed Job on Kubernetes, queued by Kueue where a queue is named.

Sources: https://kubernetes.io/docs/concepts/workloads/controllers/job/ (indexes, pod failure policy),
https://kueue.sigs.k8s.io/docs/tasks/run/jobs/ (label, suspend).
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from service.cli.launchers import base

LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"  # RFC 1123, as the names of jobs and namespaces are
SUBDOMAIN = rf"{LABEL}(\.{LABEL})*"
IMAGE = r"[A-Za-z0-9][A-Za-z0-9._/:@-]*"
RESOURCE = rf"{SUBDOMAIN}/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"
QUANTITY = r"[0-9]+(\.[0-9]+)?(m|k|[KMGTP]i?)?"
MOST_LABEL = 63  # characters
MOST_NAME = MOST_LABEL - 11  # as a pod's name also has an index and a suffix
USER = 10001  # of the worker's image
HEAD = """\
# Workers of dynotune, made by `dynotune launch kubernetes`. Hand it in: kubectl create -f FILE
# {what} is read from a secret, which this makes:
#   kubectl create secret generic {secret}{namespace} --from-literal={variable}=...
"""


def launch(
    workers: base.Workers,
    image: Annotated[str, typer.Option(help="Image of the worker, which the cluster can pull.")] = "dynotune-worker",
    gpus: base.Gpus = 1,
    gpu_resource: Annotated[str, typer.Option(help="What the cluster calls a GPU.")] = "nvidia.com/gpu",
    cpus: base.Cpus = None,
    memory: base.Memory = None,
    shared_memory: Annotated[str, typer.Option(help="Size of /dev/shm, which data loaders use.")] = "8Gi",
    namespace: Annotated[str | None, typer.Option(help="Namespace; that of kubectl's context if not given.")] = None,
    queue: Annotated[str | None, typer.Option(help="Kueue's local queue, which says when workers may start.")] = None,
    server: base.Server = None,
    secret: Annotated[
        str, typer.Option(help=f"Secret with {base.DATABASE} or {base.KEY}, and HF_TOKEN if the hub is to know you.")
    ] = "dynotune",
    data_claim: Annotated[
        str | None, typer.Option(help="Volume claim with local models and data: /data/... in a job.")
    ] = None,
    cache_claim: Annotated[str | None, typer.Option(help="Volume claim for the hub's cache.")] = None,
    host_pid: Annotated[
        bool, typer.Option("--host-pid", help="See the node's processes, to tell other users of a GPU from oneself.")
    ] = False,
    time: base.Time = None,
    idle: base.Idle = 10,
    grace: Annotated[int, typer.Option(min=0, max=3600, help="Seconds between SIGTERM and the end.")] = 120,
    env: base.Env = None,
    name: base.Name = "dynotune-worker",
    output: base.Output = None,
    submit: base.Submit = False,
) -> None:
    """Write an Indexed Job for Kubernetes, a worker an index. The database's URL comes from a secret."""
    import yaml

    base.word("--name", name, LABEL, MOST_NAME, f"a name of at most {MOST_NAME} small letters, digits and -")
    base.word("--image", image, IMAGE, 500, "an image's name")
    named = {"--namespace": namespace, "--queue": queue, "--secret": secret}
    for option, value in (named | {"--data-claim": data_claim, "--cache-claim": cache_claim}).items():
        base.word(option, value, SUBDOMAIN, MOST_LABEL, "a name of at most 63 small letters, digits, - and .")
    container = {
        "name": "worker",
        "image": image,
        "command": base.worker_command(gpus, idle, grace, base.seconds_in(time, base.LEAST_WORKER_SECONDS)),
        "env": _environment(secret, base.server_url(server), base.variables(env or ()), data_claim is not None),
        "resources": {"limits": _limits(gpus, gpu_resource, cpus, memory)},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    base.word("--shared-memory", shared_memory, QUANTITY, 20, "a size such as 8Gi")
    pod = _pod(container, _mounts(shared_memory, data_claim, cache_claim), grace) | (
        {"hostPID": True} if host_pid else {}
    )
    place = f" --namespace {namespace}" if namespace else ""
    what, variable = ("The API key", base.KEY) if server else ("The database's URL", base.DATABASE)
    head = HEAD.format(what=what, secret=secret, namespace=place, variable=variable)
    text = head + yaml.safe_dump(_job(name, namespace, queue, workers, pod), sort_keys=False, width=120)
    base.deliver(text, output, ["kubectl", "create", "-f", "-"] if submit else None)


def _environment(secret: str, server: str | None, settings: dict[str, str], has_data: bool) -> list[dict[str, Any]]:
    """The container's variables: those of the secret as references to it, the others as they are."""
    roots = {"DYNOTUNE_DATA_ROOTS": "/data"} if has_data else {}
    settings = roots | settings | ({base.SERVER: server} if server else {})
    needed = {"HF_TOKEN": False} | ({base.KEY: False} if server else {base.DATABASE: True})
    return [
        *(
            {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name, "optional": not must}}}
            for name, must in needed.items()
        ),
        # Kubernetes reads $(NAME) as that variable's value, and $$ as a dollar.
        *({"name": key, "value": value.replace("$", "$$")} for key, value in settings.items()),
    ]


def _limits(gpus: int, resource: str, cpus: int | None, memory: str | None) -> dict[str, str]:
    """What a worker may use, which Kubernetes also takes for what it asks for."""
    base.word("--gpu-resource", resource, RESOURCE, 300, "a resource's name, such as nvidia.com/gpu")
    base.word("--memory", memory, QUANTITY, 20, "a size such as 64Gi")
    limits = {resource: gpus or None, "cpu": cpus, "memory": memory}
    return {name: str(value) for name, value in limits.items() if value is not None}


def _mounts(
    shared_memory: str, data_claim: str | None, cache_claim: str | None
) -> dict[str, tuple[str, dict[str, Any]]]:
    """The folders of a worker by the names of their volumes: (path, where the volume comes from)."""
    cache = {"persistentVolumeClaim": {"claimName": cache_claim}} if cache_claim else {"emptyDir": {}}
    data = {"persistentVolumeClaim": {"claimName": data_claim, "readOnly": True}}
    return {
        "shm": ("/dev/shm", {"emptyDir": {"medium": "Memory", "sizeLimit": shared_memory}}),
        "home": ("/var/lib/dynotune", {"emptyDir": {}}),
        "hub-cache": ("/var/cache/huggingface", cache),
        **({"data": ("/data", data)} if data_claim else {}),
    }


def _pod(container: dict[str, Any], mounts: dict[str, tuple[str, dict[str, Any]]], grace: int) -> dict[str, Any]:
    """A worker's pod: without privileges, without the cluster's API, and with its folders."""
    folders = [
        {"name": name, "mountPath": path, **({"readOnly": True} if name == "data" else {})}
        for name, (path, _) in mounts.items()
    ]
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container | {"volumeMounts": folders}],
        "volumes": [{"name": name, **source} for name, (_, source) in mounts.items()],
    }


def _job(name: str, namespace: str | None, queue: str | None, workers: int, pod: dict[str, Any]) -> dict[str, Any]:
    """The Job: an index whose worker ends in order is done; one that was evicted starts again, and has not failed."""
    labels = {"app.kubernetes.io/name": "dynotune", "app.kubernetes.io/component": "worker"}
    queued = {"kueue.x-k8s.io/queue-name": queue} if queue else {}
    evicted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, **({"namespace": namespace} if namespace else {}), "labels": labels | queued},
        "spec": {
            **({"suspend": True} if queue else {}),  # until Kueue admits it
            "completionMode": "Indexed",
            "completions": workers,
            "parallelism": workers,
            "backoffLimitPerIndex": 3,
            "podFailurePolicy": {"rules": [evicted]},
            "ttlSecondsAfterFinished": 3600,
            "template": {"metadata": {"labels": dict(labels)}, "spec": pod},
        },
    }


LAUNCH = launch
