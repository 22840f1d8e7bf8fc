"""Secrets are files that pods reference. No render contains their values; few containers get the
admin token."""

import base64
import json
import os

import pytest
from typer.testing import CliRunner

from helm import charts
from helm.charts import merged
from helm.matrix import CASES, ROLES, VALUES
from helm.pods import containers
from helm.renders import (
    NAMESPACE,
    case,
    container_of,
    environment,
    pod_of,
    preflight_of,
    with_values,
)
from tandem.cli import app

SECRETS = {"api_key": "k-9f2b7c41", "admin_token": "t-51d0aa87", "hf_token": "h-77e3c209"}
MOUNT = "/etc/tandem/secrets"


def with_secret(name: str) -> tuple[dict, ...]:
    """A namespace with a Secret of known values."""
    data = {key: base64.b64encode(value.encode()).decode() for key, value in SECRETS.items()}
    return (
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "data": data,
        },
    )


@pytest.mark.parametrize("name", ["defaults", "everything", "shared by claim"])
def test_no_render_contains_a_secrets_value(name):
    rendered = charts.render(VALUES[name], release="a", existing=with_secret("a-tandem"))
    assert "Pods wait for the Secret" not in rendered.notes, "the templates could read the Secret"
    assert "Pods wait for the Secret" in case(name).notes
    everything = json.dumps(rendered.objects) + rendered.notes
    assert rendered.all("Secret") == []
    for value in SECRETS.values():
        assert value not in everything
        assert base64.b64encode(value.encode()).decode() not in everything


def files(pod: dict, container: dict) -> dict[str, str]:
    """The secret files of a container: path → key."""
    result = {}
    for mount in container.get("volumeMounts", []):
        volume = next(v for v in pod["spec"]["volumes"] if v["name"] == mount["name"])
        assert volume.get("projected", {}).get("defaultMode", 0o440) == 0o440
        for source in volume.get("projected", {}).get("sources", []):
            assert mount["readOnly"] is True
            for item in source["secret"]["items"]:
                assert bool(source["secret"].get("optional")) == (item["path"] == "hf_token")
                result[f"{mount['mountPath']}/{item['path']}"] = item["key"]
    return result


@pytest.mark.parametrize("name", CASES)
def test_only_inference_gets_the_admin_token(name):
    """Files of mode 440, of which only the hub's token is optional."""
    rendered = case(name)
    admins = {"inference"}
    for _, pod in rendered.pods():
        for container in containers(pod):
            assert not container.get("envFrom")
            for variable in container.get("env", []):
                own_name = variable["name"] == "TANDEM_REPLICA"
                assert set(variable) == {"name", "valueFrom" if own_name else "value"}
            named = {
                v
                for n, v in environment(container).items()
                if n.endswith("_FILE") or n == "HF_TOKEN_PATH"
            }
            mounted = files(pod, container)
            assert named <= set(mounted), container["name"]
            if "admin_token" in mounted.values():
                words = [container["name"], *container.get("args", [])]
                of_admin = any(role in word for word in words for role in admins)
                assert of_admin or container["name"].startswith(("inference-", "tiny-model")), (
                    container["name"]
                )
                assert pod is pod_of(rendered, "inference")
    for role in ROLES:
        pod, main = pod_of(rendered, role), container_of(rendered, role)
        expected = {
            f"{MOUNT}/{key}": key for key in SECRETS if key != "admin_token" or role in admins
        }
        assert files(pod, main) == files(pod, preflight_of(rendered, role)) == expected
        assert (environment(main).get("TANDEM_ADMIN_TOKEN_FILE") is not None) == (role in admins)


@pytest.mark.parametrize("name", ["defaults", "shared by claim", "shared by resource"])
@pytest.mark.parametrize("role", ROLES)
def test_preflight_finds_the_secrets_that_the_chart_gives_a_role(monkeypatch, tmp_path, name, role):
    """`tandem preflight` with the arguments, variables and secret files of the role's init
    container."""
    rendered = case(name)
    container = preflight_of(rendered, role)
    for variable in [variable for variable in os.environ if variable.startswith("TANDEM_")]:
        monkeypatch.delenv(variable)
    for variable, value in environment(container).items():
        monkeypatch.setenv(variable, value.replace(MOUNT, str(tmp_path)))
    monkeypatch.setenv("TANDEM_ROOT", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for path, key in files(pod_of(rendered, role), container).items():
        (tmp_path / path.removeprefix(f"{MOUNT}/")).write_text(f"{SECRETS[key]:-<32}")
    printed = CliRunner().invoke(app, [*container["args"][1:], "--json"]).stdout
    found = {check["name"]: check["status"] for check in json.loads(printed)}
    secrets = {
        check: status
        for check, status in found.items()
        if check in ("TANDEM_API_KEY", "TANDEM_ADMIN_TOKEN")
    }
    admin = role == "inference"
    assert found["settings"] == "ok"
    assert secrets == {"TANDEM_API_KEY": "ok"} | ({"TANDEM_ADMIN_TOKEN": "ok"} if admin else {})


def test_a_secret_of_another_name_with_other_keys():
    keys = {"apiKey": "key", "adminToken": "admin", "hfToken": "hub.token"}
    rendered = with_values(secret={"name": "mine", **keys})
    pod = pod_of(rendered, "inference")
    (container,) = pod["spec"]["containers"]
    paths = {"api_key": "key", "admin_token": "admin", "hf_token": "hub.token"}
    assert files(pod, container) == {f"{MOUNT}/{path}": key for path, key in paths.items()}
    for _, any_pod in rendered.pods():
        sources = [
            s for v in any_pod["spec"]["volumes"] for s in v.get("projected", {}).get("sources", [])
        ]
        assert {source["secret"]["name"] for source in sources} == {"mine"}
    existing = charts.render(
        merged(VALUES["defaults"], {"secret": {"name": "mine"}}), existing=with_secret("mine")
    )
    assert "Pods wait" not in existing.notes
