#!/bin/sh
# Copies the manifests of a workspace, with empty sources where they name targets: skeleton.sh FROM TO. What is built of
# it is every dependency and nothing of ours, so that an image keeps it in a layer that only manifests change.
set -eu
from=$1 to=$2
cd "$from"
find . \( -path ./target -prune \) -o -type f \
    \( -name Cargo.toml -o -name Cargo.lock -o -name rust-toolchain.toml -o -name build.rs -o -path '*/src/lib.rs' \
    -o -path '*/src/main.rs' -o -path '*/src/bin/*.rs' -o -path '*/benches/*.rs' -o -path '*/tests/*.rs' \) -print |
    while read -r path; do
        mkdir -p "$to/$(dirname "$path")"
        case $path in
        *.rs) echo 'fn main() {}' >"$to/$path" ;;
        *) cp "$path" "$to/$path" ;;
        esac
    done
