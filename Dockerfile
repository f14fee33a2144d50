# syntax=docker/dockerfile:1
# Two images of the OpenAI-compatible server:
#   docker build --target cuda -t vllm-hybrid .          NVIDIA GPUs (the default target)
#   docker build --target cpu  -t vllm-hybrid:cpu .      no GPU needed
# Both run as a user without rights; mount models at /models and a cache at /home/vllm/.cache
# (docs/deployment.md).
# Of CUDA 13, as torch's own libraries; Ubuntu 24.04 has Python 3.12.
ARG CUDA_VERSION=13.0.1
ARG UBUNTU_VERSION=24.04
ARG PYTHON_VERSION=3.12

# --- wheel with both libraries -------------------------------------------------------------------
FROM nvidia/cuda:${CUDA_VERSION}-devel-ubuntu${UBUNTU_VERSION} AS build-cuda
ARG MAX_JOBS=4
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 VIRTUAL_ENV=/opt/venv
ENV PATH=/opt/venv/bin:$PATH
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
WORKDIR /src
# Dependencies first: this layer stays when only sources change.
COPY requirements/constraints.txt requirements/constraints.txt
RUN pip install -c requirements/constraints.txt \
      "$(grep '^torch==' requirements/constraints.txt)" setuptools wheel cmake ninja
COPY . .
RUN VLLM_TARGET_DEVICE=cuda MAX_JOBS=${MAX_JOBS} pip wheel --no-build-isolation --no-deps -w /dist .

# --- wheel with the CPU library ------------------------------------------------------------------
FROM python:${PYTHON_VERSION}-slim-bookworm AS build-cpu
ARG MAX_JOBS=4
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PIP_NO_CACHE_DIR=1
# pip reads it: where a CPU build of torch is found. Unset takes the usual one, with CUDA libraries.
ARG PIP_EXTRA_INDEX_URL
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && python -m venv /opt/venv
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH
WORKDIR /src
COPY requirements/constraints.txt requirements/constraints.txt
# The version comes from the constraints file.
# hadolint ignore=DL3013
RUN pip install "$(grep '^torch==' requirements/constraints.txt)" \
    && pip install -c requirements/constraints.txt setuptools wheel cmake ninja
COPY . .
RUN VLLM_TARGET_DEVICE=cpu MAX_JOBS=${MAX_JOBS} pip wheel --no-build-isolation --no-deps -w /dist . \
    && pip install -c requirements/constraints.txt /dist/*.whl \
    && pip uninstall -y cmake ninja

# --- CPU server ----------------------------------------------------------------------------------
FROM python:${PYTHON_VERSION}-slim-bookworm AS cpu
RUN useradd --create-home --uid 1001 vllm && install -d -o vllm -g vllm /models /home/vllm/.cache
COPY --from=build-cpu /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
USER 1001
WORKDIR /home/vllm
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=10m --retries=4 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["vllm", "serve"]
CMD ["--help"]

# --- CUDA server (the default) -------------------------------------------------------------------
# torch brings its own CUDA libraries; the base image brings the driver's interface. The torch is the one
# that everything was measured and tested with on GPUs, with its Triton (requirements/triton.txt); the
# wheel runs with any from it on.
FROM nvidia/cuda:${CUDA_VERSION}-base-ubuntu${UBUNTU_VERSION} AS cuda
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive
# gcc and Python's headers: Triton compiles its launcher at run time. The image comes with a user of
# id 1000, so ours takes the next.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1001 vllm && install -d -o vllm -g vllm /models /home/vllm/.cache \
    && python3 -m venv /opt/venv
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 \
    TRITON_CACHE_DIR=/home/vllm/.cache/triton
ARG TORCH_VERSION=2.11.0
RUN --mount=type=bind,from=build-cuda,source=/dist,target=/dist \
    --mount=type=bind,from=build-cuda,source=/src/requirements,target=/requirements \
    grep -vE '^(torch|setuptools)==' /requirements/constraints.txt > /tmp/constraints.txt \
    && pip install --no-cache-dir -c /tmp/constraints.txt "torch==${TORCH_VERSION}" /dist/*.whl \
    && rm /tmp/constraints.txt
USER 1001
WORKDIR /home/vllm
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=10m --retries=4 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["vllm", "serve"]
CMD ["--help"]
