"""The examples in deploy/ work: Ray Serve accepts the configs, the YAML is valid, torchrun starts."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from auraflux.cli.options.serve import SERVING
from tests.engine.tiny import tiny

yaml = pytest.importorskip("yaml", reason="the examples are YAML: pip install pyyaml")
DEPLOY = Path(__file__).parents[1] / "deploy"


def serve_config() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "serve.yaml").read_text())


def kubernetes() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text()))


def configs() -> list[dict[str, Any]]:
    return [serve_config(), yaml.safe_load(kubernetes()[0]["spec"]["serveConfigV2"])]


@pytest.mark.parametrize("config", configs(), ids=["serve.yaml", "kuberay.yaml"])
def test_arguments_are_options_of_the_command(config: dict[str, Any]):
    known = {"model", "replicas"}
    for option in SERVING:
        made = option(lambda: None).__click_params__[0]
        known |= {word.lstrip("-") for word in made.opts}
    [application] = config["applications"]
    assert application["import_path"] == "auraflux.cli.serve_ray:application"
    assert set(application["args"]) <= known
    assert {each["name"] for each in application["deployments"]} <= {"Model", "ReplicaRouter"}


def test_remote_access_requires_an_api_key():
    single_process_output, cluster = configs()
    assert single_process_output["http_options"]["host"] == "127.0.0.1"
    assert "host" not in single_process_output["applications"][0]["args"]
    service, policy = kubernetes()
    assert cluster["applications"][0]["args"]["host"] == "0.0.0.0"
    groups = [service["spec"]["rayClusterConfig"]["headGroupSpec"], *service["spec"]["rayClusterConfig"]["workerGroupSpecs"]]
    for group in groups:
        [container] = group["template"]["spec"]["containers"]
        assert [variable["name"] for variable in container["env"]] == ["AURAFLUX_API_KEY"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in group["template"]["spec"]["volumes"]}
    assert (service["kind"], policy["kind"]) == ("RayService", "NetworkPolicy")
    assert policy["spec"]["ingress"][1]["ports"] == [{"port": cluster["http_options"]["port"]}]


@pytest.mark.parametrize("name", ["Containerfile", "Containerfile.cuda"])
def test_images_copy_what_there_is(name: str):
    text = (DEPLOY / name).read_text()
    extras = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.search(r"^ARG EXTRAS=(\S+)$", text, re.M)[1].split(",")) <= set(extras)
    for line in re.findall(r"^COPY (.+) \S+$", text, re.M):
        assert all((DEPLOY.parent / word).exists() for word in line.split()), line
    command = json.loads(re.search(r"^ENTRYPOINT (.+)$", text, re.M)[1])
    assert command[1:] == ["serve", "--host", "0.0.0.0", "--log-json"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path):
    unit = (DEPLOY / "auraflux.service").read_text()
    command = "/opt/auraflux/.venv/bin/auraflux"
    assert f"ExecStart={command} serve " in unit
    (tmp_path / "auraflux.service").write_text(unit.replace(command, sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", tmp_path / "auraflux.service"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# importing ray emits warnings
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", configs(), ids=["serve.yaml", "kuberay.yaml"])
def test_ray_serve_accepts_the_config(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("ray.serve", reason="needs ray: pip install 'ray[serve]'")
    from ray import serve
    from ray.serve.schema import ServeDeploySchema

    from auraflux.cli.serve_ray import application

    [described] = ServeDeploySchema.model_validate(config).applications
    monkeypatch.setenv("AURAFLUX_API_KEY", "a key")
    made, make = {}, serve.deployment

    def noted(*args: Any, **options: Any) -> Any:
        made[options["name"]] = options, make(*args, **options)
        return made[options["name"]][1]

    monkeypatch.setattr(serve, "deployment", noted)
    assert isinstance(application(described.args), serve.Application)
    assert {name: deployment.name for name, (_, deployment) in made.items()} == {
        "Model": "Model",
        "ReplicaRouter": "ReplicaRouter",
    }
    options, model = made["Model"]
    assert model.max_ongoing_requests == described.args["max-sequences"]
    assert options["autoscaling_config"].max_replicas == 4


@pytest.mark.slow
def test_ray_versions_match():
    ray = pytest.importorskip("ray", reason="needs ray: pip install 'ray[serve]'")
    pinned = f"ray=={kubernetes()[0]['spec']['rayClusterConfig']['rayVersion']}"
    assert pinned in (DEPLOY.parent / "constraints.txt").read_text().splitlines()
    assert pinned == f"ray=={ray.__version__}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixture", "settings"),
    [(False, {}), (True, {"PER_NODE": "4", "WAY": "pipeline=2,experts=2"})],
    ids=["pipeline", "combined"],
)
def test_torchrun_runs(mixture: bool, settings: dict[str, str]):
    model = str(tiny(mixture=mixture))
    with torchrun(model, settings) as started:
        output, errors = started.communicate(timeout=400)
    assert started.returncode == 0, errors
    assert output == single_process_output(model)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds a rank by its environment in /proc")
def test_torchrun_restarts_ranks():
    model = str(tiny())
    with torchrun(model, {}) as started:
        os.kill(process_with(b"RANK=1", b"TORCHELASTIC_RESTART_COUNT=0", model.encode()), signal.SIGKILL)
        output, errors = started.communicate(timeout=400)
    assert started.returncode == 0, errors
    # the output of the first ranks may precede it
    assert output.endswith(single_process_output(model))


OPTIONS = ["--prompt", "hello", "--max-tokens", "4", "--device", "cpu", "--calibrate", "off", "--temperature", "0"]


def torchrun(model: str, settings: dict[str, str]) -> "subprocess.Popen[str]":
    # several processes share the cores
    setting = {**os.environ, "PYTHON": sys.executable, "COMMAND": "generate", "OMP_NUM_THREADS": "1", **settings}
    how: dict[str, Any] = {"env": setting, "cwd": DEPLOY.parent, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([str(DEPLOY / "torchrun.sh"), model, *OPTIONS], text=True, **how)


def single_process_output(model: str) -> str:
    command = [sys.executable, "-m", "auraflux", "generate", model, *OPTIONS]
    return subprocess.run(command, cwd=DEPLOY.parent, capture_output=True, text=True, timeout=400).stdout


def process_with(*strings: bytes) -> int:
    """Wait for a process with these strings in its environment or command line; return its id."""
    ends = time.monotonic() + 200
    while time.monotonic() < ends:
        for each in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                errors = b"\0".join((each / name).read_bytes() for name in ("environ", "cmdline")).split(b"\0")
                if set(strings) <= set(errors):
                    return int(each.name)
        time.sleep(0.1)
    raise AssertionError(f"no process has {strings}")
