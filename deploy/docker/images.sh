#!/usr/bin/env bash
# Builds the image of every role: images.sh binaries|source [ROLE...]. They are called laneway-ROLE:TAG.
#
#   TAG    local
#   BASE   what they are built on: debian:bookworm-slim where a registry can be reached, else what base.sh makes
#   RUST   for `source`: rust:1.95-bookworm, else what base.sh makes
set -euo pipefail
cd "$(dirname "$0")/../.."
target=${1:?binaries or source}
shift
[ $# -gt 0 ] || set -- gateway engine-manager worker

# The image, if it is here or can be pulled; else one of our own.
found() {
    if docker image inspect "$1" >/dev/null 2>&1 || timeout 300 docker pull -q "$1" >/dev/null 2>&1; then
        echo "$1"
    else
        deploy/docker/base.sh "$2" >&2
        echo "$3"
    fi
}
base=${BASE:-$(found debian:bookworm-slim runtime laneway-base:bookworm)}
arguments=(--build-arg "BASE=$base" --build-arg "REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)"
    --build-arg "VERSION=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)")
if [ "$target" = source ]; then
    arguments+=(--build-arg "RUST=${RUST:-$(found rust:1.95-bookworm rust laneway-rust:bookworm)}")
fi
for role in "$@"; do
    docker build -q --target "$target" "${arguments[@]}" -f "deploy/docker/$role.Dockerfile" -t "laneway-$role:${TAG:-local}" . >/dev/null
    echo "laneway-$role:${TAG:-local} on $base: $(docker image inspect -f '{{.Size}}' "laneway-$role:${TAG:-local}") bytes"
done
