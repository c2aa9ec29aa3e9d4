# shellcheck shell=sh
# What this host needs before criuctl can dump and restore: Debian packages, and a CRIU that works
# on its kernel; sourced by scripts/setup and scripts/prepare, after the other parts.
#
# `parts` is the folder of these parts, `prefix` the folder of CRIU.

# begin_preparation: ends with the way on hosts that cannot be prepared; then waits for its turn.
begin_preparation() {
    require_root
    read_os
    case $os_id:$os_codename in
    debian:bookworm | debian:trixie | debian:forky | debian:sid) ;;
    *) advise_and_exit ;;
    esac
    mkdir -p "$prefix"
    exec 9>"$prefix/.lock"
    flock 9 # two set-ups at once take turns
    trap cleanup EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
}

cleanup() { rm -rf "$prefix/.work" "$prefix/pycriu.new" "$prefix/pycriu.deb"; }

# link_pycriu PYTHON: makes pycriu importable in the environment of this interpreter, and tests that.
link_pycriu() {
    site=$("$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    [ "$(cat "$site/criuctl-pycriu.pth" 2>/dev/null)" = "$prefix/pycriu" ] ||
        printf '%s\n' "$prefix/pycriu" >"$site/criuctl-pycriu.pth" ||
        die "$site cannot be written, so pycriu cannot be made importable there"
    quietly "$1" -W ignore -c 'from pycriu import images, rpc_pb2
assert rpc_pb2.criu_req(type=rpc_pb2.VERSION).SerializeToString()
assert images.load' ||
        die "pycriu in $prefix/pycriu cannot be used by $1" "Remove $prefix and run $0 again."
}
