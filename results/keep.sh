# Sourced by the scripts beside it. keep FILE TARGET COMMAND...: runs a study that writes $work/FILE, and moves that to TARGET.
#
# A benchmark in which a model failed sets $code to 1. A study that was stopped ends the script with its exit code, and what it
# had measured is kept as TARGET.interrupted.
code=0
keep() {
    local ended=0
    "${@:3}" || ended=$?
    if [ "$ended" -eq 0 ] || { [ "$ended" -eq 1 ] && grep -Eqs '"status": ?"completed"' "$work/$1"; }; then
        mv "$work/$1" "$2"
        [ "$ended" -eq 0 ] || code=1
    else
        [ ! -e "$work/$1" ] || mv "$work/$1" "$2.interrupted"
        exit $((ended ? ended : 1))
    fi
}
