"""What deploy/ starts: images, a service of systemd, manifests of Kubernetes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
IMAGES = sorted(DEPLOY.glob("docker/Dockerfile*"))
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
