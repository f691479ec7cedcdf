"""docker-compose.yml against the Compose Specification's own schema; it and the Dockerfile against what we promise.

Both are read as text: there is no Docker engine where the tests run. The schema is the one that `check-jsonschema`
ships (compose-spec/compose-spec, schema/compose-spec.json, Apache-2.0).
"""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from jsonschema import Draft202012Validator

from service import db
from service.cli.app import app
from service.contract.hardware import HardwareFacts
from service.queue import Queue
from service.settings import PREFIX, Settings

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = ("service", "worker")
# What the images' other programs read: libpq, huggingface_hub, the postgres image.
FOREIGN = {"PGPASSWORD", "HF_TOKEN", "HF_HUB_OFFLINE", "HF_HOME", "POSTGRES_USER", "POSTGRES_DB", "POSTGRES_PASSWORD"}
every_service = pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)


def settings_names() -> set[str]:
    """The DYNOTUNE_* variables that service/settings.py reads."""
    return {str(field.validation_alias or f"{PREFIX}{name.upper()}") for name, field in Settings.model_fields.items()}


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Target to source of a service's mounts, `${NAME:-default}` taken as its default."""
    plain = (re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", mount) for mount in service["volumes"])
    return {target: source for source, target in (mount.split(":")[:2] for mount in plain)}


def compose_schema() -> dict[str, Any]:
    """The schema in check-jsonschema's folder, read without importing the package."""
    found = importlib.util.find_spec("check_jsonschema")
    assert found is not None and found.origin is not None, "check-jsonschema is missing: pip install 'dynotune[dev]'"
    schema: dict[str, Any] = json.loads(
        (Path(found.origin).parent / "builtin_schemas/vendor/compose-spec.json").read_text()
    )
    return schema


def test_follows_the_compose_specification() -> None:
    schema = compose_schema()
    Draft202012Validator.check_schema(schema)
    errors = list(Draft202012Validator(schema).iter_errors(COMPOSE))
    assert not errors, "\n".join(f"{error.json_path}: {error.message}" for error in errors)


def test_the_schema_would_see_a_mistake() -> None:
    broken = {"services": {"worker": {"image": "dynotune-worker", "stop_grace": "1m"}}}
    assert not Draft202012Validator(compose_schema()).is_valid(broken)


@every_service
def test_dependencies_exist_and_are_waited_for(service: dict[str, Any]) -> None:
    for name, how in service.get("depends_on", {}).items():
        assert "healthcheck" in SERVICES[name]
        assert how == {"condition": "service_healthy"}


def test_named_volumes_are_declared_and_used() -> None:
    used = {source for service in SERVICES.values() for source in mounts(service).values() if source[0] not in "./~"}
    assert used == set(COMPOSE["volumes"])


@every_service
def test_is_healthchecked_unprivileged_and_restarted(service: dict[str, Any]) -> None:
    assert service["healthcheck"]["test"][0] == "CMD"
    assert not service.get("privileged") and "cap_add" not in service and service.get("network_mode") != "host"
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "unless-stopped"
    # Ours take the user of their image: see below.
    user = str(service.get("user", "" if "build" in service else "root"))
    assert user.split(":")[0] not in ("root", "0")


@every_service
def test_healthcheck_programs_compile(service: dict[str, Any]) -> None:
    program, *arguments = service["healthcheck"]["test"][1:]
    assert program in ("python", "pg_isready")
    if program == "python":
        assert arguments[0] == "-c"
        compile(arguments[1], "healthcheck", "exec")


@every_service
def test_environment_is_read_by_somebody(service: dict[str, Any]) -> None:
    assert set(service["environment"]) <= settings_names() | FOREIGN


def test_no_secret_is_written_down() -> None:
    for service in SERVICES.values():
        for name, value in service["environment"].items():
            if re.search("PASSWORD|TOKEN", name):
                assert value is None or str(value).startswith("${")
    text = (ROOT / "docker-compose.yml").read_text()
    assert set(re.findall(r"\$\{POSTGRES_PASSWORD([^}]{2})", text)) == {":?"}, "a password must have no default"
    assert not re.search(r"://\w+:[^@/]+@", text)


def test_both_of_ours_share_database_and_data() -> None:
    environments = [SERVICES[name]["environment"] for name in OURS]
    for name in ("DYNOTUNE_DATABASE_URL", "PGPASSWORD", "DYNOTUNE_DATA_ROOTS"):
        assert environments[0][name] == environments[1][name]
    assert environments[0]["DYNOTUNE_DATABASE_URL"].startswith("postgresql+psycopg://")
    for name in OURS:
        assert "${DYNOTUNE_DATA:-./data}:/data:ro" in SERVICES[name]["volumes"]
        assert environments[0]["DYNOTUNE_DATA_ROOTS"] in mounts(SERVICES[name])


def test_postgres_is_pinned_and_keeps_its_data() -> None:
    postgres = SERVICES["postgres"]
    major = re.fullmatch(r"postgres:(\d+)", postgres["image"])
    assert major is not None
    # From 18 on the image keeps its data one folder up: the old mount would leave them in a volume without a name.
    folder = "/var/lib/postgresql" if int(major[1]) >= 18 else "/var/lib/postgresql/data"
    assert mounts(postgres) == {folder: "postgres"}
    assert "ports" not in postgres


def test_the_service_listens_on_loopback_only() -> None:
    assert SERVICES["service"]["ports"] == ["${DYNOTUNE_LISTEN:-127.0.0.1:8000}:8000"]
    assert not any("ports" in SERVICES[name] for name in SERVICES if name != "service")


def test_the_worker_has_the_gpus_and_time_to_drain() -> None:
    worker = SERVICES["worker"]
    devices = worker["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]
    assert re.fullmatch(r"\d+m", worker["stop_grace_period"])
    assert worker["pid"] == "host", "NVML's process ids would not be ours"


# The Dockerfile
Stage = list[tuple[str, str]]


def instructions() -> Stage:
    """Every instruction with its arguments, continued lines joined and comments left out."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word.upper(), rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def stages() -> dict[str, Stage]:
    """Instructions by the name of their stage; what stands before the first FROM under ''."""
    found: dict[str, Stage] = {"": []}
    for word, rest in instructions():
        if word == "FROM":
            found[rest.split()[-1]] = []
        found[list(found)[-1]].append((word, rest))
    return found


STAGES = stages()


def last(stage: str, word: str) -> str:
    """The arguments that count: those of the stage's last such instruction."""
    return [rest for name, rest in STAGES[stage] if name == word][-1]


def globals_() -> dict[str, str]:
    """The arguments a FROM may name, with their defaults."""
    return dict(rest.split("=", 1) for word, rest in STAGES[""] if word == "ARG")


def test_has_both_targets_and_makes_the_small_one_by_default() -> None:
    assert set(OURS) < set(STAGES)
    assert list(STAGES)[-1] == "service"


def test_bases_are_arguments_declared_before_the_first_from() -> None:
    for name in list(STAGES)[1:]:
        argument = re.match(r"\$\{(\w+)\}", STAGES[name][0][1])
        assert argument is not None and argument[1] in globals_()
    assert "${WORKER_BASE}" in STAGES["worker"][0][1]
    for image in globals_().values():
        tag = image.partition(":")[2]
        assert tag and tag != "latest", f"{image} is not pinned"


def test_compose_builds_the_targets_on_the_same_base() -> None:
    for name in OURS:
        assert SERVICES[name]["build"]["target"] == name
    assert SERVICES["worker"]["build"]["args"] == {"WORKER_BASE": f"${{WORKER_BASE:-{globals_()['WORKER_BASE']}}}"}


@pytest.mark.parametrize("target", OURS)
def test_ends_as_a_user_that_is_not_root(target: str) -> None:
    words = [word for word, _ in STAGES[target]]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last(target, "USER"))  # a number is what Kubernetes can check
    assert "RUN" not in words[words.index("USER") :]
    assert last(target, "STOPSIGNAL") == "SIGTERM"


@pytest.mark.parametrize(("here", "code"), [(True, 0), (False, 1)])
def test_a_worker_is_healthy_while_its_own_process_is_seen(
    tmp_path: Path, facts: Callable[..., HardwareFacts], here: bool, code: int
) -> None:
    url = f"sqlite:///{tmp_path}/test.db"
    db.upgrade(url)
    mine = facts(host=platform.node())
    Queue(db.connect(url)).register("w", os.getpid() if here else 2**22 + 1, mine)
    Queue(db.connect(url)).register("elsewhere", os.getpid(), facts(host="another machine"))
    _, program, flag, text = SERVICES["worker"]["healthcheck"]["test"]
    assert (program, flag) == ("python", "-c")
    around = os.environ | {"DYNOTUNE_DATABASE_URL": url, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", text], env=around, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "")


def test_the_service_is_healthchecked_by_readiness() -> None:
    command = json.loads(last("service", "HEALTHCHECK").partition("CMD ")[2])
    assert command[:2] == ["python", "-c"] and "/readyz" in command[2]
    compile(command[2], "healthcheck", "exec")


@pytest.mark.parametrize("target", OURS)
def test_state_and_hub_cache_are_volumes_named_in_the_environment(target: str) -> None:
    environment = dict(pair.split("=", 1) for pair in shlex.split(last(target, "ENV")))
    assert json.loads(last(target, "VOLUME")) == [environment["DYNOTUNE_HOME"], environment["HF_HOME"]]
    assert {name for name in environment if name != "PYTHONUNBUFFERED"} <= settings_names() | FOREIGN
    # Docker gives a new volume the owner of the folder it covers.
    assert all(folder in last(target, "RUN") for name, folder in environment.items() if folder.startswith("/"))


def test_copied_files_exist_and_are_in_the_build_context() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    context = {line[1:] for line in ignored if line.startswith("!")}
    copied = [source for word, rest in instructions() if word == "COPY" for source in shlex.split(rest)[:-1]]
    assert "*" in ignored and {source.removeprefix("./") for source in copied} == context
    assert [source for source in copied if not (ROOT / source).exists()] == []


def test_the_wheel_has_every_package_it_is_built_from() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    copied = {rest.split()[0] for word, rest in STAGES["build"] if word == "COPY"}
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert {name for name in packages if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)} <= copied


def test_the_workers_requirements_leave_torch_to_the_base(tmp_path: Path) -> None:
    run = next(rest for word, rest in STAGES["build"] if word == "RUN" and "tomllib" in rest)
    program = shlex.split(run)[-1].replace("/requirements", str(tmp_path))
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
    service, worker = ((tmp_path / f"{name}.txt").read_text().splitlines() for name in OURS)
    names = {re.split(r"[^\w.-]", line)[0] for line in worker}
    assert "torch" not in names and {"transformers", "peft", "optuna"} <= names
    assert set(service) < set(worker)


def commands() -> Any:
    """The commands of the program by name: typer types them as a single command's."""
    return vars(typer.main.get_command(app))["commands"]


def test_the_services_command_is_understood() -> None:
    program, name, *arguments = json.loads(last("service", "CMD"))
    command = commands()[name]
    context = command.make_context(name, arguments)
    assert program == "dynotune"
    assert context.params["host"] == "0.0.0.0" and context.params["port"] == 8000 and not context.params["worker"]


def test_the_workers_command_is_understood() -> None:
    program, name, *arguments = json.loads(last("worker", "CMD"))
    assert program == "dynotune" and name in commands()
    done = subprocess.run(
        [sys.executable, "-m", "worker", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    flags = set(re.findall(r"--[a-z-]+", done.stdout))
    assert {argument for argument in arguments if argument.startswith("--")} <= flags
