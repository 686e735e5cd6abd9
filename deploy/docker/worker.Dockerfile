# One rank of a deployment. LANEWAY_ADVERTISE names the host that others dial.
#
# No CUDA library is in it. For a GPU, build it on NVIDIA's runtime image (--build-arg BASE=nvidia/cuda:13.0.1-runtime-ubuntu24.04), or
# mount a directory with libnvrtc.so.13 and name it in LANEWAY_NVRTC_DIR. Kernels and fetched weights are kept in
# /var/cache/laneway: mount a volume there.
#
# Two targets: `binaries` takes what `make dist` built, `source` builds it here. Stages that a target does not need are
# below it, because Docker's classic builder makes every stage above.
ARG BASE=debian:bookworm-slim
ARG RUST=rust:1.95-bookworm

FROM ${BASE} AS runtime
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Laneway worker" \
      org.opencontainers.image.description="Serves one rank of a Laneway deployment" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
ENV LANEWAY_LISTEN=0.0.0.0:7071 \
    LANEWAY_METRICS_LISTEN=0.0.0.0:9464 \
    XDG_CACHE_HOME=/var/cache/laneway \
    HF_HOME=/var/cache/laneway/hub \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 7071 9464
COPY --chown=65532:65532 deploy/docker/cache/ /var/cache/laneway/
VOLUME ["/var/cache/laneway"]
USER 65532:65532
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=600s --retries=3 \
    CMD ["/usr/local/bin/laneway", "health", "127.0.0.1:7071"]
ENTRYPOINT ["/usr/local/bin/laneway-worker"]

FROM runtime AS binaries
COPY target/dist/laneway target/dist/laneway-worker /usr/local/bin/

# The stages from here to `source` are the same in every role, so that one build makes all of them.
FROM ${RUST} AS skeleton
WORKDIR /src
COPY . .
RUN deploy/docker/skeleton.sh /src /skeleton

FROM ${RUST} AS dependencies
WORKDIR /src
COPY --from=skeleton /skeleton .
RUN cargo build --locked --release --bins

FROM dependencies AS builder
COPY . .
# Sources may be older than the empty ones that were built in their place.
RUN find crates integration-tests -name '*.rs' -exec touch {} + \
    && cargo build --locked --release --bins \
    && mkdir /dist \
    && for program in laneway laneway-gateway laneway-engine-manager laneway-worker; do \
           strip -o "/dist/$program" "target/release/$program"; \
       done

FROM runtime AS source
COPY --from=builder /dist/laneway /dist/laneway-worker /usr/local/bin/
