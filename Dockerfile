# One file, three images: `docker build --target controller|trainer|inference [--build-arg DEVICE=cpu] .`
#
# The base image is plain Debian: torch's wheels contain the CUDA libraries, and the NVIDIA runtime mounts the driver.
# The layers that change least come first: Debian, CUDA libraries, torch, the role's packages, Tandem. Trainer and
# inference have the same layers up to torch, so that these layers are stored and pulled once.
#
# The base image is named by its tag: a digest would exclude Debian's later security fixes, and only a registry knows
# the digest. To pin a digest: `docker buildx imagetools inspect debian:trixie-slim`, then `--build-arg
# BASE=debian:trixie-slim@sha256:...`.
ARG BASE=debian:trixie-slim
ARG DEVICE=cuda

# ---------------------------------------------------------------- the base of every image
FROM ${BASE} AS base
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends ca-certificates python3 \
 && rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/*.log /var/log/apt \
 # New volumes get the owner and the mode of these directories. Group 0 may write, so any user of group 0 works.
 && echo 'tandem:x:2000:0:Tandem:/tmp:/usr/sbin/nologin' >>/etc/passwd \
 && install -d -m 2775 -o 2000 -g 0 /data /cache /private-cache /run/tandem
ENV PATH=/opt/tandem/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 \
    # The root file system is read-only, so programs write only to volumes, /tmp and /run/tandem.
    HOME=/tmp USER=tandem LOGNAME=tandem PYTHONDONTWRITEBYTECODE=1 \
    XDG_RUNTIME_DIR=/run/tandem XDG_CACHE_HOME=/cache XDG_CONFIG_HOME=/cache/config \
    HF_HOME=/cache/huggingface \
    # A container has no GPU by default. The CUDA images of trainer and inference override this variable.
    NVIDIA_VISIBLE_DEVICES=void \
    PROMETHEUS_DISABLE_CREATED_SERIES=True \
    TANDEM_ROOT=/data TANDEM_LOG_DIR=/run/tandem/logs TANDEM_METRICS_HOST=0.0.0.0
LABEL org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="docker.io/library/debian:trixie-slim"
STOPSIGNAL SIGTERM

# ---------------------------------------------------------------- build tools, which no final image contains
FROM base AS uv
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/*
COPY images/build.txt /build.txt
RUN python3 -m venv /uv \
 && for try in 1 2 3 4 5; do /uv/bin/pip install -q --no-cache-dir --require-hashes -r /build.txt && exit 0; sleep 5; done; exit 1

FROM uv AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN --mount=type=cache,target=/root/.cache/uv \
    for try in 1 2 3 4 5; do \
        /uv/bin/uv build --cache-dir /root/.cache/uv --wheel --out-dir /wheel --build-constraints /build.txt --require-hashes && exit 0; \
        sleep 5; \
    done; exit 1

# `sync-locked EXTRA [uv options]` installs the locked packages of one extra into /opt/tandem. It tries five times,
# because a package index may refuse for a moment.
FROM base AS locked
COPY images/sync /usr/local/bin/sync-locked

# ---------------------------------------------------------------- controller
FROM locked AS controller-packages
RUN --mount=type=cache,target=/root/.cache/uv --mount=type=bind,from=uv,source=/uv,target=/uv \
    --mount=type=bind,source=pyproject.toml,target=/project/pyproject.toml \
    --mount=type=bind,source=uv.lock,target=/project/uv.lock \
    sync-locked controller --extra kubernetes

FROM controller-packages AS controller
RUN --mount=type=cache,target=/root/.cache/uv --mount=type=bind,from=uv,source=/uv,target=/uv \
    --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    /uv/bin/uv pip install -q --compile-bytecode --cache-dir /root/.cache/uv --python /opt/tandem --no-deps /wheel/*.whl \
 # uv leaves lock files that every user may write to.
 && rm -f /opt/tandem/.lock /tmp/uv-*.lock
COPY examples /opt/tandem/examples
COPY --chmod=755 entrypoints/controller /entrypoint
ENV TANDEM_ROLE=controller TANDEM_CONTROLLER_HOST=0.0.0.0
RUN python -c "import tandem.controller.app, tandem.cli, tandem.client, transformers, supervisor, tandem.trainer.executor.kubernetes; from importlib.util import find_spec; assert not find_spec('torch')"
USER 2000:0
WORKDIR /tmp
EXPOSE 8080
HEALTHCHECK --interval=15s --timeout=10s --start-period=60s --retries=3 CMD ["python", "-m", "tandem.supervise.health"]
ENTRYPOINT ["/entrypoint"]
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CREATED=unknown
ENV TANDEM_REVISION=${REVISION}
LABEL org.opencontainers.image.title="tandem-controller" \
      org.opencontainers.image.description="Tandem's HTTP API: runs, jobs, checkpoints" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"

# ---------------------------------------------------------------- torch, for trainer and inference

# Triton and torch.compile compile code for the host when they first run, which needs these packages.
FROM locked AS compilers
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends g++ libc6-dev python3-dev libnuma1 \
 && rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/*.log /var/log/apt

FROM compilers AS torch-cuda
RUN --mount=type=cache,target=/root/.cache/uv --mount=type=bind,from=uv,source=/uv,target=/uv \
    --mount=type=bind,source=pyproject.toml,target=/project/pyproject.toml \
    --mount=type=bind,source=uv.lock,target=/project/uv.lock \
    sync-locked gpu-container --no-install-package torch --no-install-package triton
RUN --mount=type=cache,target=/root/.cache/uv --mount=type=bind,from=uv,source=/uv,target=/uv \
    --mount=type=bind,source=pyproject.toml,target=/project/pyproject.toml \
    --mount=type=bind,source=uv.lock,target=/project/uv.lock \
    sync-locked gpu-container
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility TANDEM_DEVICE=cuda \
    # FlashInfer's sampler would be compiled with nvcc at the first request. vLLM would not use it for the log-probs
    # that Tandem requests.
    VLLM_USE_FLASHINFER_SAMPLER=0

# The import of PyPI's torch needs its CUDA libraries. The libraries that are loaded at the first use of a GPU are
# deleted.
FROM compilers AS torch-cpu
RUN --mount=type=cache,target=/root/.cache/uv --mount=type=bind,from=uv,source=/uv,target=/uv \
    --mount=type=bind,source=pyproject.toml,target=/project/pyproject.toml \
    --mount=type=bind,source=uv.lock,target=/project/uv.lock \
    sync-locked gpu-container \
 && cd /opt/tandem/lib/python3*/site-packages \
 && rm -rf triton/backends/nvidia/bin triton/backends/nvidia/lib/cupti \
 && cd nvidia \
 && rm -f cudnn/lib/libcudnn_[!.]* cu13/lib/libnvrtc.alt* cu13/lib/libnvrtc-builtins* cu13/lib/libcusolverMg* \
          cu13/lib/libnvperf* nvshmem/lib/*.bc nvshmem/lib/*.a nvshmem/lib/nvshmem_*
ENV TANDEM_DEVICE=cpu

FROM torch-${DEVICE} AS torch
# Compiled kernels survive a restart. Programs load these files as code, and some files are pickles, so no other
# container mounts their volume.
ENV XDG_CACHE_HOME=/private-cache XDG_CONFIG_HOME=/private-cache/config \
    TORCHINDUCTOR_CACHE_DIR=/private-cache/inductor TRITON_CACHE_DIR=/private-cache/triton \
    VLLM_CACHE_ROOT=/private-cache/vllm VLLM_CONFIG_ROOT=/private-cache/config NUMBA_CACHE_DIR=/private-cache/numba \
    FLASHINFER_WORKSPACE_BASE=/private-cache \
    VLLM_NO_USAGE_STATS=1 HF_HUB_DISABLE_TELEMETRY=1 DO_NOT_TRACK=1

# ---------------------------------------------------------------- trainer
FROM torch AS trainer-packages
RUN --mount=type=cache,target=/root/.cache/uv --mount=type=bind,from=uv,source=/uv,target=/uv \
    --mount=type=bind,source=pyproject.toml,target=/project/pyproject.toml \
    --mount=type=bind,source=uv.lock,target=/project/uv.lock \
    sync-locked trainer --extra delta-nets

FROM trainer-packages AS trainer
RUN --mount=type=cache,target=/root/.cache/uv --mount=type=bind,from=uv,source=/uv,target=/uv \
    --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    /uv/bin/uv pip install -q --compile-bytecode --cache-dir /root/.cache/uv --python /opt/tandem --no-deps /wheel/*.whl \
 # uv leaves lock files that every user may write to.
 && rm -f /opt/tandem/.lock /tmp/uv-*.lock
COPY --chmod=755 entrypoints/trainer /entrypoint
ENV TANDEM_ROLE=trainer
RUN python -c "import tandem.trainer.runner.loop, tandem.metrics.exporter, tandem.supervise.up, tandem.trainer.launch.bootstrap; from tandem.trainer.rank.entry import preload; preload('auto')" \
 # The import makes torch's cache directory as root, and the image's user could not write to it.
 && find /private-cache -mindepth 1 -delete
USER 2000:0
WORKDIR /tmp
EXPOSE 9400
HEALTHCHECK --interval=15s --timeout=10s --start-period=120s --retries=3 CMD ["python", "-m", "tandem.supervise.health"]
ENTRYPOINT ["/entrypoint"]
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CREATED=unknown
ENV TANDEM_REVISION=${REVISION}
LABEL org.opencontainers.image.title="tandem-trainer" \
      org.opencontainers.image.description="Tandem's trainer: Megatron-core ranks that start for a job and exit after it" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"

# ---------------------------------------------------------------- inference
FROM torch AS inference-packages
ARG DEVICE
RUN --mount=type=cache,target=/root/.cache/uv --mount=type=bind,from=uv,source=/uv,target=/uv \
    --mount=type=bind,source=pyproject.toml,target=/project/pyproject.toml \
    --mount=type=bind,source=uv.lock,target=/project/uv.lock \
    if [ "${DEVICE}" = cpu ]; then sync-locked inference-cpu; else sync-locked inference; fi

FROM inference-packages AS inference
# HAProxy distributes requests to several inference servers behind one address.
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends haproxy \
 && rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/*.log /var/log/apt
RUN --mount=type=cache,target=/root/.cache/uv --mount=type=bind,from=uv,source=/uv,target=/uv \
    --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    /uv/bin/uv pip install -q --compile-bytecode --cache-dir /root/.cache/uv --python /opt/tandem --no-deps /wheel/*.whl \
 # uv leaves lock files that every user may write to.
 && rm -f /opt/tandem/.lock /tmp/uv-*.lock
COPY examples /opt/tandem/examples
COPY --chmod=755 entrypoints/inference /entrypoint
# The copies of the adapters that vLLM serves are on a volume, because /tmp is in memory.
ENV TANDEM_ROLE=inference TANDEM_INFERENCE_HOST=0.0.0.0 TMPDIR=/private-cache/tmp \
    # The trainer's metrics port is 9400, and trainer and inference may share a network namespace.
    TANDEM_METRICS_PORT=9401
RUN python -c "import tandem.inference.publisher.publisher, tandem.metrics.exporter, tandem.supervise.up, openai, torch, vllm; from vllm.engine.arg_utils import EngineArgs" \
 && find /private-cache -mindepth 1 -delete
USER 2000:0
WORKDIR /tmp
EXPOSE 8000 9401
HEALTHCHECK --interval=15s --timeout=10s --start-period=1800s --retries=3 CMD ["python", "-m", "tandem.supervise.health"]
ENTRYPOINT ["/entrypoint"]
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CREATED=unknown
ENV TANDEM_REVISION=${REVISION}
LABEL org.opencontainers.image.title="tandem-inference" \
      org.opencontainers.image.description="Tandem's inference: vLLM, and the publisher that loads each step and verifies it" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
