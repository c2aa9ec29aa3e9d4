# shellcheck shell=bash
# Hooks of a session for an interactive bash (4.4 or newer): see ../shell_hooks.py.
#
# Read as the --rcfile, from PROMPT_COMMAND before the first prompt where no rc file is read, or by
# ENV: in a login shell, which --posix keeps from reading its own files, and when sh is bash.
# Nothing that runs here may fail outside of a condition, or print to the terminal what is no mark:
# the user may set -e, -u and -x.

if [ -n "${CRIUCTL_SHELL_LOGIN+set}" ]; then
    set +o posix
    shopt -u inherit_errexit 2>/dev/null
    unset POSIXLY_CORRECT ENV
    if [ -n "${CRIUCTL_SHELL_ENV+set}" ]; then export ENV="$CRIUCTL_SHELL_ENV"; fi
    case $CRIUCTL_SHELL_LOGIN in *history*) HISTFILE=~/.bash_history ;; esac
    case $CRIUCTL_SHELL_LOGIN in *profile*) __criuctl_profile=1 ;; *) __criuctl_profile= ;; esac
    unset CRIUCTL_SHELL_LOGIN CRIUCTL_SHELL_ENV
    if [ -n "$__criuctl_profile" ] && [ -r /etc/profile ]; then . /etc/profile; fi
    for __criuctl_rc in ~/.bash_profile ~/.bash_login ~/.profile; do
        if [ -n "$__criuctl_profile" ] && [ -r "$__criuctl_rc" ]; then
            # shellcheck source=/dev/null
            . "$__criuctl_rc"
            break
        fi
    done
    unset __criuctl_rc __criuctl_profile
fi
if [ -n "${CRIUCTL_SHELL_RC+set}" ]; then
    __criuctl_rc=$CRIUCTL_SHELL_RC
    unset CRIUCTL_SHELL_RC
    if [ -r "$__criuctl_rc" ]; then
        # shellcheck source=/dev/null
        . "$__criuctl_rc"
    fi
    unset __criuctl_rc
fi

# Take over, once, the variables that a client has brought (criuctl attach --update-env).
__criuctl_refresh() {
    local line='' first=1
    [[ -r $__criuctl_dir/environment ]] || return 0
    while IFS= read -r line; do
        if [[ -n $first ]]; then
            first=
            if [[ $line == "$__criuctl_seen" ]]; then break; fi
            __criuctl_seen=$line
        elif [[ $line == *=* ]]; then
            export "${line?}" || :
        elif [[ -n $line ]]; then
            unset "$line" || :
        fi
    done <"$__criuctl_dir/environment" || :
    return 0
}

