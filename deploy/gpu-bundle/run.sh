#!/usr/bin/env bash
# Run on a machine with a GPU, in a copy of the tree that holds target/gpu-bundle.
#
#   target/gpu-bundle/run.sh [check] [verify] [bench] [laneway ARGUMENTS...]
#
# Without arguments: check, verify, bench. Reports go to $OUT (default: target/gpu-results). What fails does not
# keep the rest from running; the exit code says whether everything passed.
set -uo pipefail

bundle=$(cd "$(dirname "$0")" && pwd)
tree=$(cd "$bundle/../.." && pwd)
OUT=${OUT:-$tree/target/gpu-results}
mkdir -p "$OUT"
if [ ! -x "$bundle/laneway" ] || [ "$bundle/bundle.tar.xz" -nt "$bundle/laneway" ]; then
    tar -C "$bundle" --touch -xJf "$bundle/bundle.tar.xz" || exit 1
fi
export LANEWAY_QWEN_TOKENIZER_DIR=$bundle/qwen-tokenizer
laneway=$bundle/laneway
golden=$tree/integration-tests/golden
failed=()

# step NAME COMMAND...: the whole output to $OUT/NAME.log, its last lines here.
step() {
    local name=$1 began=$SECONDS
    shift
    "$@" >"$OUT/$name.log" 2>&1
    local code=$?
    echo "== $name: exit $code, $((SECONDS - began)) s"
    tail -n "${LINES_SHOWN:-40}" "$OUT/$name.log"
    [ $code -eq 0 ] || failed+=("$name")
}

check() {
    LINES_SHOWN=70 step check "$laneway" kernels check --failed-only --json "$OUT/check.json"
}

verify() {
    local directory precision name
    for directory in tiny tiny/noproj 0.6b 1.7b; do
        for precision in f32 bf16; do
            name=verify-${directory//\//-}-$precision
            LINES_SHOWN=16 step "$name" "$laneway" verify "$golden/$directory" --device cuda --precision $precision
        done
    done
}

bench() {
    LINES_SHOWN=60 step bench "$laneway" kernels bench --json "$OUT/bench.json"
    LINES_SHOWN=0 step bench-detail "$laneway" kernels bench --detail --rows 1,8,64 --budget-ms 100 --json "$OUT/bench-detail.json"
}

case ${1:-all} in
all)
    check
    verify
    bench
    ;;
laneway)
    shift
    exec "$laneway" "$@"
    ;;
*)
    for part in "$@"; do
        case $part in
        check | verify | bench) "$part" ;;
        *)
            echo "run.sh: no part $part; there are check, verify, bench" >&2
            exit 2
            ;;
        esac
    done
    ;;
esac
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}"
    exit 1
fi
echo "everything passed"
