#!/usr/bin/env bash
# Packs what a machine with a GPU needs beside the tree: bundle.sh PROGRAM VOCABULARY OUTPUT
set -euo pipefail

program=$1
vocabulary=$2
output=$3
limit_bytes=${LIMIT_BYTES:-$((16 << 20))}

rm -rf "$output"
mkdir -p "$output/unpacked/qwen-tokenizer"
strip --strip-all -o "$output/unpacked/laneway" "$program"
cp "$vocabulary/vocab.json" "$vocabulary/merges.txt" "$output/unpacked/qwen-tokenizer/"
size=$(stat -c %s "$output/unpacked/laneway")
if [ "$size" -ge "$limit_bytes" ]; then
    echo "laneway is $size bytes stripped; a bundle's program stays below $limit_bytes" >&2
    exit 1
fi
# Compressed: tree and bundle travel together.
tar -C "$output/unpacked" -cJf "$output/bundle.tar.xz" laneway qwen-tokenizer
rm -r "$output/unpacked"
here=$(dirname "$0")
cp "$here/run.sh" "$here/README.txt" "$output/"
echo "program $size bytes; bundle $(stat -c %s "$output/bundle.tar.xz") bytes in $output"
