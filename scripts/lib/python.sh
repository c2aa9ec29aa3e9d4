# shellcheck shell=sh
# criuctl's own Python environments; sourced by scripts/setup.
#
# PREFIX/venv holds a copy of the checkout's package, so criuctl continues to work when the checkout
# is gone; CHECKOUT/.venv (--dev) uses the checkout itself and has the test tools, and so does
# CHECKOUT/.venv-airflow (--adapters), which has Airflow.  All see PREFIX/pycriu through a .pth file.
# A stamp in each records what was installed, so that a second run has nothing to do.

# choose_python: sets `python`, to the distribution's interpreter if possible: one from a version
# manager may disappear with its owner's home.
choose_python() {
    for python in /usr/bin/python3 "$(command -v python3)"; do
        [ -x "$python" ] &&
            "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
                2>/dev/null && return
    done
    die "-$EX_PLATFORM" "no Python >= 3.11 with the venv module was found" \
        "Debian: apt-get install python3-venv"
}

# fresh_venv FOLDER: makes an environment of $python in FOLDER.  One that is broken, half made (pip
# comes last) or of another Python is made again.
fresh_venv() {
    venv_wanted=$("$python" -c 'import sys; print(sys.version)')
    venv_found=$("$1/bin/python" -c 'import sys; from importlib.metadata import files
files("pip") and print(sys.version)' 2>/dev/null) || venv_found=''
    [ "$venv_found" = "$venv_wanted" ] && return
    say "Python: making $1 with $python ($(echo "$venv_wanted" | cut -d' ' -f1))"
    rm -rf "$1"
    quietly "$python" -m venv "$1" || die "$python could not make $1"
}

# pip VENV ARGUMENT...: runs pip, and ends with the likely reason if it fails.
pip() {
    venv=$1 && shift
    quietly "$venv/bin/python" -m pip --disable-pip-version-check --no-input -q "$@" ||
        die "pip could not install what criuctl needs" \
            "Is the machine online, and does its package index answer (pip config list)?"
}

# pip_locked VENV: installs what criuctl and its build need, by the digests of python.lock.
pip_locked() {
    pip "$1" install --require-hashes --only-binary :all: -r "$parts/python.lock"
}

# install_criuctl: installs the checkout's package into PREFIX/venv, if it is not there already.
install_criuctl() {
    fresh_venv "$prefix/venv"
    stamp=$("$prefix/venv/bin/python" --version |
        stamp_of "$checkout/pyproject.toml" "$checkout/criuctl" "$checkout/hooks" "$parts" "$here/prepare")
    if [ "$(cat "$prefix/venv/criuctl.stamp" 2>/dev/null)" != "$stamp" ]; then
        say "Python: installing criuctl and what it needs into $prefix/venv"
        rm -f "$prefix/venv/criuctl.stamp"
        pip_locked "$prefix/venv"
        pip "$prefix/venv" install --no-deps --no-build-isolation "$checkout"
        # The caller's PYTHONPATH and PYTHONHOME must not change what the command imports.
        sed -i '1s|^#!\(/.*/python[0-9.]*\)$|#!\1 -I|' "$prefix/venv/bin/criuctl"
    fi
    link_pycriu "$prefix/venv/bin/python"
    # Without it only start-up time is lost.
    "$prefix/venv/bin/python" -m compileall -q "$prefix/pycriu" || true
    echo "$stamp" >"$prefix/venv/criuctl.stamp"
}

# link_command: installs BIN/criuctl, completion for the shells, which click generates, and manual
# pages.
link_command() {
    target=$prefix/venv/bin/criuctl
    if [ "$(readlink "$bin/criuctl")" != "$target" ]; then
        [ -L "$bin/criuctl" ] || [ ! -e "$bin/criuctl" ] ||
            die "$bin/criuctl exists and is not from this set-up" "Move it away and run $0 again."
        mkdir -p "$bin" && ln -sfn "$target" "$bin/criuctl"
    fi
    share=$(dirname "$bin")/share
    [ "$(cat "$prefix/completion.stamp" 2>/dev/null)" = "$stamp $share" ] && return
    for shell in bash:bash-completion/completions/criuctl zsh:zsh/site-functions/_criuctl \
        fish:fish/vendor_completions.d/criuctl.fish; do
        file=$share/${shell#*:}
        mkdir -p "$(dirname "$file")"
        if ! _CRIUCTL_COMPLETE=${shell%%:*}_source "$target" >"$file.new" 2>/dev/null ||
            [ ! -s "$file.new" ]; then
            rm -f "$file.new" # that shell is not installed, or too old
        else
            mv "$file.new" "$file"
        fi
    done
    "$target" help -q --man-pages "$share/man" 2>/dev/null ||
        say "note: no manual pages could be written to $share/man"
    echo "$stamp $share" >"$prefix/completion.stamp"
}

# install_dev: makes CHECKOUT/.venv, which runs the checkout itself and its tests.
install_dev() {
    install_editable "$checkout/.venv" dev "the test tools"
}

# install_airflow: makes CHECKOUT/.venv-airflow, which runs the checkout below Airflow.
install_airflow() {
    install_editable "$checkout/.venv-airflow" airflow Airflow
}

# install_editable VENV EXTRA WHAT: makes an environment that runs the checkout itself, with an extra
# of it, which is called WHAT.
install_editable() {
    fresh_venv "$1"
    stamp=$("$1/bin/python" --version | stamp_of "$checkout/pyproject.toml")
    if [ "$(cat "$1/criuctl.stamp" 2>/dev/null)" != "$stamp" ]; then
        say "Python: installing $3 into $1"
        rm -f "$1/criuctl.stamp"
        pip "$1" install --editable "${checkout}[$2]"
    fi
    link_pycriu "$1/bin/python"
    # Every test starts commands, and PYTHONDONTWRITEBYTECODE may keep Python from writing bytecode.
    # Without it only start-up time is lost.
    "$1/bin/python" -m compileall -q "$checkout/criuctl" "$prefix/pycriu" || true
    echo "$stamp" >"$1/criuctl.stamp"
}
