# syntax=docker/dockerfile:1
# Two images: `docker build --target service .` (control plane, no torch) and `docker build --target worker .`.
ARG PYTHON_IMAGE=python:3.11-slim
# Any image that brings its own torch. With Apex: --build-arg WORKER_BASE=nvcr.io/nvidia/pytorch:YY.MM-py3
ARG WORKER_BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime

FROM ${PYTHON_IMAGE} AS build
WORKDIR /build
# Requirements apart from the code: a change of code then reuses the layer that takes minutes to install.
# torch is left out: the worker keeps its base's torch, and a requirement would reject NVIDIA's pre-release versions.
COPY pyproject.toml ./
RUN mkdir /requirements && python -c 'import pathlib, re, tomllib; \
    project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]; \
    extras = project["optional-dependencies"]; service, worker = project["dependencies"], extras["worker"] + extras["parquet"]; \
    worker = [one for one in worker if re.split(r"[^\w.-]", one)[0] != "torch"]; \
    pathlib.Path("/requirements/service.txt").write_text("\n".join(service) + "\n"); \
    pathlib.Path("/requirements/worker.txt").write_text("\n".join(service + worker) + "\n")'
COPY constraints.txt /requirements/
COPY README.md LICENSE ./
COPY migrations ./migrations
COPY service ./service
COPY training ./training
COPY worker ./worker
RUN --mount=type=cache,target=/root/.cache/pip pip wheel --no-deps --wheel-dir /wheels .


FROM ${WORKER_BASE} AS worker
# Triton compiles its launchers at run time: that takes a C compiler and Python's headers, which slim bases lack.
# hadolint ignore=DL3008
RUN headers="$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
 && if ! command -v gcc > /dev/null || [ ! -e "$headers/Python.h" ]; then \
      apt-get update \
   && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev \
   && rm -rf /var/lib/apt/lists/*; \
    fi
# What the base ships stays as it is (torch, and what was built against it); our versions hold for the rest.
# Pip is told so with -c alone: NVIDIA's own PIP_CONSTRAINT says the same and would also bind isolated builds.
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,from=build,source=/requirements,target=/requirements \
    python -m pip list --format=freeze > /tmp/base.txt \
 && grep -q '^torch==' /tmp/base.txt \
 && awk -F== 'function norm(n) { n = tolower(n); gsub(/[._-]+/, "-", n); return n } \
      NR == FNR { base[norm($1)]; print; next } !(norm($1) in base)' \
      /tmp/base.txt /requirements/constraints.txt > /tmp/constraints.txt \
 && PIP_CONSTRAINT="" PIP_BREAK_SYSTEM_PACKAGES=1 \
    python -m pip install -c /tmp/constraints.txt -r /requirements/worker.txt \
 && python -m pip list --format=freeze > /tmp/after.txt \
 && ! grep -vxFf /tmp/after.txt /tmp/base.txt \
 && rm /tmp/base.txt /tmp/after.txt /tmp/constraints.txt
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    PIP_BREAK_SYSTEM_PACKAGES=1 python -m pip install --no-cache-dir --no-deps /wheels/*.whl \
 && python -m worker --help > /dev/null
RUN groupadd --gid 10001 dynotune \
 && useradd --uid 10001 --gid 10001 --create-home dynotune \
 && install -d -o 10001 -g 10001 /var/lib/dynotune /var/lib/dynotune/uploads /var/cache/huggingface /var/lib/dynotune-locks
ENV DYNOTUNE_HOME=/var/lib/dynotune \
    DYNOTUNE_LOCKS=/var/lib/dynotune-locks \
    HF_HOME=/var/cache/huggingface \
    PYTHONUNBUFFERED=1
VOLUME ["/var/lib/dynotune", "/var/cache/huggingface"]
WORKDIR /var/lib/dynotune
USER 10001:10001
# SIGTERM drains: the trial in hand is finished, nothing new is claimed.
STOPSIGNAL SIGTERM
CMD ["dynotune", "worker", "--devices", "all"]


# Last, so that a plain `docker build .` makes the small image.
FROM ${PYTHON_IMAGE} AS service
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,from=build,source=/requirements,target=/requirements \
    pip install -c /requirements/constraints.txt -r /requirements/service.txt
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-deps /wheels/*.whl \
 && python -c 'import importlib.util as u, service.api; assert u.find_spec("torch") is None'
RUN groupadd --gid 10001 dynotune \
 && useradd --uid 10001 --gid 10001 --create-home dynotune \
 && install -d -o 10001 -g 10001 /var/lib/dynotune /var/lib/dynotune/uploads /var/cache/huggingface
ENV DYNOTUNE_HOME=/var/lib/dynotune \
    HF_HOME=/var/cache/huggingface \
    PYTHONUNBUFFERED=1
VOLUME ["/var/lib/dynotune", "/var/cache/huggingface"]
WORKDIR /var/lib/dynotune
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/readyz', timeout=4)"]
# All interfaces of the container; the host decides what is published. Requests need an API key there.
CMD ["dynotune", "serve", "--host", "0.0.0.0", "--port", "8000", "--no-worker"]
