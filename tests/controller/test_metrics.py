"""The controller's own /metrics: readable without a key, with route templates as labels, and
without names of runs or jobs."""

import socket
import uuid

import httpx

from api_server import KEY, Server, claim, rl_request, sft_request
from metrics.metric_tools import Scraped
from tandem.metrics.catalogue import CATALOGUE
from waiting import until


def scrape(server: Server) -> Scraped:
    """Reads /metrics without a key, as Prometheus does."""
    answer = httpx.get(f"{server.url}/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return Scraped(answer.text)


def get(server: Server, name: str, /, **labels: str) -> float:
    return scrape(server).get(name, **labels) or 0.0


def requests(server: Server, route: str, method: str = "GET", status: str = "2xx") -> float:
    return get(
        server, "tandem_http_requests_total", route=route, method=method, status_class=status
    )


def test_the_series_are_those_of_the_catalogue(server):
    until(
        "collectors ran", lambda: get(server, "tandem_collector_success", collector="volumes") == 1
    )
    known = {metric.name for metric in CATALOGUE if "controller" in metric.exporters}
    seen = scrape(server)
    names = seen.names
    base_names = {
        name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        for name in names - known
    }
    assert base_names <= known
    assert known - names <= {"tandem_http_request_duration_seconds"}
    labels = {"route": "/v1/runs/{run}/train", "method": "POST", "status_class": "5xx"}
    assert labels in seen.all("tandem_http_requests_total")
    assert get(server, "tandem_volume_free_bytes", volume="shared") > 0
    # The controller downloads the tokenizer.
    assert get(server, "tandem_volume_free_bytes", volume="downloads") > 0


def test_requests_are_counted_by_template_method_and_status(server, http, run):
    before = requests(server, "/v1/runs/{run}"), requests(server, "/v1/runs/{run}", status="4xx")
    others = requests(server, "other", status="4xx")
    secret = uuid.uuid4().hex
    assert http.get(f"/v1/runs/{run}").status_code == 200
    assert http.get(f"/v1/runs/{secret}").status_code == 404
    assert http.get(f"/{secret}?key={secret}").status_code == 404
    assert http.request("PROPFIND", "/v1/runs").status_code == 405
    # This request has no key, so it is refused before it reaches a route.
    assert httpx.get(f"{server.url}/v1/runs").status_code == 401
    # A request is counted after its answer has been sent.
    until("the last one is counted", lambda: requests(server, "other", status="4xx") == others + 2)
    assert requests(server, "/v1/runs/{run}") == before[0] + 1
    assert requests(server, "/v1/runs/{run}", status="4xx") == before[1] + 1
    assert requests(server, "/v1/runs", "other", "4xx") >= 1
    text = httpx.get(f"{server.url}/metrics").text
    for private in (secret, KEY, str(server.spool.root)):
        assert private not in text
    assert get(server, "tandem_http_request_duration_seconds_count", route="/v1/runs/{run}") >= 2


def test_a_client_that_hangs_up_is_not_counted_as_an_error_of_the_controller(server, run):
    def counted(status: str) -> float:
        return requests(server, "/v1/runs/{run}/train", "POST", status)

    before, errors = counted("4xx"), counted("5xx")
    url = httpx.URL(server.url)
    head = (
        f"POST /v1/runs/{run}/train HTTP/1.1\r\nHost: {url.host}\r\nAuthorization: Bearer {KEY}\r\n"
    )
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(
            f"{head}Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{{".encode()
        )
    until("it is counted", lambda: counted("4xx") == before + 1)
    assert counted("5xx") == errors


def test_jobs_are_counted_once_by_kind_and_by_state(server, http, run):
    def jobs() -> list[float]:
        for collector in server.app.state.collectors:
            collector.collect_once()
        return [get(server, "tandem_jobs", state=state) for state in ("queued", "running")]

    queued, running = jobs()
    before = {kind: get(server, "tandem_jobs_submitted_total", kind=kind) for kind in ("rl", "sft")}
    body = rl_request(id=f"job-{run}")
    train = f"/v1/runs/{run}/train"
    assert http.post(train, json=body).status_code == 202
    assert http.post(train, json=body).status_code == 200  # this request submits the same job again
    assert http.post(train, json={"kind": "rl"}).status_code == 422
    assert http.post(train, json=sft_request()).status_code == 202
    for kind in ("rl", "sft"):
        assert get(server, "tandem_jobs_submitted_total", kind=kind) == before[kind] + 1
    until("both are queued", lambda: jobs() == [queued + 2, running])
    claim(server.spool)
    until("one runs", lambda: jobs() == [queued + 1, running + 1])
    assert get(server, "tandem_runs") >= 1


def test_event_streams_do_not_count_as_slow_requests(server, http, run):
    route = "/v1/jobs/{job}/events"
    timed = get(server, "tandem_http_request_duration_seconds_count", route=route)
    http.post(f"/v1/runs/{run}/train", json=rl_request(id=f"job-{run}"))
    assert http.get(f"/v1/jobs/job-{run}/events", params={"wait": False}).status_code == 200
    until("it is counted", lambda: requests(server, route) >= 1)
    assert get(server, "tandem_http_request_duration_seconds_count", route=route) == timed
