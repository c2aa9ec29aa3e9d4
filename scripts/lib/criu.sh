# shellcheck shell=sh
# Finds a CRIU that works on this kernel, or installs a newer one into the private prefix; sourced
# by scripts/setup and scripts/prepare.
#
# What it leaves in PREFIX:
#   criu.json   {"argv": [...], "version": "4.2.1", "pycriu": "PREFIX/pycriu", "source": "..."}: the
#               choice.  argv starts CRIU without any subcommand; pycriu is the folder to put on
#               Python's path.
#   criu/       the private CRIU with its own C library and loader, where one was needed; bin/criu
#               starts it by hand
#   pycriu/     the pycriu of the same version, and nothing else
#
# A newer suite's CRIU cannot use the older suite's libraries, so it comes with all of them and is
# started through its own loader; the host's libraries are not touched.  The source of the packages
# and the keys that may sign them are read from the machine's own apt sources.

# works CRIU...: tests this CRIU on this kernel; sets `reason` when it does not work.
works() {
    reason=$("$python" "$parts/probe_criu.py" "$@") && return
    [ $? -eq 3 ] || die "the test whether $1 works could not be run"
    return 1
}

# version_of CRIU...: prints its version, such as 4.2.1.
version_of() {
    "$@" --version | sed -n 's/^Version: *//p'
}

# private_argv FOLDER: prints the command of the private CRIU in it, one word a line.
private_argv() {
    for loader in "$1"/lib/ld*.so.*; do
        [ -x "$loader" ] && printf '%s\n' "$loader" --library-path "$1/lib" "$1/sbin/criu"
        return
    done
}

# private_works FOLDER: tests the private CRIU in it.
private_works() {
    words=$(private_argv "$1") || {
        reason="it is incomplete"
        return 1
    }
    split works "$words"
}

# split COMMAND WORDS [ARGUMENT...]: runs it with the arguments and then the words, one a line.
split() {
    split_command=$1 split_words=$2
    shift 2
    set -f
    IFS=$newline
    # shellcheck disable=SC2086 # one word a line
    set -- "$@" $split_words
    set +f
    unset IFS
    "$split_command" "$@"
}

# choose_criu: writes criu.json, or ends with the reasons why none works.
choose_criu() {
    if [ -n "${CRIUCTL_CRIU-}" ] && [ ! -d "$CRIUCTL_CRIU" ]; then
        given=$(command -v -- "$CRIUCTL_CRIU") || given=$CRIUCTL_CRIU
        case $given in /*) ;; *) given=$PWD/$given ;; esac # the record is read in other folders
        works "$given" ||
            die "-$EX_PLATFORM" \
                "CRIUCTL_CRIU=$CRIUCTL_CRIU does not work on this kernel: $reason" \
                "Unset CRIUCTL_CRIU to let set-up find or install another."
        chosen "CRIUCTL_CRIU" "$given"
        return
    fi
    on_path=$(PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin command -v criu) || on_path=''
    if [ -n "$on_path" ] && [ "$on_path" != "$prefix/bin/criu" ]; then
        if works "$on_path"; then
            chosen "$on_path" "$on_path"
            return
        fi
        say "CRIU: $on_path does not work on this kernel ($reason)"
    fi
    if [ -d "$prefix/criu" ]; then
        if private_works "$prefix/criu"; then
            chosen_private
            return
        fi
        say "CRIU: the one in $prefix/criu does not work on this kernel ($reason)"
    fi
    for suite in $NEWER_SUITES; do
        say "CRIU: installing the one of Debian $suite into $prefix/criu"
        fetch_private "$suite"
        if private_works "$work/criu"; then
            keep_private
            chosen_private
            return
        fi
        say "CRIU: that of $suite does not work on this kernel ($reason)"
    done
    die "-$EX_PLATFORM" "no CRIU that works on this kernel ($(uname -r)) was found" \
        "Give one that does with CRIUCTL_CRIU=/path/to/criu," \
        "or start a kernel with CONFIG_CHECKPOINT_RESTORE."
}

chosen_private() {
    split chosen "$(private_argv "$prefix/criu")" "$(cat "$prefix/criu/source")"
}

# chosen SOURCE CRIU...: gets the pycriu that belongs to it and records the choice.
chosen() {
    source=$1 && shift
    version=$(version_of "$@")
    install_pycriu "$version" "$1"
    "$python" - "$prefix" "$version" "$source" "$@" <<'PY'
import json, os, sys
prefix, version, source, *argv = sys.argv[1:]
record = {"argv": argv, "version": version, "pycriu": f"{prefix}/pycriu", "source": source}
with open(f"{prefix}/criu.json.new", "w") as file:
    json.dump(record, file, indent=2)
    file.write("\n")
os.replace(f"{prefix}/criu.json.new", f"{prefix}/criu.json")
PY
    say "CRIU: $version works here (checked, and dumped a process with a TCP connection);" \
        "from $source"
}
