# What the scripts for profilers share. Each sources this file, sets `folder`, may set `arguments` and define `own_flag`, and hands
# its arguments to `parse`.

script=$(dirname "$0")/tiny_llama_v2.py
arguments=() # of the script

fail() {
    echo "error: $1" >&2
    exit 2
}

own_flag() { false; } # FLAG: true if the sourcing script has it, and has taken note of it

parse() { # ARGUMENTS: sets folder, script and arguments
    while [ $# -gt 0 ]; do
        case $1 in
            -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit ;;
            --profile-dir=* | --script=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
            --profile-dir) folder=${2-}; shift 2 || fail "--profile-dir needs a folder" ;;
            --script) script=${2-}; shift 2 || fail "--script needs a Python file" ;;
            --) arguments+=("${@:2}"); break ;;
            *) own_flag "$1" || arguments+=("$1"); shift ;;
        esac
    done
    [ -f "$script" ] || fail "there is no script '$script': name one with --script FILE.py"
}

begin() { # TOOL RESULT FOLDER: makes the folder; false if there is no such tool. Either way it says so
    if ! command -v "$1" >/dev/null; then
        echo "$1 is not on PATH: skipped the $2" >&2
        return 1
    fi
    mkdir -p "$3" || exit 2
    echo "$1: $2 of $script, into $3" >&2
}
