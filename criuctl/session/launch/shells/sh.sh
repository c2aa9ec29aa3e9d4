# shellcheck shell=sh
# Hooks of a session for an interactive sh or dash: see ../shell_hooks.py.  Read by ENV.
#
# sh may be any shell.  bash has hooks of its own; others than dash get none: they edit lines
# themselves, and would count the marks in their prompts as text that is shown.

if [ -n "${CRIUCTL_SHELL_ENV-}" ]; then
    ENV=$CRIUCTL_SHELL_ENV
    unset CRIUCTL_SHELL_ENV
    export ENV
    eval "__criuctl_file=\"$ENV\"" # the shell would have expanded it
    # shellcheck disable=SC2154 # the line above sets it
    if [ -r "$__criuctl_file" ]; then
        # shellcheck source=/dev/null
        . "$__criuctl_file"
    fi
    unset __criuctl_file
else
    unset ENV
fi

__criuctl_program=$(readlink "/proc/$$/exe" 2>/dev/null)
if [ "${__criuctl_program##*/}" != dash ]; then
    if [ -n "${CRIUCTL_SHELL_PS1+set}" ]; then export PS1="$CRIUCTL_SHELL_PS1"; fi
    if [ -n "${CRIUCTL_SHELL_PS2+set}" ]; then export PS2="$CRIUCTL_SHELL_PS2"; fi
    unset CRIUCTL_SHELL_PS1 CRIUCTL_SHELL_PS2
    if [ -n "${BASH_VERSION-}" ]; then
        # shellcheck source=/dev/null
        . "$CRIUCTL_SHELL_DIR/bash.sh"
    else
        unset CRIUCTL_SHELL CRIUCTL_SHELL_DIR
    fi
elif [ -n "${CRIUCTL_SHELL-}" ]; then
    # The prompts carry the marks: there is no other hook.  dash goes on exporting variables that it
    # was given, even after "unset": so the user's prompts come by other names.
    __criuctl_n=0
    __criuctl_prompt1=${CRIUCTL_SHELL_PS1-$PS1} __criuctl_prompt2=${CRIUCTL_SHELL_PS2-$PS2}
    __criuctl_esc=$(printf '\033]133;') __criuctl_bel=$(printf '\007')
    __criuctl_mark=aid=$CRIUCTL_SHELL
    PS1="${__criuctl_esc}D;\$?;$__criuctl_mark;n=\$((__criuctl_n))$__criuctl_bel"
    PS1="$PS1${__criuctl_esc}A;$__criuctl_mark;n=\$((__criuctl_n=__criuctl_n+1));pid=$$$__criuctl_bel"
    PS1="$PS1$__criuctl_prompt1${__criuctl_esc}B;$__criuctl_mark$__criuctl_bel"
    PS2="$__criuctl_prompt2${__criuctl_esc}A;k=s;$__criuctl_mark$__criuctl_bel"
    unset __criuctl_esc __criuctl_bel __criuctl_mark __criuctl_prompt1 __criuctl_prompt2
    unset CRIUCTL_SHELL CRIUCTL_SHELL_DIR CRIUCTL_SHELL_PS1 CRIUCTL_SHELL_PS2
fi
unset __criuctl_program
