# shellcheck shell=sh
# Packages that the distribution must provide, and advice for systems other than Debian; sourced by
# scripts/setup and scripts/prepare.

# Debian packages that criuctl itself needs at run time.
#   nftables      removes the firewall rules that CRIU leaves on the source of a moved connection
#   iproute2      network namespaces by name
#   tini          the init inside of a session, root of the tree that is dumped
RUNTIME_PACKAGES="nftables iproute2 tini"

# Sets os_id, os_codename and os_name from os-release.
read_os() {
    os_id=unknown os_like='' os_codename='' os_name='a system without os-release'
    os_file=${CRIUCTL_OS_RELEASE:-/etc/os-release} # the variable is for the tests
    [ -r "$os_file" ] || return 0
    # shellcheck disable=SC1090
    os_values=$(. "$os_file" && printf '%s\n' "${ID-}" "${ID_LIKE-}" "${VERSION_CODENAME-}" \
        "${PRETTY_NAME:-${ID:-a system without a name}}")
    {
        IFS= read -r os_id && IFS= read -r os_like &&
            IFS= read -r os_codename && IFS= read -r os_name
    } <<VALUES
$os_values
VALUES
}

# by_hand: prints the command that installs CRIU and what criuctl needs next to it on a system that
# set-up cannot prepare, by the list `distributions`.
by_hand() {
    for by_hand_id in $os_id $os_like any; do
        by_hand_line=$(sed -n "s/^$by_hand_id  *//p" "$parts/distributions")
        [ -z "$by_hand_line" ] || break
    done
    printf '%s\n' "$by_hand_line"
}

# Prints what to install by hand on a system that set-up cannot prepare, and ends.  `checkout` is
# the folder of criuctl's sources, where it is to be installed from them.
advise_and_exit() {
    set -- "Install by hand: $(by_hand)"
    [ -z "${checkout-}" ] || set -- "$@" \
        "Then: python3 -m venv $prefix/venv && $prefix/venv/bin/pip install '${checkout}[all]'"
    die "-$EX_PLATFORM" "set-up prepares Debian 12 and 13 only; this is $os_name" "$@" \
        "CRIU must be 4.2 or newer on a kernel from 6.16 on. To test it, run as root:" \
        "python3 $parts/probe_criu.py criu" \
        "Its Python package pycriu (in CRIU's sources: lib/pycriu) must be importable in" \
        "criuctl's environment, for example by a .pth file in its site-packages that names the" \
        "folder of pycriu; \`criuctl doctor\` reports what is missing."
}

# missing_packages NAME...: prints those that are not installed.
missing_packages() {
    for package in "$@"; do
        case $(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null) in
        installed) ;;
        *) printf '%s ' "$package" ;;
        esac
    done
}

# persistently COMMAND...: runs it, and tries again after 5 and after 20 seconds if it fails.
persistently() {
    for pause in 5 20; do
        "$@" && return
        say "trying again in $pause s"
        sleep "$pause"
    done
    "$@"
}

# get_packages NAME...: installs them.  apt-get waits for dpkg's lock itself, but not for the locks
# of its lists and its archive.
get_packages() {
    quietly apt-get -qq update ||
        warn "apt-get update failed; continuing with the package lists that are here"
    DEBIAN_FRONTEND=noninteractive quietly apt-get -y -qq -o DPkg::Lock::Timeout=300 \
        install --no-install-recommends "$@"
}

# install_packages NAME...: calls apt-get for what is missing, and not at all when nothing is.
install_packages() {
    missing=$(missing_packages "$@")
    [ -n "$missing" ] || return 0
    say "packages: installing $missing"
    # shellcheck disable=SC2086
    persistently get_packages $missing ||
        die "apt-get could not install: $missing" \
            "Is the machine online, and do the mirrors in /etc/apt answer?" \
            "Or install them by hand and run $0 again."
}

# Like install_packages, for packages with services, which must not start: a policy-rc.d that
# refuses them is in place during the installation.  An existing one belongs to the administrator
# and stays, unless a killed set-up has left it: then no service would ever be started again.
guard=${CRIUCTL_POLICY:-/usr/sbin/policy-rc.d} # the variable is for the tests
guard_mark='# put here by criuctl set-up for the time of one installation'
install_packages_without_services() {
    [ ! -e "$guard" ] || ! grep -qxF "$guard_mark" "$guard" || rm -f "$guard"
    [ -n "$(missing_packages "$@")" ] || return 0
    if [ -e "$guard" ]; then
        install_packages "$@"
    else
        trap 'rm -f "$guard"; cleanup' EXIT
        printf '#!/bin/sh\n%s\nexit 101\n' "$guard_mark" >"$guard"
        chmod 755 "$guard"
        install_packages "$@"
        rm -f "$guard"
        trap cleanup EXIT
    fi
}
