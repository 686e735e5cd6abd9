# The nano checkpoint as an image, for clusters that mount images as volumes (deploy/kubernetes/overlays/cpu-demo).
FROM scratch
LABEL org.opencontainers.image.title="Laneway demo model" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY crates/models/demo/nano /nano
