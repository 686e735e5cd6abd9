#!/usr/bin/env bash
# Run on a machine with a GPU, in a copy of the tree that holds target/gpu-bundle.
#
#   target/gpu-bundle/run.sh [check] [verify] [bench] [arms] [soak] [laneway ARGUMENTS...]
#
# Without arguments: check, verify, bench. `arms` measures a model in each placement of its codec, `soak` loads it for
# minutes; what they run is in these variables:
#
#   SIZE         1.7b or 0.6b                                    (1.7b)
#   ARMS         of chain, lane, lane-16, lane-32, lane-64, auto, split, split-mps, replicas-mps, clone  (all but clone)
#   CONCURRENCY  callers, one run behind the other               (1,32,128)
#   SECONDS_EACH measured seconds of a run                       (20)
#   SOAK         arm of the soak                                 (chain)
#   MINUTES      of the soak                                     (9)
#   SOAK_FLAGS   more flags of it, such as "--kill codec=2"
#
# Reports go to $OUT (default: target/gpu-results). What fails does not
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

# step LOG NAME LINES COMMAND...: all output to the end of $OUT/LOG.log, its last LINES lines here.
step() {
    local log=$OUT/$1.log name=$2 lines=$3 began=$SECONDS output code
    shift 3
    output=$("$@" 2>&1)
    code=$?
    {
        echo "== $name: exit $code, $((SECONDS - began)) s"
        echo "$output"
    } >>"$log"
    echo "== $name: exit $code, $((SECONDS - began)) s"
    [ "$lines" -eq 0 ] || tail -n "$lines" <<<"$output"
    [ $code -eq 0 ] || failed+=("$name")
}

check() {
    step check check 70 "$laneway" kernels check --failed-only --json "$OUT/check.json"
}

verify() {
    local directory precision
    for directory in tiny tiny/noproj 0.6b 1.7b; do
        for precision in f32 bf16; do
            step verify "$directory $precision" 16 \
                "$laneway" verify "$golden/$directory" --device cuda --precision $precision
        done
    done
}

bench() {
    step bench bench 60 "$laneway" kernels bench --json "$OUT/bench.json"
    step bench bench-detail 0 "$laneway" kernels bench --detail --rows 1,8,64 --budget-ms 100 \
        --json "$OUT/bench-detail.json"
}

# Flags that name an arm's deployment.
arm() {
    local file=$tree/configs/bench-$SIZE
    case $1 in
    chain | auto | split | split-mps | replicas-mps | clone) echo "--deployment $file-$1.yaml" ;;
    lane) echo "--deployment $file-chain.yaml --set node_groups.1.lane=1 --set node_groups.1.priority=low" ;;
    lane-*) echo "--deployment $file-lane.yaml --set node_groups.1.sms=${1#lane-}" ;;
    *)
        echo "run.sh: no arm $1" >&2
        return 1
        ;;
    esac
}

SIZE=${SIZE:-1.7b}

arms() {
    local each flags
    for each in ${ARMS:-chain lane lane-16 lane-32 lane-64 auto split split-mps replicas-mps}; do
        flags=$(arm "$each") || exit 2
        # The report is in its file; what fails says why here.
        # shellcheck disable=SC2086
        step arms "$SIZE $each" 6 "$laneway" bench $flags --concurrency "${CONCURRENCY:-1,32,128}" \
            --seconds "${SECONDS_EACH:-20}" --quiet --output "$OUT/arm-$SIZE-$each.json"
    done
}

soak() {
    local each=${SOAK:-chain} flags
    flags=$(arm "$each") || exit 2
    # shellcheck disable=SC2086
    step soak "$SIZE $each" 12 "$laneway" soak $flags --minutes "${MINUTES:-9}" ${SOAK_FLAGS:-} \
        --quiet --output "$OUT/soak-$SIZE-$each.json"
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
        check | verify | bench | arms | soak) "$part" ;;
        *)
            echo "run.sh: no part $part; there are check, verify, bench, arms, soak" >&2
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
