# Hooks of a session for an interactive zsh: see ../../shell_hooks.py.  Found by ZDOTDIR.

if [[ -n ${CRIUCTL_SHELL_ZDOTDIR+set} ]]; then
    export ZDOTDIR=$CRIUCTL_SHELL_ZDOTDIR
    unset CRIUCTL_SHELL_ZDOTDIR
else
    unset ZDOTDIR
fi
if [[ -n ${CRIUCTL_SHELL_NO_RCS-} ]]; then
    unset CRIUCTL_SHELL_NO_RCS
    unsetopt rcs
elif [[ -r ${ZDOTDIR-$HOME}/.zshenv ]]; then
    source "${ZDOTDIR-$HOME}/.zshenv"
fi
if [[ -o interactive && -n ${CRIUCTL_SHELL-} ]]; then
    source "$CRIUCTL_SHELL_DIR/zsh/hooks.zsh"
fi
