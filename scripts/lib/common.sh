# shellcheck shell=sh
# Messages and small functions of the set-up scripts; sourced, never run.

newline='
'
EX_PLATFORM=13 # criuctl's exit code for "CRIU or the kernel is missing or too old"

say() { printf '%s\n' "$*"; }

warn() { printf 'warning: %s\n' "$*" >&2; }

# die [-CODE] TEXT...: each further argument is a line of its own.
die() {
    die_code=1
    case $1 in -[0-9]*) die_code=${1#-} && shift ;; esac
    printf 'error: %s\n' "$1" >&2
    shift
    [ $# -eq 0 ] || printf '       %s\n' "$@" >&2
    exit "$die_code"
}

# quietly COMMAND...: runs it, and shows its output only if it fails.
quietly() {
    quietly_log=$(mktemp)
    if "$@" >"$quietly_log" 2>&1; then
        rm -f "$quietly_log"
    else
        quietly_code=$?
        tail -n 25 "$quietly_log" | sed 's/^/  | /' >&2
        rm -f "$quietly_log"
        return "$quietly_code"
    fi
}

# require_root: ends with a message unless this is root with the capability that CRIU needs.
require_root() {
    [ "$(id -u)" -eq 0 ] || die "-$EX_PLATFORM" "set-up needs root" "Run it as root: sudo $0"
    caps=$(sed -n 's/^CapEff:[[:space:]]*//p' /proc/self/status)
    [ $((0x$caps & 0x200000)) -ne 0 ] ||
        die "-$EX_PLATFORM" "root lacks CAP_SYS_ADMIN here, which CRIU needs to dump and restore" \
            "In a container, start it privileged, or with" \
            "--cap-add SYS_ADMIN,SYS_PTRACE,CHECKPOINT_RESTORE,NET_ADMIN."
}

# stamp_of FILE...: prints one hash of the contents of files and folders (without __pycache__) and
# of standard input.
stamp_of() {
    {
        cat
        find "$@" -name __pycache__ -prune -o -type f -print | LC_ALL=C sort |
            while IFS= read -r stamp_file; do
                sha256sum <"$stamp_file"
            done
    } | sha256sum | cut -d' ' -f1
}
