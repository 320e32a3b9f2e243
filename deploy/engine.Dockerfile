# One engine instance: LMDeploy with kvgate's hooks. TORCH=cpu is the CPU build of torch and the pinned set without CUDA;
# TORCH=auto takes LMDeploy's own requirements for NVIDIA GPUs (several GB).
#   docker build -f deploy/engine.Dockerfile --build-arg TORCH=cpu -t kvgate-engine:0.1.0-cpu .
ARG BASE=python:3.11.13-slim-bookworm

FROM ${BASE} AS build
ARG TORCH=cpu
# A folder or page of wheels, where PyTorch's own index can't be reached.
ARG PIP_FIND_LINKS=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 UV_NO_CACHE=1 UV_NATIVE_TLS=1
RUN python3 -m venv /opt/kvgate && /opt/kvgate/bin/pip install 'uv==0.9.5'
WORKDIR /source
COPY requirements/cpu.txt requirements/
COPY pyproject.toml README.md LICENSE ./
COPY deploy/install_engine deploy/
COPY kvgate kvgate
COPY gateway gateway
COPY kvcontrol kvcontrol
COPY engines engines
COPY lab lab
RUN deploy/install_engine "${TORCH}" /opt/kvgate

FROM ${BASE}
# gcc compiles kvgate's checksums once, and Triton's launchers on a GPU.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 kvgate \
    && useradd --uid 10001 --gid kvgate --no-create-home --home-dir /state kvgate \
    && install -d -o kvgate -g kvgate /state /models /tiers
COPY --from=build /opt/kvgate /opt/kvgate
COPY deploy/prepare_model.py /opt/kvgate/prepare_model.py
ENV PATH=/opt/kvgate/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    KVGATE_CACHE_DIR=/models \
    KVGATE_STATE_DIR=/state
USER 10001:10001
WORKDIR /state
VOLUME ["/state", "/models", "/tiers"]
EXPOSE 23333 5557 5558
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:23333/health', timeout=4)"]
ENTRYPOINT ["kvgate"]
CMD ["engine", "--help"]
