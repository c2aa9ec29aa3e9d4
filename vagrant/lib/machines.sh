# shellcheck shell=sh
# Functions to run commands on the machines of the Vagrantfile; sourced, never run.

fail() {
    printf '\nThis did not go as it should: %s\n' "$*" >&2
    exit 1
}

# quoted WORD...: prints the words, quoted for another shell.
quoted() {
    for word in "$@"; do
        printf "'%s' " "$(printf %s "$word" | sed "s/'/'\\\\''/g")"
    done
}

# open_machines NAME...: prepares connections to them; close_machines must be called at the end.
# Vagrant itself takes seconds for each command, so it is asked once, and one connection to each
# machine is kept.
open_machines() {
    machines=$*
    connections=$(mktemp -d /tmp/vagrant-demo-XXXXXX)
    # shellcheck disable=SC2086,SC2154 # one word each; the sourcing program sets its folder
    (cd "$vagrant_folder" && vagrant ssh-config $machines) >"$connections/config" </dev/null ||
        fail "Vagrant does not know how to reach $machines; is everything up? (vagrant up)"
}

close_machines() {
    [ -n "${connections-}" ] || return 0
    for machine in $machines; do
        ssh -F "$connections/config" -o ControlPath="$connections/%n" -O exit "$machine" \
            2>/dev/null || true
    done
    rm -rf "$connections"
    connections=''
}

# on MACHINE COMMAND...: runs the command on the machine, as root.
on() {
    machine=$1 && shift
    ssh -F "$connections/config" -o ControlMaster=auto -o ControlPersist=60 \
        -o ControlPath="$connections/%n" -o ConnectTimeout=60 \
        -o ServerAliveInterval=10 -o ServerAliveCountMax=6 "$machine" "sudo -H $(quoted "$@")"
}

