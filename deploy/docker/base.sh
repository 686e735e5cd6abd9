#!/usr/bin/env bash
# Builds base images from Debian packages, for a machine that reaches no image registry: base.sh runtime|rust.
#
#   runtime  laneway-base:bookworm: the C library, certificates and time zones; no shell, no package manager
#   rust     laneway-rust:bookworm: a C compiler, and this machine's Rust toolchain
#
# An image that is there already stays. Needs root (debootstrap mounts and changes roots) and a Docker engine.
set -euo pipefail
SUITE=bookworm
kind=${1:?runtime or rust}
image=laneway-base:$SUITE
[ "$kind" = runtime ] || image=laneway-rust:$SUITE
if docker image inspect "$image" >/dev/null 2>&1; then
    echo "$image is there"
    exit 0
fi
[ "$(id -u)" = 0 ] || { echo "base.sh: run it as root: debootstrap does not work otherwise" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "base.sh: install the package debootstrap" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root

bootstrap() {
    debootstrap --variant=minbase --include="$1" "$SUITE" "$root" >"$work/log" || { tail -n 20 "$work/log" >&2; exit 1; }
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
}

case $kind in
runtime)
    bootstrap ca-certificates,netbase,tzdata
    echo 'nonroot:x:65532:65532:nonroot:/nonexistent:/nonexistent' >>"$root/etc/passwd"
    echo 'nonroot:x:65532:' >>"$root/etc/group"
    # Of a whole system only what a program needs that calls no other program.
    chroot "$root" dpkg -L base-files ca-certificates gcc-12-base libc6 libgcc-s1 netbase tzdata |
        grep -v -E '^/usr/(bin|sbin)/|^/usr/share/(doc|man|lintian)/' >"$work/files"
    printf '%s\n' /bin /sbin /lib /lib64 /usr/bin /usr/sbin /usr/lib /usr/lib64 /etc/passwd /etc/group /etc/nsswitch.conf /etc/ld.so.cache \
        /etc/ssl/certs/ca-certificates.crt >>"$work/files"
    # /lib and the like are links into /usr, and packages may name files through them.
    sed -E 's,^/,,; s,^(bin|sbin|lib|lib64)/,usr/&,' "$work/files" | sort -u | while read -r path; do
        [ -z "$path" ] || [ "$path" = . ] || [ ! -e "$root/$path" ] && [ ! -L "$root/$path" ] || echo "$path"
    done >"$work/present"
    tar -C "$root" --no-recursion -c -T "$work/present" | docker import --message 'debootstrap' - "$image"
    ;;
rust)
    bootstrap ca-certificates,gcc,libc6-dev,make
    # Certificates of this machine, which may sit behind a proxy of its own.
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
    mkdir -p "$root/usr/local/rust"
    tar -C "$(rustc --print sysroot)" --exclude=share/doc -c . | tar -C "$root/usr/local/rust" -x
    tar -C "$root" -c . | docker import --message 'debootstrap' \
        --change 'ENV PATH=/usr/local/rust/bin:/usr/local/bin:/usr/bin:/bin' - "$image"
    ;;
*)
    echo "base.sh: runtime or rust, not $kind" >&2
    exit 2
    ;;
esac
