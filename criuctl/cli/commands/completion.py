"""``criuctl completion``."""

from __future__ import annotations

import click

from ..app import PROGRAM, App, pass_app
from ..pages import page

_SHELLS = ("bash", "zsh", "fish")

# click's own script for bash uses bash's splitting of the line into words, which splits at every @,
# : and =, so NAME@N and s3://... would never complete. This one splits at blanks, and strips from
# each answer the part that bash treats as words before the one to complete. The protocol is click's
# (its `bash_complete`).
_BASH = """\
%(complete_func)s() {
    local line="${COMP_LINE:0:COMP_POINT}" begin="" mark head completion type value
    local -a words
    local IFS=$' \\t\\n'
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    local last="${words[-1]}"
    for mark in @ : =; do
        [[ $COMP_WORDBREAKS == *"$mark"* && $last == *"$mark"* ]] || continue
        head="${last%%"${last##*"$mark"}"}"
        (( ${#head} > ${#begin} )) && begin="$head"
    done
    COMPREPLY=()
    while IFS=',' read -r type value; do
        case $type in
            dir) compopt -o dirnames 2> /dev/null ;;
            file) compopt -o default 2> /dev/null ;;
            plain) COMPREPLY+=("${value#"$begin"}") ;;
        esac
    done < <(COMP_WORDS="${words[*]}" COMP_CWORD=$((${#words[@]} - 1)) \
%(complete_var)s=bash_complete "$1" 2> /dev/null)
    return 0
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""


@page(
    examples=[
        ("bash, for all users:", "criuctl completion bash > /etc/bash_completion.d/criuctl"),
        ("zsh, in a folder of $fpath:", "criuctl completion zsh > ~/.zfunc/_criuctl"),
        ("fish:", "criuctl completion fish > ~/.config/fish/completions/criuctl.fish"),
    ],
)
@click.argument("shell", type=click.Choice(_SHELLS), help="bash (4.4 or newer), zsh or fish.")
@pass_app
def completion(app: App, shell: str) -> int:
    """Print the script by which a shell completes criuctl's commands, options, session names and
    checkpoints. Save it where the shell looks for completions, or evaluate it in the shell's
    start-up file.
    """
    from click.shell_completion import ShellComplete, get_completion_class

    from ..main import COMPLETE_VARIABLE, cli

    found = get_completion_class(shell)
    if found is None:
        raise click.BadParameter(f"click knows no completion for {shell}")
    answering = found(cli, {}, PROGRAM, COMPLETE_VARIABLE)
    # Not bash's own source(): that starts a bash to ask for its version, and has a template that
    # splits at @ and :.
    script = _BASH % answering.source_vars() if shell == "bash" else ShellComplete.source(answering)
    if shell == "fish":  # click's script cuts descriptions off at their first comma
        script = script.replace('string split ","', 'string split -m 1 ","')
    app.emit({"shell": shell, "script": script}, lambda: script.rstrip("\n"))
    return 0
