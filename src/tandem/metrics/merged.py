"""Merged serving: whether vLLM has whole and verified weights, as its server says, and which runs want to be served."""

from typing import get_args

from pydantic import ValidationError

from tandem.config import Settings
from tandem.errors import TandemError
from tandem.metrics.collector import OpenSpool, SpoolCollector
from tandem.metrics.metric import Metric
from tandem.metrics.samples import Samples
from tandem.vllm_client.client import InferenceUnavailable, VllmClient
from tandem.vllm_client.names import MergedPhase

PHASES: tuple[str, ...] = get_args(MergedPhase)
_ANSWER_SECONDS = 5.0


class MergedCollector(SpoolCollector):
    """Asks vLLM's server itself: it answers while the publisher waits for a swap, and without a publisher."""

    name = "merged"
    metrics = (
        Metric("tandem_merged_phase", "1 for the phase of vLLM's merged weights, else 0. Requests are answered in "
               "phase served, wait up to a minute in swapping and unverified, and get 503 in empty (nothing was served "
               "yet) and torn (a swap failed). Absent while vLLM does not answer, and with TANDEM_WEIGHTS=adapter.",
               "GET /tandem/merged", exporters=("inference",), labels={"phase": PHASES}, perishable=True),
        Metric("tandem_merged_runs", "Runs on the volume whose weights are merged into vLLM's; it can serve one. "
               "Absent with TANDEM_WEIGHTS=adapter.", "run.json", exporters=("inference",)),
    )  # fmt: skip

    def __init__(self, open_spool: OpenSpool, settings: Settings) -> None:
        super().__init__(open_spool)
        self._settings = settings
        self._client: VllmClient | None = None

    def collect(self, gauges: Samples) -> None:
        self._client = self._client or VllmClient(self._settings, timeout=_ANSWER_SECONDS)
        try:
            current = self._client.merged()["phase"]
            for phase in PHASES:
                gauges.set("tandem_merged_phase", float(phase == current), phase=phase)
        except InferenceUnavailable:
            pass  # it starts, or is gone: Prometheus' `up` of vLLM says so
        try:
            runs = self.open_spool().runs.list()
            gauges.set("tandem_merged_runs", sum(run.weights == "merged" for run in runs))
        except (TandemError, ValidationError, OSError) as error:
            self.errors.append(str(error))
