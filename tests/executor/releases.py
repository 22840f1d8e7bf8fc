"""The objects that the chart renders for `trainer.executor: kubernetes`, as a cluster and a runner
get them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from helm.charts import Object, Rendered, merged, render
from helm.kubernetes_api import ApiServer
from helm.pods import container_of, environment

VALUES: dict[str, Any] = {
    "device": "cpu",
    "tinyModel": True,
    "baseModel": "",
    "trainer": {"executor": "kubernetes", "resources": {"requests": {"cpu": "1"}}},
}


@cache
def release(hosts: int = 1, *, queue: str = "") -> Rendered:
    """A release `a`, with the rights of its own runner and the template of its own Jobs."""
    more = {"trainer": {"hosts": hosts}, "kueue": {"queue": queue}}
    return render(merged(VALUES, more))


def template_of(rendered: Rendered) -> Object:
    """The template of the Jobs."""
    (config,) = (o for o in rendered.all("ConfigMap") if o["metadata"]["name"] == "a-tandem-job")
    template: Object = json.loads(config["data"]["job.json"])
    return template


def install(api: ApiServer, rendered: Rendered, directory: Path) -> dict[str, str]:
    """Gives `api` the objects that Helm would install. Returns the environment variables of a
    runner that uses these objects."""
    api.add(json.loads(json.dumps(rendered.one("StatefulSet", "-trainer"))))
    api.rules = rendered.one("Role")["rules"]
    (directory / "job.json").write_text(json.dumps(template_of(rendered)))
    (directory / "kubeconfig").write_text(api.kubeconfig)
    return environment(container_of(rendered.pods(), "trainer")) | {
        "KUBECONFIG": str(directory / "kubeconfig"),
        "TANDEM_JOB_TEMPLATE": str(directory / "job.json"),
    }
