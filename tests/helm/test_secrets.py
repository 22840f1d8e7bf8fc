"""Secrets: no value in anything that is rendered, files by reference, the admin token for inference alone."""

from __future__ import annotations

import base64
import json

import pytest

from helm import charts
from helm.charts import merged
from helm.renders import (
    CASES,
    NAMESPACE,
    ROLES,
    VALUES,
    case,
    containers,
    environment,
    is_shared,
    pod_of,
    preflight_of,
    with_values,
)

SECRETS = {"api_key": "k-9f2b7c41", "admin_token": "t-51d0aa87", "hf_token": "h-77e3c209"}
MOUNT = "/etc/tandem/secrets"


def with_secret(name: str) -> tuple[dict, ...]:
    """A namespace with a Secret of known values."""
    data = {key: base64.b64encode(value.encode()).decode() for key, value in SECRETS.items()}
    return (
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": NAMESPACE}, "data": data},
    )


@pytest.mark.parametrize("name", CASES)
def test_no_value_is_rendered(name):
    rendered = charts.render(VALUES[name], release="a", existing=with_secret("a-tandem"))
    assert "Pods wait for the Secret" not in rendered.notes, "the Secret was there to be read"
    assert "Pods wait for the Secret" in case(name).notes
    everything = json.dumps(rendered.objects) + rendered.notes
    assert rendered.all("Secret") == []
    for value in SECRETS.values():
        assert value not in everything
        assert base64.b64encode(value.encode()).decode() not in everything


def files(pod: dict, container: dict) -> dict[str, str]:
    """The files of secrets that a container sees: path → key."""
    found = {}
    for mount in container.get("volumeMounts", []):
        volume = next(v for v in pod["spec"]["volumes"] if v["name"] == mount["name"])
        assert "secret" not in volume, "all are projected"
        for source in volume.get("projected", {}).get("sources", []):
            assert mount["readOnly"] is True
            for item in source["secret"]["items"]:
                found[f"{mount['mountPath']}/{item['path']}"] = item["key"]
    return found


@pytest.mark.parametrize("name", CASES)
def test_secrets_are_files_and_only_who_talks_to_vllm_as_its_admin_has_the_token(name):
    """That is inference, and a trainer that shares its GPUs."""
    rendered = case(name)
    admins = {"inference", "trainer"} if is_shared(name) else {"inference"}
    for _, pod in rendered.pods():
        for container in containers(pod):
            assert not container.get("envFrom")
            assert all(set(variable) == {"name", "value"} for variable in container.get("env", []))
            named = {v for n, v in environment(container).items() if n.endswith("_FILE") or n == "HF_TOKEN_PATH"}
            seen = files(pod, container)
            assert named <= set(seen), container["name"]
            of_admin = any(role in word for word in [container["name"], *container.get("args", [])] for role in admins)
            if "admin_token" in seen.values():
                assert of_admin or container["name"].startswith(("inference-", "tiny-model")), container["name"]
                assert pod is pod_of(rendered, "inference")
    for role in ROLES:
        pod = pod_of(rendered, role)
        main = next(c for c in pod["spec"]["containers"] if c["name"] == role)
        expected = {f"{MOUNT}/{key}": key for key in SECRETS if key != "admin_token" or role in admins}
        assert files(pod, main) == files(pod, preflight_of(rendered, role)) == expected
        assert (environment(main).get("TANDEM_ADMIN_TOKEN_FILE") is not None) == (role in admins)


@pytest.mark.parametrize("name", CASES)
def test_files_are_readable_for_the_group_alone(name):
    for _, pod in case(name).pods():
        for volume in pod["spec"]["volumes"]:
            if "projected" in volume:
                assert volume["projected"]["defaultMode"] == 0o440
                required = [s["secret"] for s in volume["projected"]["sources"] if not s["secret"].get("optional")]
                keys = {item["key"] for source in required for item in source["items"]}
                assert "api_key" in keys
                assert "hf_token" not in keys, "models that need no token need none"


def test_a_secret_of_another_name_with_other_keys():
    keys = {"apiKey": "key", "adminToken": "admin", "hfToken": "hub.token"}
    rendered = with_values(secret={"name": "mine", **keys})
    pod = pod_of(rendered, "inference")
    (container,) = pod["spec"]["containers"]
    paths = {"api_key": "key", "admin_token": "admin", "hf_token": "hub.token"}
    assert files(pod, container) == {f"{MOUNT}/{path}": key for path, key in paths.items()}
    for _, any_pod in rendered.pods():
        sources = [s for v in any_pod["spec"]["volumes"] for s in v.get("projected", {}).get("sources", [])]
        assert {source["secret"]["name"] for source in sources} == {"mine"}
    found = charts.render(merged(VALUES["defaults"], {"secret": {"name": "mine"}}), existing=with_secret("mine"))
    assert "Pods wait" not in found.notes
