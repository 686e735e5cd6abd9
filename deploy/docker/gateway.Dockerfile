# The public API.
#
# Two targets: `binaries` takes what `make dist` built, `source` builds it here. Stages that a target does not need are
# below it, because Docker's classic builder makes every stage above.
ARG BASE=debian:bookworm-slim
ARG RUST=rust:1.95-bookworm

FROM ${BASE} AS runtime
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Laneway gateway" \
      org.opencontainers.image.description="The public API of Laneway: gRPC, OpenAI speech, Riva, and a page" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
ENV LANEWAY_GATEWAY_LISTEN=0.0.0.0:8080 \
    LANEWAY_METRICS_LISTEN=0.0.0.0:9464
EXPOSE 8080 9464
USER 65532:65532
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=10s --retries=3 \
    CMD ["/usr/local/bin/laneway", "health", "127.0.0.1:8080"]
ENTRYPOINT ["/usr/local/bin/laneway-gateway"]

FROM runtime AS binaries
COPY target/dist/laneway target/dist/laneway-gateway /usr/local/bin/

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
COPY --from=builder /dist/laneway /dist/laneway-gateway /usr/local/bin/
