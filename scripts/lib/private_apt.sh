# shellcheck shell=sh
# Packages of a newer Debian suite, unpacked into a folder without touching the machine's own
# packages; sourced by scripts/setup and scripts/prepare.
#
# apt-get runs on a separate state: one source (the machine's own mirror, another suite), an empty
# list of installed packages, so that every dependency is fetched, download only.  Signatures are
# checked against the keyring that the machine's own source names.
#
# apt does not check the expiry date of the Release file here, because a mirror may be frozen in time.
# accept_packages does instead: packages with the digests of criu.pins are good whatever the age of
# the index.  Others must be newer than the pinned ones and come from an index that has not expired,
# so an old signed index cannot bring back an old package.

# Debian suites that have a CRIU newer than Debian 13's, the one that changes less first.
NEWER_SUITES="forky sid"

apt_sources=${CRIUCTL_APT_SOURCES:-/etc/apt/sources} # the variable is for the tests

# debian_mirror: prints the address of the machine's first Debian archive entry, as apt itself
# understands its sources.
debian_mirror() {
    # shellcheck disable=SC2016
    apt-get indextargets --format '$(REPO_URI)' \
        'Created-By: Packages' 'Origin: Debian' 'Label: Debian' 'Component: main' | head -n 1
}

# signed_by URI: prints the Signed-By of the machine's source for this address, as a deb822 field;
# nothing when it has none.
signed_by() {
    for sources in "$apt_sources".list.d/*.sources; do
        [ -e "$sources" ] && awk -v uri="${1%/}" '
            BEGIN { RS = ""; FS = "\n" }
            {
                ours = 0; field = ""; value = ""
                for (i = 1; i <= NF; i++) {
                    if ($i ~ /^#/) continue
                    if ($i !~ /^[ \t]/) { field = tolower($i); sub(/:.*/, "", field) }
                    if (field == "uris" && index($i " ", uri " ") + index($i " ", uri "/ "))
                        ours = 1
                    if (field == "signed-by") value = value $i "\n"
                }
                if (ours && value != "") { printf "%s", value; exit }
            }' "$sources"
    done | awk '/^[Ss]igned-[Bb]y:/ && n++ { exit } { print }' # the first, with its further lines
    cat "$apt_sources".list "$apt_sources".list.d/*.list 2>/dev/null |
        sed 's/\[\([^]]*\)\]/ \1 /' | awk -v uri="${1%/}" '
        $1 == "deb" {
            ours = 0; key = ""
            for (i = 2; i <= NF; i++) {
                if ($i == uri || $i == uri "/") ours = 1
                if (tolower($i) ~ /^signed-by=/) key = substr($i, 11)
            }
            if (ours && key != "") { gsub(",", " ", key); print "Signed-By: " key; exit }
        }'
}

# private_apt COMMAND...: apt-get on the private state in $work.
private_apt() {
    (
        cd "$work/debs" || exit
        apt-get -qq \
            -o Dir::Etc::SourceList="$work/private.sources" \
            -o Dir::Etc::SourceParts=/dev/null \
            -o Dir::Etc::Preferences=/dev/null \
            -o Dir::Etc::PreferencesParts=/dev/null \
            -o Dir::State="$work/state" \
            -o Dir::State::Lists="$work/state/lists" \
            -o Dir::State::status="$work/state/status" \
            -o Dir::Cache="$work/cache" \
            -o Acquire::Check-Valid-Until=false \
            -o Acquire::Languages=none \
            -o APT::Install-Recommends=false \
            -o APT::Get::AllowUnauthenticated=false \
            -o Acquire::AllowInsecureRepositories=false \
            -o Acquire::Retries=3 "$@"
    )
}

# private_update SUITE FIELD: points the private state at this suite, with this Signed-By field, and
# reads its index.
private_update() {
    rm -rf "$work/state" "$work/cache"
    mkdir -p "$work/debs" "$work/state/lists/partial" "$work/cache/archives/partial"
    : >"$work/state/status"
    {
        printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\n' "$mirror" "$1"
        [ -z "$2" ] || printf '%s\n' "$2"
    } >"$work/private.sources"
    private_apt update >"$work/log" 2>&1
}

# open_suite SUITE: makes the private state read this suite, or ends set-up with the reason.  If the
# host's keyring is too old for the suite's signature, a newer keyring is taken from a suite between
# the two, whose signature the host's own keyring can verify.
open_suite() {
    [ -n "$(debian_mirror)" ] || quietly apt-get -qq update ||
        die "apt-get update failed" "Is the machine online, and do the mirrors in /etc/apt answer?"
    mirror=$(debian_mirror)
    [ -n "$mirror" ] ||
        die "this machine's apt sources have no Debian archive (Origin: Debian, component main)" \
            "Set-up takes a newer CRIU from there; add it, or give a CRIU that works with" \
            "CRIUCTL_CRIU."
    key=$(signed_by "$mirror")
    private_update "$1" "$key" && return
    if grep -qiE 'NO_PUBKEY|not signed|missing key|verif' "$work/log"; then
        for between in trixie stable testing; do
            private_update "$between" "$key" || continue
            say "CRIU: this machine's keyring does not know $1; taking a newer one from $between," \
                "which it can verify"
            quietly private_apt download debian-archive-keyring || continue
            accept_packages "$between" "$work"/debs/*.deb
            rm -rf "$prefix/keyring"
            dpkg-deb -x "$work"/debs/debian-archive-keyring_*.deb "$prefix/keyring"
            rm -f "$work"/debs/*.deb
            newer=$(find "$prefix/keyring" -name 'debian-archive-keyring.[gp][pg][gp]' | head -n 1)
            private_update "$1" "Signed-By: $newer" && return
        done
    fi
    sed 's/^/  | /' "$work/log" >&2
    die "Debian $1 could not be read from this machine's mirror" \
        "Is the machine online? A CRIU that works can also be given with CRIUCTL_CRIU."
}

# accept_packages SUITE DEB...: ends set-up unless these packages of the suite are the pinned ones, or
# newer ones of an index that has not expired.
accept_packages() {
    accept_suite=$1 moved='' && shift
    [ -z "${CRIUCTL_UNPINNED-}" ] || {
        warn "CRIUCTL_UNPINNED: packages of Debian $accept_suite are not compared with criu.pins"
        return 0
    }
    for deb in "$@"; do
        digest=$(sha256sum <"$deb")
        fields=$(dpkg-deb -f "$deb" Package Architecture Version | sed 's/^[^:]*: //') ||
            die "$deb is no Debian package"
        # `for` has its list already.
        # shellcheck disable=SC2086  # three words
        set -f && set -- $fields && set +f
        pin=$(awk -v package="$1" -v machine="$2" \
            '$2 == package && $3 == machine { print $1, $4 }' "$parts/criu.pins")
        [ "$pin" = "${digest%% *} $3" ] && continue
        [ -z "$pin" ] || dpkg --compare-versions "$3" gt "${pin#* }" ||
            die "$1 $3 of Debian $accept_suite is neither the pinned package (${pin#* }) nor newer" \
                "The mirror is older than this version of criuctl, or was tampered with." \
                "CRIUCTL_UNPINNED=1 accepts it; or give a CRIU that works with CRIUCTL_CRIU."
        moved="$moved $1=$3"
    done
    [ -n "$moved" ] || return 0
    index_is_current ||
        die "Debian $accept_suite has other packages than the pinned ones, in an expired index:" \
            "${moved# }" "Its signature may be a replayed one. Update criuctl or its mirror;" \
            "CRIUCTL_UNPINNED=1 accepts it; or give a CRIU that works with CRIUCTL_CRIU."
    say "CRIU: Debian $accept_suite is newer than the pinned packages; accepted by the archive's" \
        "signature of $(sed -n 's/^Date: //p' "$work"/state/lists/*_InRelease):${moved}"
}

# index_is_current: tests that the one index of the private state has an expiry date that is not past.
index_is_current() {
    until=$(sed -n 's/^Valid-Until: //p' "$work"/state/lists/*Release)
    [ -n "$until" ] && until=$(date -d "$until" +%s) && [ "$until" -gt "$(date +%s)" ]
}

# fetch_private SUITE: gets that suite's CRIU into $work/criu and the package of its pycriu into
# $work/debs.  They are not in use yet.
fetch_private() {
    work=$prefix/.work
    rm -rf "$work" && mkdir -p "$work"
    open_suite "$1"
    quietly private_apt install -y --download-only criu ||
        die "CRIU of Debian $1 could not be downloaded"
    quietly private_apt download python3-pycriu ||
        die "python3-pycriu of Debian $1 could not be downloaded"
    accept_packages "$1" "$work"/cache/archives/*.deb "$work"/debs/*.deb
    for package in "$work"/cache/archives/*.deb; do
        dpkg-deb -x "$package" "$work/root"
    done
    keep_needed "$work/root" "$work/criu"
    echo "Debian $1" >"$work/criu/source"
}

# keep_private: replaces the private CRIU and pycriu with those that fetch_private fetched.
keep_private() {
    unpack_pycriu "$work"/debs/python3-pycriu_*.deb
    rm -rf "$prefix/criu" && mv "$work/criu" "$prefix/criu"
    rm -rf "$work"
    write_wrapper
}

# keep_needed ROOT FOLDER: copies CRIU, its loader, the libraries that the loader finds for it and
# their copyright files into FOLDER.
keep_needed() {
    libraries=$(dirname "$(find "$1/usr/lib" -name libc.so.6)")
    loader=$(find "$libraries" "$1/usr/lib" -name 'ld-linux*.so.*' -o -name 'ld64.so.*' | head -n 1)
    "$loader" --library-path "$libraries" --list "$1/usr/sbin/criu" >"$work/needed" ||
        die "the downloaded CRIU is incomplete"
    ! grep 'not found' "$work/needed" >&2 || die "the downloaded CRIU lacks a library"
    mkdir -p "$2/sbin" "$2/lib" "$2/share/doc"
    cp "$1/usr/sbin/criu" "$2/sbin/"
    cp -L "$loader" "$2/lib/"
    sed -n 's/.*=> \([^ ]*\) .*/\1/p' "$work/needed" | while IFS= read -r library; do
        case $library in "$libraries"/*) cp -L "$library" "$2/lib/" ;; esac
    done
    for notice in "$1"/usr/share/doc/*/copyright; do
        cp -L "$notice" "$2/share/doc/$(basename "$(dirname "$notice")").copyright"
    done
}

