# The deployment's owner. It reads the deployment's file and the configuration files of the model.
#
# Two targets: `binaries` takes what `make dist` built, `source` builds it here. Stages that a target does not need are
# below it, because Docker's classic builder makes every stage above.
ARG BASE=debian:bookworm-slim
ARG RUST=rust:1.95-bookworm

FROM ${BASE} AS runtime
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Laneway engine-manager" \
      org.opencontainers.image.description="Reads a Laneway deployment, plans it, and tells who serves it" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
ENV LANEWAY_CONFIG=/etc/laneway/deployment.yaml \
    LANEWAY_LISTEN=0.0.0.0:7070 \
    LANEWAY_METRICS_LISTEN=0.0.0.0:9464
EXPOSE 7070 9464
USER 65532:65532
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=10s --retries=3 \
    CMD ["/usr/local/bin/laneway", "health", "127.0.0.1:7070"]
ENTRYPOINT ["/usr/local/bin/laneway-engine-manager"]

FROM runtime AS binaries
COPY target/dist/laneway target/dist/laneway-engine-manager /usr/local/bin/

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
COPY --from=builder /dist/laneway /dist/laneway-engine-manager /usr/local/bin/
