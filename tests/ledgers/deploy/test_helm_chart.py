"""The Helm chart is without faults, makes what the manifest has, and takes settings that the server takes."""

from __future__ import annotations

import shutil
import subprocess
import tomllib

import jsonschema
import kubernetes_validate
import pytest
from chart import (
    CHART,
    EXTENSIONS,
    HELM,
    MANIFEST,
    SCHEMA,
    USERS,
    VALUES,
    helm,
    merged,
    needs_helm,
    rendered,
)

from tureen.config_sources import load

GUARDS = ("deploy/helm/*/*", "deploy/helm/*/*/*", "deploy/kubernetes/*", "cli")


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


@needs_helm
def test_notes_say_when_anybody_may_use_the_server(tmp_path):
    chart = shutil.copytree(CHART, tmp_path / "tureen")
    shutil.move(chart / "templates" / "NOTES.txt", chart / "notes")  # helm shows notes only with a cluster
    (chart / "templates" / "notes.yaml").write_text('kind: Notes\ntext: {{ tpl (.Files.Get "notes") . | toJson }}')
    assert "There are no keys" in rendered(chart=chart)["Notes"]["text"]
    assert "There are no keys" not in rendered({"keys": {"admin": "s3cret"}}, chart=chart)["Notes"]["text"]
