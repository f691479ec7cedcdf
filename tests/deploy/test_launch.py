"""What `dynotune launch` writes: Kubernetes' own schema, bash and the worker's command line understand it.

The schema is the one that kubernetes-validate ships (https://github.com/willthames/kubernetes-validate): no cluster and
no network is needed. tests/deploy/test_slurm.py has a real Slurm run the array.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer
import yaml
from kubernetes_validate.utils import ValidationError, latest_version, validate
from typer.testing import CliRunner

from service.cli.app import app
from service.cli.launchers import discover
from service.errors import Misconfigured
from worker.runner.main import app as worker_app
from worker.runner.stay import spelled_out

SECRET = "postgresql+psycopg://dynotune:hunter2@db.example/dynotune"
OLDEST = "1.29"  # the first that fails indexes one by one without a feature gate, as backoffLimitPerIndex asks
# Every option, and values that a shell, YAML or Kubernetes would read as commands if they were not quoted.
NASTY = {
    "QUOTES": 'it\'s "here"',
    "SHELL": "$(touch pwned) `touch pwned` $HOME ; touch pwned & # no",
    "EXPANDED": "$(DYNOTUNE_DATABASE_URL) $$(HOME)",
    "YAML": "yes: {a: *b} - !!python/object:os.system",
    "BACKSLASH": "a\\nb\\",
    "SPACES": "  two  ",
    "EMPTY": "",
    "UMLAUT": "grün",
}
ENV = [word for name, value in NASTY.items() for word in ("--env", f"{name}={value}")]
ALL = (
    "-n 8 --image ghcr.io/me/worker:1@sha256:ab --gpus 4 --gpu-resource nvidia.com/mig-1g.5gb --cpus 16 --memory 64Gi "
)
ALL += (
    "--shared-memory 16Gi --namespace ml --queue team-a --secret db.url --data-claim data --cache-claim hub --host-pid "
)
ALL += "--time 3h50m --idle 2.5 --grace 60 --name tune"
PLAIN: dict[str, list[str]] = {
    "few": ["-n", "1"],
    "cpu": ["-n", "2", "--gpus", "0", "--cpus", "4", "--memory", "16Gi"],
    "server": ["-n", "1", "--server", "https://tune.example"],
    "all": [*ALL.split(), *ENV],
}


def written(*arguments: str) -> str:
    """What `dynotune launch` prints with these arguments."""
    done = CliRunner().invoke(app, ["launch", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def manifest(*options: str) -> Any:
    return yaml.safe_load(written("kubernetes", *options))


def container(made: Any) -> Any:
    (only,) = made["spec"]["template"]["spec"]["containers"]
    return only


def understood(command: list[str]) -> dict[str, Any]:
    """The parameters of the worker's process that this command becomes."""
    assert command[:2] == ["dynotune", "worker"]
    with mock.patch("os.execv") as become:
        CliRunner().invoke(app, command[1:], catch_exceptions=False)
    (program, options), _ = become.call_args
    assert options[:4] == [program, "-P", "-m", "worker"]
    return typer.main.get_command(worker_app).make_context("worker", spelled_out(options[4:])).params


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that alone is searched for the cluster's programs."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def program(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/bash\nPATH={os.defpath}\n{text}\n")
    file.chmod(0o755)


@pytest.mark.parametrize("version", [OLDEST, latest_version()])
@pytest.mark.parametrize("options", PLAIN.values(), ids=PLAIN)
def test_the_manifest_follows_kubernetes_schema(options: list[str], version: str) -> None:
    validate(manifest(*options), version, strict=True)


@pytest.mark.parametrize("typing_error", ["paralelism", "completion_mode"])
def test_the_schema_would_see_a_mistake(typing_error: str) -> None:
    broken = manifest("-n", "1")
    broken["spec"][typing_error] = 1
    with pytest.raises(ValidationError):
        validate(broken, latest_version(), strict=True)


