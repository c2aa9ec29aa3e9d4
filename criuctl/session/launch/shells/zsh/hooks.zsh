# Nothing that runs here may fail outside of a condition, or print to the terminal what is no mark:
# the user may set any option.  What "xtrace" prints goes where the errors go.

typeset -g __criuctl_mark=aid=$CRIUCTL_SHELL __criuctl_quiet= __criuctl_sp=
typeset -g __criuctl_dir=${CRIUCTL_SESSION_DIR-} __criuctl_seen=
typeset -gi __criuctl_n=0
unset CRIUCTL_SHELL CRIUCTL_SHELL_DIR

# Take over, once, the variables that a client has brought (criuctl attach --update-env).
function __criuctl_refresh() {
    local line= first=1
    [[ -r $__criuctl_dir/environment ]] || return 0
    while IFS= read -r line; do
        if [[ -n $first ]]; then
            first=
            if [[ $line == "$__criuctl_seen" ]]; then break; fi
            __criuctl_seen=$line
        elif [[ $line == *=* ]]; then
            export "$line" || :
        elif [[ -n $line ]]; then
            unset "$line" || :
        fi
    done <$__criuctl_dir/environment || :
    return 0
}

# Mark the end of a command with its status, and the beginning of a prompt.
function __criuctl_precmd() {
    {
        print -rn -- $'\e]133;D;'"$?;$__criuctl_mark;n=$__criuctl_n"$'\a' >$TTY
        __criuctl_refresh
        __criuctl_recover
        if [[ -n $__criuctl_sp ]]; then
            # A line without an end: shown as zsh would have done before this mark.
            print -Pn -- "${PROMPT_EOL_MARK-%B%S%#%s%b}${(l:COLUMNS-1:: :):-}"$'\r \r' >$TTY
            setopt promptsp
            __criuctl_sp=
        fi
        __criuctl_n=$((__criuctl_n + 1))
        print -rn -- $'\e]133;A;'"$__criuctl_mark;n=$__criuctl_n;pid=$$"$'\a' >$TTY
        if [[ ${PS2-} != *"$__criuctl_mark"* ]]; then
            typeset -g +x PS2=$'%{\e]133;A;k=s;'"$__criuctl_mark"$'\a%}'"${PS2-}"
        fi
        return 0
    } 2>/dev/null
}

# Mark the beginning of a command.
function __criuctl_preexec() {
    {
        __criuctl_recover
        print -rn -- $'\e]133;C;'"$__criuctl_mark;n=$__criuctl_n"$'\a' >$TTY
        return 0
    } 2>/dev/null
}

# Put back what __criuctl_key has set for one line.
function __criuctl_recover() {
    if [[ -n $__criuctl_quiet ]]; then
        __criuctl_quiet=
        histchars=$__criuctl_chars
    fi
}

# Keep a line that came from the session's holder out of the history.
function __criuctl_addhistory() {
    {
        setopt localoptions noerrexit noerrreturn
        if [[ -n $__criuctl_quiet ]]; then
            fc -p # until the line has been processed; it would stay until the next one
            return 1
        fi
        return 0
    } 2>/dev/null
}

# Take a line from the session's holder, in the place of what is half typed.  "!" has no meaning in
# it, and its output ends where the command ends: no mark of a missing end of line belongs to it.
function __criuctl_key() {
    {
        local text=
        __criuctl_refresh
        print -rn -- $'\e]7133;R;'"$__criuctl_mark;n=$__criuctl_n"$'\a' >$TTY
        if IFS= read -r -t 10 -d $'\x1f' text <$TTY && [[ $text == "$__criuctl_mark:"?* ]]; then
            printf -v BUFFER '%b' "${text#"$__criuctl_mark:"}"
            CURSOR=$#BUFFER
            if [[ -z $__criuctl_quiet ]]; then
                typeset -g __criuctl_chars=$histchars
                histchars=$'\1\1'${histchars[3]}
                __criuctl_quiet=1
            fi
            if [[ -o promptsp ]]; then
                unsetopt promptsp
                __criuctl_sp=1
            fi
            zle .accept-line
        fi
        return 0
    } 2>/dev/null
}

zle -N __criuctl_key
function {
    local map
    for map in emacs viins vicmd isearch command; do
        bindkey -M $map $'\x1e' __criuctl_key
    done
}
typeset -ga precmd_functions preexec_functions zshaddhistory_functions
precmd_functions+=(__criuctl_precmd)
preexec_functions+=(__criuctl_preexec)
zshaddhistory_functions+=(__criuctl_addhistory)