# Mark the end of a command with its status ($1), and the beginning of a prompt.
__criuctl_prompt() {
    __criuctl_refresh
    if [[ -n ${__criuctl_quiet-} ]]; then
        __criuctl_recover
    fi
    printf '\e]133;D;%d;%s;n=%d\a' "$1" "$__criuctl_mark" "$__criuctl_n"
    __criuctl_n=$((__criuctl_n + 1))
    printf '\e]133;A;%s;n=%d;pid=%d\a' "$__criuctl_mark" "$__criuctl_n" "$$"
    PS0=${PS0-}
    PS0=${PS0//"${__criuctl_ps0-$'\e]'}"/}
    __criuctl_ps0=$'\e]133;C;'"$__criuctl_mark;n=$__criuctl_n"$'\a'
    PS0+=$__criuctl_ps0
    if [[ ${PS2-} != *"$__criuctl_ps2"* ]]; then
        PS2="$__criuctl_ps2${PS2-}"
    fi
    return 0
}

# Put back what __criuctl_key has set for one line, unless the command has set it otherwise.
__criuctl_recover() {
    __criuctl_quiet=
    if [[ ${HISTIGNORE-} == '*' ]]; then
        if [[ -n ${__criuctl_ignore+set} ]]; then HISTIGNORE=$__criuctl_ignore; else unset HISTIGNORE; fi
        if [[ -n ${__criuctl_ignore_exported-} ]]; then export HISTIGNORE; fi
    fi
    if [[ ${histchars-} == $'\1\1' ]]; then
        if [[ -n ${__criuctl_chars+set} ]]; then histchars=$__criuctl_chars; else unset histchars; fi
    fi
    if [[ -n $__criuctl_keeps_edits ]]; then
        bind 'set revert-all-at-newline off'
    fi
    return 0
}

# Take a line from the session's holder, in the place of what is half typed.  It is not added to
# the history, and "!" has no meaning in it.
__criuctl_key() {
    local text='' action=redraw-current-line map
    __criuctl_refresh
    printf '\e]7133;R;%s;n=%d\a' "$__criuctl_mark" "$__criuctl_n"
    if IFS= read -r -s -t 10 -d $'\x1f' text && [[ $text == "$__criuctl_mark:"?* ]]; then
        action=accept-line
        printf -v READLINE_LINE '%b' "${text#"$__criuctl_mark:"}"
        READLINE_POINT=${#READLINE_LINE}
        unset __criuctl_ignore __criuctl_ignore_exported __criuctl_chars
        if [[ -n ${HISTIGNORE+set} ]]; then
            __criuctl_ignore=$HISTIGNORE
            if [[ ${HISTIGNORE@a} == *x* ]]; then __criuctl_ignore_exported=1; fi
        fi
        if [[ -n ${histchars+set} ]]; then __criuctl_chars=$histchars; fi
        HISTIGNORE='*' histchars=$'\1\1' __criuctl_quiet=1
        export -n HISTIGNORE
        bind 'set revert-all-at-newline on'
    fi
    for map in emacs-standard vi-insert vi-command; do
        bind -m "$map" '"\C-x\C-^2": '"$action"
    done
    return 0
}

__criuctl_load() {
    local map old
    __criuctl_mark=aid=$CRIUCTL_SHELL
    __criuctl_n=0
    __criuctl_dir=${CRIUCTL_SESSION_DIR-} __criuctl_seen=
    __criuctl_ps2='\['$'\e]133;A;k=s;'"$__criuctl_mark"$'\a''\]'
    export -n PS0 PS2
    __criuctl_keeps_edits=
    case $(bind -v 2>/dev/null) in
    *'set revert-all-at-newline off'*) __criuctl_keeps_edits=1 ;;
    esac
    for map in emacs-standard vi-insert vi-command; do
        bind -m "$map" -x '"\C-x\C-^1": { __criuctl_key; } 2>/dev/null >/dev/tty </dev/tty'
        bind -m "$map" '"\C-x\C-^2": redraw-current-line'
        bind -m "$map" '"\C-^": "\C-x\C-^1\C-x\C-^2"'
    done
    old=${CRIUCTL_SHELL_PROMPT_COMMAND-}
    if [[ ${PROMPT_COMMAND-} == *CRIUCTL_SHELL_DIR* ]]; then # this file was read from there
        PROMPT_COMMAND=${PROMPT_COMMAND/". \"\$CRIUCTL_SHELL_DIR/bash.sh\""/$old}
        if [[ -z $old ]]; then
            export -n PROMPT_COMMAND
        fi
        __criuctl_prompt 0 >/dev/tty
    fi
    if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 501)); then
        PROMPT_COMMAND+=('{ __criuctl_prompt "$?"; } 2>/dev/null >/dev/tty')
        if [[ -z ${PROMPT_COMMAND[0]-} ]]; then
            unset 'PROMPT_COMMAND[0]'
        fi
    else
        old=${PROMPT_COMMAND-}
        PROMPT_COMMAND='__criuctl_status=$?'${old:+$'\n'"$old"}
        # shellcheck disable=SC2154 # the line above sets it
        PROMPT_COMMAND+=$'\n''{ __criuctl_prompt "$__criuctl_status"; } 2>/dev/null >/dev/tty'
    fi
    unset CRIUCTL_SHELL CRIUCTL_SHELL_DIR CRIUCTL_SHELL_PROMPT_COMMAND
}

if [[ -n ${CRIUCTL_SHELL-} && $- == *i* ]] && ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)); then
    { __criuctl_load; } 2>/dev/null
fi
unset -f __criuctl_load
