"""The calls of a Kubernetes API server that an executor makes. The executor polls the API server
instead of watching objects, because a poll misses no change."""

from collections.abc import Callable, Mapping
from typing import Any

import httpx2
from lightkube import ApiError, Client
from lightkube.config.kubeconfig import KubeConfig
from lightkube.core.exceptions import ConfigError
from lightkube.generic_resource import create_global_resource, create_namespaced_resource
from lightkube.types import CascadeType

from tandem.errors import InvalidInput, TandemError

Object = dict[str, Any]

TIMEOUT_SECONDS = 3.0
"""Time limit of one call. It is short because nobody renews the job's lease during a call."""
_KUEUE_VERSIONS = ("v1beta2", "v1beta1")
_PASSING = frozenset({408, 410, 429})
"""HTTP statuses that do not mean that the request itself is wrong, so the runner tries again. The
same holds for all statuses from 500 on."""

# Kubernetes objects are read as dictionaries, because typed models would drop unknown fields.
_JOBS: Any = create_namespaced_resource("batch", "v1", "Job", "jobs")
_PODS: Any = create_namespaced_resource("", "v1", "Pod", "pods")
_EVENTS: Any = create_namespaced_resource("", "v1", "Event", "events")
_SETS: Any = create_namespaced_resource("apps", "v1", "StatefulSet", "statefulsets")
_REVIEWS: Any = create_global_resource(
    "authorization.k8s.io", "v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews"
)
_WORKLOADS: dict[str, Any] = {
    version: create_namespaced_resource("kueue.x-k8s.io", version, "Workload", "workloads")
    for version in _KUEUE_VERSIONS
}


class ClusterAway(TandemError, code="cluster_away", http_status=503, retriable=True):
    """The API server does not answer, or reports a temporary failure."""


class ClusterRefused(TandemError, code="cluster_refused"):
    """The API server refuses a request. `status`: the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Cluster:
    """A client of the API server of this pod's cluster, or of the cluster in KUBECONFIG. Raises
    InvalidInput if no cluster is configured."""

    def __init__(self, namespace: str | None = None) -> None:
        try:
            config: Any = KubeConfig.from_env().get()
        except ConfigError as error:
            raise InvalidInput(
                f"there is no Kubernetes API server to ask: {error}; run the runner in a pod with a"
                " service account's token, or set KUBECONFIG",
                field="TANDEM_EXECUTOR",
            ) from error
        self.namespace = namespace or config.namespace
        timeout = httpx2.Timeout(TIMEOUT_SECONDS)
        self._client: Any = Client(config, namespace=namespace, timeout=timeout, trust_env=False)
        self._kueue = _KUEUE_VERSIONS[0]

    def create(self, job: Object) -> None:
        """Creates a Job. Raises ClusterRefused with status 409 if a Job with this name exists."""
        self._call(lambda: self._client.create(_JOBS(job)))

    def job(self, name: str) -> Object | None:
        try:
            found: Object = self._call(lambda: self._client.get(_JOBS, name))
        except ClusterRefused as refusal:
            if refusal.status == 404:
                return None
            raise
        return found

    def jobs(self, labels: Mapping[str, str]) -> list[Object]:
        return self._list(_JOBS, labels=labels)

    def pods(self, job: str) -> list[Object]:
        return self._list(_PODS, labels={"batch.kubernetes.io/job-name": job})

    def events(self, name: str) -> list[Object]:
        """The events about the object with this name, newest last."""
        found = self._list(_EVENTS, fields={"involvedObject.name": name})
        return sorted(found, key=lambda event: event.get("lastTimestamp") or "")

    def delete(self, job: str) -> None:
        """Deletes the Job's pods, and then the Job. The Job's pods get SIGTERM."""
        try:
            self._call(lambda: self._client.delete(_JOBS, job, cascade=CascadeType.FOREGROUND))
        except ClusterRefused as refusal:
            if refusal.status != 404:
                raise

    def workload(self, job_uid: str) -> Object | None:
        """Kueue's Workload of the Job with the uid `job_uid`; None if there is none."""
        of = {"kueue.x-k8s.io/job-uid": job_uid}
        return next(iter(self._workloads(of)), None)

    def check_kueue(self, queue: str) -> None:
        """Raises InvalidInput if the cluster has no Kueue, because without Kueue the Jobs would
        start without a quota."""
        try:
            self._workloads({"kueue.x-k8s.io/job-uid": "none"})
        except ClusterRefused as refusal:
            if refusal.status != 404:
                raise
            raise InvalidInput(
                f"kueue.queue={queue}, but this cluster has no workloads.kueue.x-k8s.io; install"
                " Kueue, or leave kueue.queue of the chart empty",
                field="TANDEM_JOB_TEMPLATE",
            ) from refusal

    def _workloads(self, labels: Mapping[str, str]) -> list[Object]:
        """Kueue's Workloads with these labels. The call uses the version of Kueue's API that the
        cluster serves."""
        for version in (self._kueue, *_KUEUE_VERSIONS):
            try:
                found = self._list(_WORKLOADS[version], labels=labels)
            except ClusterRefused as refusal:
                if refusal.status != 404:
                    raise
                missing = refusal
            else:
                self._kueue = version
                return found
        raise missing

    def uid_of_set(self, name: str) -> str:
        """The StatefulSet's uid."""
        found: Object = self._call(lambda: self._client.get(_SETS, name))
        return str(found["metadata"]["uid"])

    def check_right(self, verb: str, group: str, resource: str, name: str | None = None) -> None:
        """Raises InvalidInput if the runner's service account does not have the right in this
        namespace.

        Args:
            verb, group, resource: as in a rule of a Role; the core group is "".
            name: the only object for which the right is needed; None: all objects.
        """
        asked = {"namespace": self.namespace, "verb": verb, "group": group, "resource": resource}
        if name is not None:
            asked["name"] = name
        review = _REVIEWS({"metadata": {}, "spec": {"resourceAttributes": asked}})
        answer: Object = self._call(lambda: self._client.create(review))
        if not answer["status"].get("allowed"):
            what = f"{resource}.{group}" if group else resource
            raise InvalidInput(
                f"the runner's service account may not {verb} {what} in namespace"
                f" {self.namespace}; give it the rights of the chart's Role …-runner",
                field="TANDEM_EXECUTOR",
            )

    def _list(self, kind: Any, **selectors: Mapping[str, str]) -> list[Object]:
        chosen = {name: dict(terms) for name, terms in selectors.items()}
        return self._call(lambda: list(self._client.list(kind, **chosen)))

    def _call[T](self, action: Callable[[], T]) -> T:
        try:
            return action()
        except ApiError as error:
            status = error.response.status_code
            if status in _PASSING or status >= 500:
                raise ClusterAway(f"the API server answers {status}: {error}") from error
            raise ClusterRefused(str(error), status) from error
        # An answer without a Kubernetes Status object comes from a proxy.
        except httpx2.HTTPStatusError as error:
            raise ClusterAway(f"the API server answers {error.response.status_code}") from error
        except (httpx2.HTTPError, ConfigError, OSError) as error:
            raise ClusterAway(f"no answer of the API server: {error!r}") from error
