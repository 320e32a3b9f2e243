# The gateway: HTTP, routing, admission. No torch, no engine.
#   docker build -f deploy/gateway.Dockerfile -t kvgate-gateway:0.1.0 .
ARG BASE=python:3.11.13-slim-bookworm

FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/kvgate
WORKDIR /source
COPY requirements/cpu.txt requirements/
# What the pinned set says, in the versions that the tests ran with.
COPY pyproject.toml README.md LICENSE ./
COPY kvgate kvgate
COPY gateway gateway
COPY kvcontrol kvcontrol
COPY engines engines
COPY lab lab
RUN /opt/kvgate/bin/pip install --constraint requirements/cpu.txt '.[fast,postgres,redis,tracing]' \
    && find /opt/kvgate -name __pycache__ -type d -prune -exec rm -rf {} +

FROM ${BASE}
RUN groupadd --gid 10001 kvgate \
    && useradd --uid 10001 --gid kvgate --no-create-home --home-dir /state kvgate \
    && install -d -o kvgate -g kvgate /state
COPY --from=build /opt/kvgate /opt/kvgate
ENV PATH=/opt/kvgate/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1 \
    KVGATE_HOST=0.0.0.0 \
    KVGATE_STATE_DIR=/state
USER 10001:10001
WORKDIR /state
VOLUME /state
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=6 \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/healthz', timeout=2)"]
ENTRYPOINT ["kvgate"]
CMD ["gateway"]
