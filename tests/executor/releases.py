"""The objects that the chart renders for `trainer.executor: kubernetes`, as a cluster and a runner
get them."""

import json
from pathlib import Path
from typing import Any

from helm.charts import Object, Rendered, merged
from helm.kubernetes_api import ApiServer
from helm.renders import container_of, environment, of

VALUES: dict[str, Any] = {
    "device": "cpu",
    "tinyModel": True,
    "baseModel": "",
    "trainer": {"executor": "kubernetes", "resources": {"requests": {"cpu": "1"}}},
}


def release(hosts: int = 1, *, queue: str = "") -> Rendered:
    """A release `a`; the runner's rights and the Jobs are its own."""
    more = {"trainer": {"hosts": hosts}, "kueue": {"queue": queue}}
    return of(merged(VALUES, more))


def template_of(rendered: Rendered) -> Object:
    """The template of the Jobs."""
    (config,) = (o for o in rendered.all("ConfigMap") if o["metadata"]["name"] == "a-tandem-job")
    template: Object = json.loads(config["data"]["job.json"])
    return template


def install(api: ApiServer, rendered: Rendered, directory: Path) -> dict[str, str]:
    """The objects that Helm would install, and the environment variables of a runner that uses
    them."""
    api.add(json.loads(json.dumps(rendered.one("StatefulSet", "-trainer"))))
    api.rules = rendered.one("Role")["rules"]
    (directory / "job.json").write_text(json.dumps(template_of(rendered)))
    (directory / "kubeconfig").write_text(api.kubeconfig)
    return environment(container_of(rendered, "trainer")) | {
        "KUBECONFIG": str(directory / "kubeconfig"),
        "TANDEM_JOB_TEMPLATE": str(directory / "job.json"),
    }
