# Hooks of a session for an interactive fish: see ../shell_hooks.py.  Read by --init-command.

set -g __criuctl_mark aid=$CRIUCTL_SHELL
set -g __criuctl_n 0
set -g __criuctl_dir $CRIUCTL_SESSION_DIR
set -g __criuctl_seen ''
set -e CRIUCTL_SHELL CRIUCTL_SHELL_DIR

# Take over, once, the variables that a client has brought (criuctl attach --update-env).
function __criuctl_refresh
    test -r "$__criuctl_dir/environment"; or return
    set -l first 1
    while read -l line
        if test -n "$first"
            set first ''
            test "$line" = "$__criuctl_seen"; and break
            set -g __criuctl_seen $line
        else if string match -q -- '*=*' $line
            set -l pair (string split -m 1 -- = $line)
            set -gx $pair[1] $pair[2]
        else if test -n "$line"
            set -e $line
        end
    end <"$__criuctl_dir/environment"
end

# Mark the beginning of a prompt.
function __criuctl_prompt --on-event fish_prompt
    __criuctl_refresh
    set -g __criuctl_n (math $__criuctl_n + 1)
    printf '\e]133;A;%s;n=%d;pid=%d\a' $__criuctl_mark $__criuctl_n $fish_pid
end

# Mark the beginning of a command.
function __criuctl_preexec --on-event fish_preexec
    __criuctl_recover
    printf '\e]133;C;%s;n=%d\a' $__criuctl_mark $__criuctl_n
end

# Mark the end of a command with its status.
function __criuctl_postexec --on-event fish_postexec
    printf '\e]133;D;%d;%s;n=%d\a' $status $__criuctl_mark $__criuctl_n
end

# Go on with the user's history.
function __criuctl_recover
    if set -q __criuctl_quiet
        set -e __criuctl_quiet
        set -e -g fish_history
        if set -q __criuctl_history
            set -g fish_history $__criuctl_history
            set -e __criuctl_history
        end
    end
end

# Take a line from the session's holder, in the place of what is half typed.  It is not added to the
# history.  fish leaves a line that it cannot parse in its editor: report such a one here.
function __criuctl_key
    __criuctl_refresh
    printf '\e]7133;R;%s;n=%d\a' $__criuctl_mark $__criuctl_n
    set -l size (command head -c 8)
    string match -qr '^[0-9]{8}$' -- $size; or return
    set -l text (command head -c $size | string collect)
    string match -q -- "$__criuctl_mark:?*" $text; or return
    set -l line (printf %b (string replace -- "$__criuctl_mark:" '' $text | string collect) | string collect)
    commandline -r -- $line
    if not commandline --is-valid
        commandline -r ''
        printf '%s\r\n' $line
        printf '\e]133;C;%s;n=%d\a' $__criuctl_mark $__criuctl_n
        set -l fish (status fish-path)
        command $fish --no-config --no-execute --command $line
        printf '\e]133;D;2;%s;n=%d\a' $__criuctl_mark $__criuctl_n
        __criuctl_prompt
        commandline -f repaint
        return
    end
    if set -q fish_private_mode
        # There another history would be an empty one; a line with a blank is not kept in this one.
        commandline -r -- " $line"
        commandline -f execute
        return
    end
    if set -qg fish_history
        set -g __criuctl_history $fish_history
    end
    set -g __criuctl_quiet 1
    set -g fish_history ''
    commandline -f execute
end

for mode in default insert visual replace replace_one
    bind -M $mode \x1e __criuctl_key
end