# write_wrapper: writes PREFIX/bin/criu, which runs the private CRIU by hand.
write_wrapper() {
    mkdir -p "$prefix/bin"
    {
        echo '#!/bin/sh'
        printf 'exec'
        private_argv "$prefix/criu" | sed "s/'/'\\\\''/g; s/.*/ '&'/" | tr -d '\n'
        # shellcheck disable=SC2016
        echo ' "$@"'
    } >"$prefix/bin/criu"
    chmod 755 "$prefix/bin/criu"
}

# unpack_pycriu DEB: unpacks the package pycriu alone, without other files of dist-packages.
unpack_pycriu() {
    rm -rf "$prefix/pycriu.new" "$prefix/pycriu.deb"
    mkdir "$prefix/pycriu.new"
    dpkg-deb -x "$1" "$prefix/pycriu.deb"
    mv "$prefix"/pycriu.deb/usr/lib/python3/dist-packages/pycriu "$prefix/pycriu.new/"
    rm -rf "$prefix/pycriu.deb" "$prefix/pycriu" && mv "$prefix/pycriu.new" "$prefix/pycriu"
}

# install_pycriu VERSION CRIU: installs a pycriu for a CRIU that is not the private one.  It has the
# same package version if CRIU is from a package.  Otherwise it is the newest one, whose messages
# are a superset of all older ones'.
install_pycriu() {
    [ -d "$prefix/pycriu/pycriu" ] && [ "$(pycriu_version)" = "$1" ] && return
    work=$prefix/.work
    rm -rf "$work" && mkdir -p "$work/debs"
    package=$(dpkg-query -S "$(readlink -f "$2")" 2>/dev/null | cut -d: -f1) || package=''
    wanted=$([ -z "$package" ] || dpkg-query -W -f='${Version}' "$package")
    if [ -z "$wanted" ] ||
        ! (cd "$work/debs" && apt-get -qq download "python3-pycriu=$wanted") >"$work/log" 2>&1; then
        for suite in $NEWER_SUITES; do
            open_suite "$suite"
            private_apt download python3-pycriu >"$work/log" 2>&1 && break
        done
        accept_packages "$suite" "$work"/debs/*.deb
        say "pycriu: of Debian $suite, because there is none of CRIU $1 here (newer ones read and" \
            "write older images)"
    fi
    unpack_pycriu "$work"/debs/python3-pycriu_*.deb
    rm -rf "$work"
}

pycriu_version() {
    sed -n 's/^__version__ *= *["'\'']\(.*\)["'\'']/\1/p' \
        "$prefix/pycriu/pycriu/version.py" 2>/dev/null
}
