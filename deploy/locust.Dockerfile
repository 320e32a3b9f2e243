# Locust with the scenarios of loadtests/.
#   docker build -f deploy/locust.Dockerfile -t kvgate-locust:0.1.0 .
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
RUN /opt/kvgate/bin/pip install --constraint requirements/cpu.txt '.[loadtest]' \
    && find /opt/kvgate -name __pycache__ -type d -prune -exec rm -rf {} +

FROM ${BASE}
RUN groupadd --gid 10001 kvgate \
    && useradd --uid 10001 --gid kvgate --no-create-home --home-dir /tmp kvgate
COPY --from=build /opt/kvgate /opt/kvgate
COPY loadtests /loadtests
ENV PATH=/opt/kvgate/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /tmp
EXPOSE 8089
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=6 \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8089/', timeout=2)"]
ENTRYPOINT ["locust", "-f", "/loadtests/locustfile.py"]