def test_a_worker_an_index_which_starts_again_when_it_was_evicted() -> None:
    spec = manifest("-n", "8")["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 8, 8)
    assert spec["podFailurePolicy"]["rules"][0]["action"] == "Ignore" and "suspend" not in spec
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "as a policy for failures asks"


def test_kueue_admits_the_job_of_a_queue() -> None:
    made = manifest("-n", "1", "--queue", "team-a")
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a" and made["spec"]["suspend"] is True


def test_the_pods_command_is_understood_and_fits_into_the_grace_period() -> None:
    made = manifest("-n", "1", "--grace", "120", "--time", "3h50m", "--idle", "2.5")
    asked = understood(container(made)["command"])
    assert (asked["devices"], asked["exit_when_idle"], asked["until"]) == ("all", 2.5, "13800s")
    assert asked["grace"] == 105 < made["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 120
    assert understood(container(manifest("-n", "1", "--gpus", "0"))["command"])["devices"] == "cpu"
    assert "limits" in (none := container(manifest("-n", "1", "--gpus", "0"))["resources"]) and not none["limits"]


def test_the_pod_has_the_folders_and_the_user_of_the_image() -> None:
    pod = manifest(*PLAIN["all"])["spec"]["template"]["spec"]
    dockerfile = (Path(__file__).parents[2] / "Dockerfile").read_text()
    named = {volume["name"] for volume in pod["volumes"]}
    folders = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert set(folders.values()) == named and pod["securityContext"]["runAsUser"] == 10001
    assert f"USER {pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}" in dockerfile
    for variable, folder in {"DYNOTUNE_HOME": "/var/lib/dynotune", "HF_HOME": "/var/cache/huggingface"}.items():
        assert f"{variable}={folder}" in dockerfile and folder in folders
    assert pod["hostPID"] is True and "/dev/shm" in folders


def test_values_reach_the_container_as_they_are() -> None:
    found = {one["name"]: one["value"] for one in container(manifest("-n", "1", *ENV))["env"] if "value" in one}
    # Kubernetes' own expansion: $$ is a dollar, and $(NAME) would be a variable.
    assert {name: value.replace("$$", "$") for name, value in found.items()} == NASTY
    assert not re.search(r"(?<!\$)(\$\$)*\$\(", found["EXPANDED"])


def test_a_worker_is_started_by_hand_with_the_same_options() -> None:
    asked = understood(["dynotune", "worker", "--exit-when-idle", "--devices", "cpu", "--until", "3h50m"])
    assert (asked["exit_when_idle"], asked["devices"], asked["until"], asked["grace"]) == (5, "cpu", "3h50m", None)


def test_the_url_is_the_secret_s_and_with_a_server_the_key() -> None:
    def secrets(*options: str) -> dict[str, Any]:
        found = {one["name"]: one for one in container(manifest("-n", "1", "--secret", "mine", *options))["env"]}
        return {name: one["valueFrom"]["secretKeyRef"] for name, one in found.items() if "valueFrom" in one}

    token = {"name": "mine", "key": "HF_TOKEN", "optional": True}
    url = {"name": "mine", "key": "DYNOTUNE_DATABASE_URL", "optional": False}
    key = {"name": "mine", "key": "DYNOTUNE_KEY", "optional": True}
    assert secrets() == {"HF_TOKEN": token, "DYNOTUNE_DATABASE_URL": url}
    assert secrets("--server", "http://x") == {"HF_TOKEN": token, "DYNOTUNE_KEY": key}


# Slurm


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a script by bash with a `dynotune` that writes down its arguments and environment; (exit code, both)."""
    programs = tmp_path / "nodes"
    programs.mkdir()
    program(programs / "dynotune", f'printf "%s\\0" "$@" > {tmp_path}/arguments; env -0 > {tmp_path}/environment')

    def go(text: str, **environment: str) -> tuple[int, str, list[str], dict[str, str]]:
        around = {"PATH": f"{programs}:{os.defpath}", **environment}
        done = subprocess.run(["bash"], input=text, cwd=tmp_path, env=around, capture_output=True, text=True)
        if done.returncode:
            return done.returncode, done.stderr, [], {}
        arguments = (tmp_path / "arguments").read_text().split("\0")[:-1]
        pairs = (tmp_path / "environment").read_text().split("\0")[:-1]
        return 0, done.stderr, arguments, dict(pair.split("=", 1) for pair in pairs)

    return go


def comments(text: str) -> list[str]:
    """The options that sbatch reads."""
    return [one.removeprefix("#SBATCH ") for one in text.splitlines() if one.startswith("#SBATCH")]


def test_the_array_has_the_options_that_were_asked_for() -> None:
    asked = "-n 8 --gpus 2 --cpus 8 --memory 64G --partition gpu,long --account lab --qos high --time 1d2h --name tune"
    options = comments(written("slurm", *asked.split(), "--sbatch", "--constraint=a100|h100", "--grace", "90"))
    expected = "--job-name=tune --array=0-7 --nodes=1 --ntasks=1 --gres=gpu:2 --cpus-per-task=8 --mem=64G "
    expected += "--partition=gpu,long --account=lab --qos=high --time=1-02:00:00 --signal=B:TERM@90 --requeue "
    assert options == (expected + "--open-mode=append --constraint=a100|h100").split()
    assert not [one for one in comments(written("slurm", "-n", "1", "--gpus", "0")) if "gres" in one or "time" in one]


def test_the_worker_replaces_the_script_with_what_it_was_given(script: Any, tmp_path: Path) -> None:
    text = written("slurm", "-n", "1", "--time", "4h", "--setup", "export FROM_SETUP=$(echo set)", *ENV)
    assert text.splitlines()[-1].startswith("exec dynotune worker ")
    code, _, arguments, environment = script(text, DYNOTUNE_DATABASE_URL=SECRET)
    assert code == 0 and environment.items() >= {**NASTY, "FROM_SETUP": "set", "DYNOTUNE_DATABASE_URL": SECRET}.items()
    asked = understood(["dynotune", *arguments])
    assert (asked["devices"], asked["grace"], asked["exit_when_idle"], asked["until"]) == ("all", 15, 10, "14310s")
    assert not (tmp_path / "pwned").exists()


def test_the_url_may_be_in_a_file_on_the_nodes(script: Any, tmp_path: Path) -> None:
    file = tmp_path / "its $(touch pwned) file.env"
    file.write_text(f"DYNOTUNE_DATABASE_URL='{SECRET}'\n")
    text = written("slurm", "-n", "1", "--environment-file", str(file))
    assert script(text)[3]["DYNOTUNE_DATABASE_URL"] == SECRET and not (tmp_path / "pwned").exists()


def test_a_worker_for_a_control_plane_needs_no_database(script: Any, tmp_path: Path) -> None:
    file = tmp_path / "key.env"
    file.write_text("DYNOTUNE_KEY=k-1\n")
    text = written("slurm", "-n", "1", "--server", "https://tune.example/$(id)", "--environment-file", str(file))
    code, _, _, environment = script(text)
    assert code == 0 and environment["DYNOTUNE_SERVER"] == "https://tune.example/$(id)"
    assert environment["DYNOTUNE_KEY"] == "k-1" and "DYNOTUNE_DATABASE_URL" not in environment


def test_a_worker_without_the_url_does_not_start(script: Any, tmp_path: Path) -> None:
    code, said, *_ = script(written("slurm", "-n", "1"))
    assert code == 2 and said.startswith("DYNOTUNE_DATABASE_URL is not set") and len(said.splitlines()) == 1
    code, said, *_ = script(written("slurm", "-n", "1", "--environment-file", str(tmp_path / "none")))
    assert code != 0 and "none: No such file" in said


# Both


ARGUMENTS = {"slurm": ["-n", "1"], "kubernetes": ["-n", "1"]}  # what a launcher needs to be told to write its file


@pytest.mark.parametrize("launcher", discover())
def test_the_url_is_never_in_the_file(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNOTUNE_DATABASE_URL", SECRET)
    text = written(launcher, *ARGUMENTS.get(launcher, []))
    assert "hunter2" not in text and "db.example" not in text


MISTAKES = {
    "slurm": [
        (["--partition", "gpu\n#SBATCH --uid=0"], "--partition: .* is not a partition's name"),
        (["--account", "a b"], "--account"),
        (["--qos", "-x"], "--qos"),
        (["--partition", ""], "--partition: '' is not a partition's name"),
        (["--name", "$(id)"], "--name"),
        (["--memory", "lots"], "--memory: 'lots' is not a size such as 64G"),
        (["--sbatch", "--comment=x\ntouch pwned"], "--sbatch: .* is not one line"),
        (["--sbatch", "touch pwned"], "--sbatch: .* is not an option such as"),
        (["--sbatch", "--export=DYNOTUNE_DATABASE_URL=x"], "DYNOTUNE_DATABASE_URL is a secret by its name"),
        (["--setup", "a\nb"], "--setup"),
        (["--setup", "export HF_TOKEN=hf_123"], "--setup: HF_TOKEN is a secret by its name"),
        (["--environment-file", "a\nb"], "--environment-file"),
    ],
    "kubernetes": [
        (["--name", "Upper"], "--name"),
        (["--name", "n" * 53], "--name: .* at most 52"),
        (["--namespace", "a_b"], "--namespace"),
        (["--queue", "a: b"], "--queue"),
        (["--secret", "-a"], "--secret"),
        (["--image", "a b"], "--image"),
        (["--memory", "64GB"], "--memory"),
        (["--shared-memory", "x"], "--shared-memory"),
        (["--gpu-resource", "gpu"], "--gpu-resource"),
        (["--data-claim", "/data"], "--data-claim"),
    ],
}
COMMON = [
    (["--server", "tune.example"], "--server: 'tune.example' is not a URL of http or https"),
    (["--server", "https://me:pw@tune.example"], "--server: a URL with a password must not be in the file"),
    (["--env", "DYNOTUNE_KEY=k"], "DYNOTUNE_KEY is a secret by its name"),
    (["--time", "4:00:00"], "--time: '4:00:00' is no duration; write 3h50m"),
    (["--time", "2m"], "--time: 2m is too short"),
    (["--env", "novalue"], "--env: 'novalue' is no variable's name"),
    (["--env", "A-B=1"], "--env"),
    (["--env", "A=x\ny"], "--env A: .* is not one line"),
    (["--env", "A=postgresql://me:pw@host/db"], "--env A: a URL with a password must not be in the file"),
    (["--env", "DYNOTUNE_DATABASE_URL=sqlite:///x"], "DYNOTUNE_DATABASE_URL is a secret by its name"),
    (["--env", "HF_TOKEN=hf_123"], "HF_TOKEN is a secret by its name"),
    (["--env", "OPENAI_APIKEY=sk-1"], "OPENAI_APIKEY is a secret by its name"),
]
ALL_MISTAKES = [(launcher, *mistake) for launcher, mistakes in MISTAKES.items() for mistake in (*mistakes, *COMMON)]


@pytest.mark.parametrize(("launcher", "options", "said"), ALL_MISTAKES)
def test_a_mistake_is_one_sentence_and_writes_nothing(
    launcher: str, options: list[str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(Misconfigured, match=said) as error:
        written(launcher, "-n", "1", "--output", str(tmp_path / "file"), *options)
    assert not (tmp_path / "file").exists() and "\n" not in error.value.detail


def test_a_tokenizers_setting_is_no_secret() -> None:
    assert "TOKENIZERS_PARALLELISM" in written("slurm", "-n", "1", "--env", "TOKENIZERS_PARALLELISM=false")


HANDED = {"slurm": ("sbatch", []), "kubernetes": ("kubectl", ["create", "-f", "-"])}


@pytest.mark.parametrize("launcher", HANDED)
def test_submit_hands_in_what_output_writes(
    launcher: str, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, arguments = HANDED[launcher]
    monkeypatch.setenv("DYNOTUNE_DATABASE_URL", SECRET)
    program(programs / name, f'echo "$@" > {tmp_path}/arguments; cat > {tmp_path}/handed; echo "job 7"')
    file = tmp_path / "file"
    assert written(launcher, "-n", "1", *ENV, "--submit", "--output", str(file)) == "job 7\n"
    assert (tmp_path / "handed").read_text() == file.read_text() == written(launcher, "-n", "1", *ENV)
    assert (tmp_path / "arguments").read_text().split() == arguments


@pytest.mark.parametrize("launcher", HANDED)
def test_a_cluster_that_is_not_there_or_refuses_is_said(
    launcher: str, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNOTUNE_DATABASE_URL", SECRET)
    name = HANDED[launcher][0]
    with pytest.raises(Misconfigured, match=f"there is no {name} on this machine; write the file with --output"):
        written(launcher, "-n", "1", "--submit")
    program(programs / name, "echo 'error: invalid partition' >&2; exit 1")
    with pytest.raises(Misconfigured, match=f"{name} refused it: error: invalid partition"):
        written(launcher, "-n", "1", "--submit")


def test_an_array_is_not_handed_in_without_the_url(programs: Path) -> None:
    program(programs / "sbatch", "echo no")
    with pytest.raises(Misconfigured, match="DYNOTUNE_DATABASE_URL is not set here"):
        written("slurm", "-n", "1", "--submit")
