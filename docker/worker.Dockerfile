# The worker: torch and the model. VARIANT=cpu or cuda; docs/deploy-compose.md says how to build and run the latter.
ARG PYTHON_IMAGE=python:3.11.15-slim-bookworm
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu22.04
ARG VARIANT=cpu

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY docker/locks/build.txt ./
RUN pip install --no-cache-dir --no-deps --require-hashes --requirement build.txt
COPY pyproject.toml setup.py README.md LICENSE ./
COPY protos protos
COPY services/common services/common
COPY services/worker services/worker
RUN TOKA_SERVICE=worker pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM ${PYTHON_IMAGE} AS base-cpu
ENV LOCK=worker

# Without what no kernel is linked with, which is most of it: libraries are linked dynamically.
FROM ${CUDA_IMAGE} AS toolkit
RUN find -L /usr/local/cuda/lib64 -name '*_static*.a' ! -name 'libcud*' -delete && \
    rm -rf /usr/local/cuda/compute-sanitizer /usr/local/cuda/nsight* /usr/local/cuda/extras /usr/local/cuda/gds

# Kernels are compiled at the first start: Triton needs a C compiler for it, FlashInfer nvcc and ninja, too.
FROM ${PYTHON_IMAGE} AS base-cuda
RUN apt-get update && apt-get install -y --no-install-recommends g++ ninja-build && rm -rf /var/lib/apt/lists/*
COPY --from=toolkit /usr/local/cuda/ /usr/local/cuda/
ENV LOCK=worker-cuda CUDA_HOME=/usr/local/cuda PATH=/usr/local/cuda/bin:${PATH}

FROM base-${VARIANT}
RUN useradd --system --create-home --uid 10001 toka
# The lock takes torch's build for CUDA or, from an index that PIP_EXTRA_INDEX_URL adds, the one for CPUs. TORCH="torch==..."
# puts another build of the same version in its place, which no hash holds (docs/deploy-compose.md).
ARG PIP_EXTRA_INDEX_URL
ARG TORCH=""
RUN --mount=type=bind,source=docker/locks,target=/locks \
    if [ -n "${TORCH}" ]; then pip install --no-cache-dir ${TORCH}; fi && \
    pip install --no-cache-dir --no-deps --require-hashes --requirement /locks/${LOCK}.txt && \
    (pip check || pip install --no-cache-dir --no-deps --require-hashes --requirement /locks/torch-cuda.txt) && \
    find /usr/local/lib -path '*/site-packages/*' -type d -name tests -prune -exec rm -r {} +
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-deps --no-index /wheels/*.whl && pip check
# Compose mounts a volume here, which begins with this owner and mode: compiled kernels outlive the container.
RUN install -d -o toka -m 700 /cache
USER toka
ENV TOKA_WORKER_LISTEN=0.0.0.0:10410 TOKA_COMPILE_CACHE_DIR=/cache HF_HOME=/cache/huggingface \
    PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1
EXPOSE 10410
HEALTHCHECK --interval=5s --timeout=15s --start-period=180s --retries=5 \
    CMD ["python", "-m", "services.common.rpc.probe", "127.0.0.1:10410"]
ENTRYPOINT ["python", "-m", "services.common.process.init", "toka-worker"]
