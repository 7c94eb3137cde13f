# The scheduler: numpy and the tokenizer; no torch.
ARG PYTHON_IMAGE=python:3.11.15-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY docker/locks/build.txt ./
RUN pip install --no-cache-dir --no-deps --require-hashes --requirement build.txt
COPY pyproject.toml setup.py README.md LICENSE ./
COPY protos protos
COPY services/common services/common
COPY services/scheduler services/scheduler
RUN TOKA_SERVICE=scheduler pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM ${PYTHON_IMAGE}
RUN useradd --system --create-home --uid 10001 toka
RUN --mount=type=bind,source=docker/locks,target=/locks \
    pip install --no-cache-dir --no-deps --require-hashes --requirement /locks/scheduler.txt && \
    find /usr/local/lib -path '*/site-packages/*' -type d -name tests -prune -exec rm -r {} +
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-deps --no-index /wheels/*.whl && pip check
# Compose mounts a volume here, which begins with this owner and mode.
RUN install -d -o toka -m 700 /recordings
USER toka
ENV TOKA_SCHEDULER_LISTEN=0.0.0.0:10310 HF_HOME=/tmp/huggingface PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1
EXPOSE 10310
HEALTHCHECK --interval=5s --timeout=15s --start-period=180s --retries=5 \
    CMD ["python", "-m", "services.common.rpc.probe", "127.0.0.1:10310"]
ENTRYPOINT ["python", "-m", "services.common.process.init", "toka-scheduler"]
