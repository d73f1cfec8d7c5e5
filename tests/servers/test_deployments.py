"""The command of a pod starts a server. tests/deploy reads the commands of images, service and manifests."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
from server_process import ServerProcess
from timeouts import wait_until

sys.path.insert(0, str(Path(__file__).parents[1] / "deploy"))

from chart import container, needs_helm, rendered


def without_port(arguments: list[str]) -> list[str]:
    place = arguments.index("--port")
    assert arguments[place + 1] == "30000"
    return arguments[:place] + arguments[place + 2 :]


@needs_helm
def test_the_pod_of_the_chart_answers_probes_and_has_the_settings_and_keys_of_the_values(tmp_path):
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
    with ServerProcess(*without_port(arguments)) as server:
        address = server.wait_ready().url  # which it prints as curl takes it, though it listens on all addresses
        for probe in ("startupProbe", "readinessProbe"):
            path = container(objects)[probe]["httpGet"]["path"]
            wait_until(lambda place=f"{address}{path}": httpx.get(place).status_code == 200, path)
        url = f"{address}/v1/models"
        assert httpx.get(url).status_code == 401
        card = httpx.get(url, headers={"Authorization": "Bearer k2"}).json()["data"][0]
    assert card["max_model_len"] == 640
