"""Images, service and manifests are without faults by their own linters, and the command of each starts a server."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import kubernetes_validate
import pytest
import yaml
from patience import wait_until
from server_process import ServerProcess

DEPLOY = Path(__file__).parents[2] / "deploy"
IMAGES = sorted(DEPLOY.glob("docker/Dockerfile*"))
HADOLINT = Path(sys.executable).with_name("hadolint")
SYSTEMD = shutil.which("systemd-analyze")
MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "tureen.yaml").read_text()))
CONTAINER = MANIFESTS[0]["spec"]["template"]["spec"]["containers"][0]


def instruction(image: Path, name: str) -> list[str]:
    """Returns the last instruction of this name that is written as JSON."""
    lines = [line for line in image.read_text().splitlines() if line.startswith(f"{name} [")]
    return json.loads(lines[-1].removeprefix(name))


def service_command() -> list[str]:
    lines = (DEPLOY / "systemd" / "tureen.service").read_text().splitlines()
    return shlex.split(next(line for line in lines if line.startswith("ExecStart=")).removeprefix("ExecStart="))


def commands() -> dict[str, list[str]]:
    """What each runs: `tureen serve` and its arguments."""
    compose = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"]["tureen"]["command"]
    images = {image.name: instruction(image, "ENTRYPOINT") + instruction(image, "CMD") for image in IMAGES}
    return images | {
        "compose": ["tureen", "serve", *compose],
        "systemd": ["tureen", *service_command()[1:]],
        "kubernetes": [
            word.replace("$(POD_NAMESPACE)", "default") for word in CONTAINER["command"] + CONTAINER["args"]
        ],
    }


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_an_image_has_no_fault_that_the_linter_knows(image):
    done = subprocess.run([HADOLINT, image], capture_output=True, text=True, check=False)
    assert done.stdout == ""
    assert done.returncode == 0


def test_images_differ_only_in_what_cuda_needs():
    heads = [instruction(image, "ENTRYPOINT") for image in IMAGES]
    assert heads == [["tureen", "serve"]] * 2
    assert set(instruction(IMAGES[1], "CMD")) - set(instruction(IMAGES[0], "CMD")) == {"--device", "cuda"}


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest["kind"])
def test_a_manifest_is_what_kubernetes_takes(manifest):
    kubernetes_validate.validate(manifest, "1.33", strict=True)


def test_a_manifest_with_a_slip_is_not():
    wrong = {**MANIFESTS[2], "spec": {**MANIFESTS[2]["spec"], "selectr": {}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.33", strict=True)


def test_a_pod_gets_longer_to_end_than_the_server_takes():
    pod = MANIFESTS[0]["spec"]["template"]["spec"]
    drain_s = float(CONTAINER["args"][CONTAINER["args"].index("--drain-timeout-s") + 1])
    pause_s = float(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > drain_s + pause_s


@pytest.mark.skipif(SYSTEMD is None, reason="there is no systemd-analyze on this machine")
def test_the_service_is_one_that_systemd_understands(tmp_path):
    unit = (DEPLOY / "systemd" / "tureen.service").read_text().replace(service_command()[0], shutil.which("true"))
    (tmp_path / "tureen.service").write_text(unit)
    done = subprocess.run([SYSTEMD, "verify", tmp_path / "tureen.service"], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == 0


@pytest.mark.e2e
@pytest.mark.parametrize("name", sorted(set(commands()) - {"Dockerfile.cuda"}))
def test_the_command_starts_a_server_that_answers_where_probes_ask(name):
    program, subcommand, *arguments = commands()[name]
    assert (program, subcommand) == ("tureen", "serve")
    paths = [CONTAINER[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe")]
    place = arguments.index("--port")
    assert arguments[place + 1] == "30000"
    with ServerProcess(*arguments[:place], *arguments[place + 2 :]) as server:
        url = server.wait_ready().url  # which it prints as curl takes it, also where it listens on all addresses
        for path in paths:
            wait_until(lambda place=f"{url}{path}": httpx.get(place).status_code == 200, path)
