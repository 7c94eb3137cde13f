# The worker: torch and the model. CPU by default; see docs/operations.md for CUDA.
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY protos protos
COPY services/common services/common
COPY services/worker services/worker
RUN TOKA_SERVICE=worker pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${PYTHON_IMAGE}
RUN useradd --system --create-home --uid 10001 toka
# Pinned apart: the layer with torch is the large one and changes least. For a build without CUDA libraries pass the
# CPU build's version and index (docs/operations.md).
ARG TORCH="torch==2.13.0"
RUN pip install --no-cache-dir ${TORCH}
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(ls /wheels/*.whl)[worker]"
USER toka
ENV TOKA_WORKER_LISTEN=0.0.0.0:10410 PYTHONUNBUFFERED=1
EXPOSE 10410
HEALTHCHECK --interval=3s --timeout=5s --start-period=180s --retries=5 \
    CMD ["python", "-m", "services.common.rpc.probe", "127.0.0.1:10410"]
ENTRYPOINT ["toka-worker"]
