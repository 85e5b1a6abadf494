# Images of Headgate: `gateway` (gateway, jobs, migrations; no torch), `worker` (CPU) and `worker-cuda`.
#
#   docker build --target gateway -t headgate/gateway .
#   docker build --target worker -t headgate/worker .
#   docker build --target worker-cuda -t headgate/worker-cuda .
#
# Every image runs as user 10001 with a read-only root: state is in /var/lib/headgate, short-lived files are in /tmp.
# Python is Debian's, so that one source gives it its security updates. tests/packaging builds the images.
ARG DEBIAN=trixie

FROM debian:${DEBIAN}-slim AS python
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates python3 \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log

# What builds stays in these stages.
FROM python AS build
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY accounting accounting
COPY cache cache
COPY gateway gateway
COPY kernels kernels
COPY migrations migrations
COPY ops/demo_model ops/demo_model
COPY workers workers
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /dist . \
 && python3 -m venv --without-pip /opt/headgate

FROM build AS gateway-install
RUN /opt/build/bin/pip --python /opt/headgate/bin/python install --no-cache-dir \
      -c requirements/constraints.txt "headgate[postgres] @ file://$(echo /dist/*.whl)" \
 && ln -s "$(echo /opt/headgate/lib/python3*/site-packages/workers/demo_model/model)" /opt/headgate/headgate-demo

FROM gateway-install AS worker-install
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN /opt/build/bin/pip --python /opt/headgate/bin/python install --no-cache-dir \
      --extra-index-url "${TORCH_INDEX}" -c requirements/constraints.txt torch \
 && /opt/build/bin/pip --python /opt/headgate/bin/python install --no-cache-dir \
      -c requirements/constraints.txt "headgate[worker,embedded,postgres] @ file://$(echo /dist/*.whl)"

FROM gateway-install AS worker-cuda-install
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev \
 && rm -rf /var/lib/apt/lists/* \
 && /opt/build/bin/pip --python /opt/headgate/bin/python install --no-cache-dir \
      -c requirements/constraints.txt "headgate[gpu,embedded,postgres] @ file://$(echo /dist/*.whl)"
# Triton compiles one small module in C at the first use of a GPU. It is compiled here, so that no image has a compiler.
# Its key in the cache has what platform.architecture() says, so this stage must not have the program `file` either.
COPY ops/docker/triton_driver.py /tmp/triton_driver.py
ENV TRITON_LIBCUDA_PATH=/usr/lib/x86_64-linux-gnu
RUN /opt/headgate/bin/python /tmp/triton_driver.py /opt/headgate/triton

FROM python AS base
LABEL org.opencontainers.image.title="Headgate" org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 headgate \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/headgate --shell /usr/sbin/nologin headgate \
 && install -d -o 10001 -g 10001 -m 0700 /var/lib/headgate \
 && find / -xdev -perm /6000 -type f -exec chmod a-s {} +
ENV PATH=/opt/headgate/bin:$PATH HOME=/var/lib/headgate HEADGATE_HOME=/var/lib/headgate \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
COPY ops/docker/healthy.py ops/docker/drain.py /usr/local/lib/headgate/
VOLUME /var/lib/headgate
USER 10001:10001
ENTRYPOINT ["headgate"]

# `headgate backup` and `restore` run pg_dump and pg_restore, which must not be older than the server. The client of trixie is
# 17, as the server of ops/compose; with DEBIAN=bookworm it is 15. A server that is newer than both needs a client of PGDG's.
FROM base AS gateway-base
# hadolint ignore=DL3002
USER 0:0
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends postgresql-client \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log \
 && find / -xdev -perm /6000 -type f -exec chmod a-s {} +
USER 10001:10001

FROM gateway-base AS gateway
COPY --from=gateway-install /opt/headgate /opt/headgate
ENV HEADGATE_BIND=0.0.0.0:8080 HEADGATE_OPS_BIND=0.0.0.0:9300
EXPOSE 8080 9300
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python3", "/usr/local/lib/headgate/healthy.py", "9300"]
CMD ["gateway"]

FROM base AS worker
COPY --from=worker-install /opt/headgate /opt/headgate
ENV HEADGATE_OPS_BIND=0.0.0.0:9400 NUMBA_CACHE_DIR=/tmp/numba HF_HOME=/var/lib/headgate/huggingface
EXPOSE 7000 9400
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s CMD ["python3", "/usr/local/lib/headgate/healthy.py", "9400"]
CMD ["worker"]

FROM base AS worker-cuda
COPY --from=worker-cuda-install /opt/headgate /opt/headgate
ENV HEADGATE_OPS_BIND=0.0.0.0:9400 NUMBA_CACHE_DIR=/tmp/numba HF_HOME=/var/lib/headgate/huggingface \
    TRITON_CACHE_DIR=/var/lib/headgate/triton TRITON_LIBCUDA_PATH=/usr/lib/x86_64-linux-gnu \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --chmod=0555 ops/docker/worker-cuda.sh /usr/local/bin/worker-cuda
EXPOSE 7000 9400
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s CMD ["python3", "/usr/local/lib/headgate/healthy.py", "9400"]
ENTRYPOINT ["/usr/local/bin/worker-cuda"]
CMD ["worker"]
