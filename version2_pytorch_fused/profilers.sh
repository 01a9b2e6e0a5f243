# shellcheck shell=bash
# Shared by the shell scripts. A script for a profiler sets `folder`, may define `own_flag`, and calls `parse` or `start`.

script=$(echo "$(dirname "$0")"/tiny_llama_v*.py)
arguments=() # of the script
code=0       # exit code of the first command that failed
unset CDPATH # with it, cd prints the folder, and may go to another one
trap 'exit 130' INT # the training script handles Ctrl-C by itself; without this line the next command would run

fail() {
    echo "error: $1" >&2
    exit 2
}

keep_first() { # CODE
    [ "$code" -ne 0 ] || code=$1
}

usage() {
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0" # the head of the script
    echo "
Options of every script for profilers:

    --profile-dir DIR   folder of the results (default: $folder)
    --script FILE.py    the script to run, of any version (default: the version beside this script)

Every other argument, and all after --, goes to the script. It takes 30 steps (10 where DeepSpeed counts FLOPs, 3 under
rocprof-compute, 1 under ncu) unless --num-steps says otherwise. Its metrics file goes into DIR, so that a profiled run does not
replace measured step times."
}

own_flag() { false; } # FLAG: true if the sourcing script has this flag, and has noted it

parse() { # ARGUMENTS: sets folder, script and arguments
    while [ $# -gt 0 ]; do
        case $1 in
            -h | --help) usage; exit ;;
            --profile-dir=* | --script=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
            --profile-dir) folder=${2-}; shift 2 || fail "--profile-dir needs a folder" ;;
            --script) script=${2-}; shift 2 || fail "--script needs a Python file" ;;
            --) arguments+=("${@:2}"); break ;;
            *) own_flag "$1" || arguments+=("$1"); shift ;;
        esac
    done
    case $folder in
        '' | -*) fail "--profile-dir needs a folder" ;; # an empty one would be /, and -* is the next flag
    esac
    [ -f "$script" ] || fail "there is no script '$script': name one with --script FILE.py"
}

begin() { # TOOL RESULT FOLDER: makes the folder; false if the tool is missing. Either way it prints a line
    if ! command -v "$1" >/dev/null; then
        echo "$1 is not on PATH: skipped the $2" >&2
        return 1
    fi
    mkdir -p "$3" || exit 2
    echo "$1: $2 of $script, into $3" >&2
}

start() { # TOOL RESULT STEPS ARGUMENTS: parses the arguments, and begins; exits if the tool is missing
    arguments=(--num-steps "$3") # if a flag comes twice, the script takes the later one: here the user's
    parse "${@:4}"
    begin "$1" "$2" "$folder" || exit 0
}
