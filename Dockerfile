# syntax=docker/dockerfile:1
# Images of Parrot Gateway; docs/deployment.md tells how to run them.
#
#   docker build --target gateway -t parrot-gateway .        for upstreams: no torch
#   docker build --target cpu -t parrot-gateway:cpu .        own engines on CPUs, the default
#   docker build --target cuda -t parrot-gateway:cuda .      own engines on NVIDIA GPUs
#
# An update of the base is a change of this line.
ARG PYTHON=3.12.12-slim-bookworm

FROM python:${PYTHON} AS wheel
WORKDIR /source
RUN pip install --no-cache-dir "build==1.3.0" "hatchling==1.27.0"
COPY . .
RUN python -m build --wheel --no-isolation --outdir /wheels

FROM python:${PYTHON} AS gateway-packages
RUN python -m venv /opt/parrot
ENV PATH=/opt/parrot/bin:$PATH
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/*.whl)[tracing]"

FROM gateway-packages AS cpu-packages
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --extra-index-url "$TORCH_CPU_INDEX" "$(echo /wheels/*.whl)[engine,tracing]"

FROM gateway-packages AS cuda-packages
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/*.whl)[engine,tracing]"

FROM python:${PYTHON} AS runtime
LABEL org.opencontainers.image.title="Parrot Gateway" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 parrot \
    && useradd --uid 10001 --gid parrot --no-create-home --home-dir /data parrot \
    && install --directory --owner parrot --group parrot /data
# Where clients, probes and Prometheus find it; the key of clients (PARROT_API_KEY) is given at run
# time: without one the gateway refuses to listen beyond its own host.
ENV PATH=/opt/parrot/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PARROT_SERVER_HOST=0.0.0.0 \
    PARROT_SERVER_PORT=8000 \
    PARROT_TELEMETRY_METRICS_HOST=0.0.0.0 \
    PARROT_TELEMETRY_METRICS_PORT=9464 \
    HOME=/data \
    XDG_DATA_HOME=/data \
    XDG_CACHE_HOME=/data/cache \
    HF_HOME=/data/huggingface \
    TRITON_CACHE_DIR=/data/cache/triton
USER 10001:10001
WORKDIR /data
VOLUME /data
EXPOSE 8000 9464
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --start-interval=2s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as http; http.urlopen(f\"http://127.0.0.1:{os.environ['PARROT_SERVER_PORT']}/health/readiness\", timeout=4)"]
# SIGTERM drains: give `docker stop` 30 s more than server.drain_timeout_s (30 s).
STOPSIGNAL SIGTERM
ENTRYPOINT ["parrot-gateway"]
CMD ["serve"]

FROM runtime AS gateway
COPY --from=gateway-packages /opt/parrot /opt/parrot

FROM runtime AS cuda
USER 0
# Triton compiles what launches a kernel with the system's C compiler. Its version is the base's: Debian
# keeps no old ones.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
USER 10001:10001
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=cuda-packages /opt/parrot /opt/parrot

FROM runtime AS cpu
COPY --from=cpu-packages /opt/parrot /opt/parrot
