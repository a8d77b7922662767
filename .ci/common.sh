# What .ci/run and .ci/nightly share: interpreters, clean checkouts, steps that are timed. Sourced, from the repository.

source=$PWD
work=$(mktemp -d)
current="setting up" began=$SECONDS table="" failed=""

finish() {
    local status=$?
    if [ "$status" -ne 0 ]; then
        printf '\n== FAILED (exit %s) after %s s, in: %s\n' "$status" "$((SECONDS - began))" "$current" >&2
    fi
    jobs -p | xargs -r kill 2>/dev/null || true
    rm -rf "$work"
    exit "$status"
}
trap finish EXIT

# step NAME COMMAND...: runs the command and keeps its seconds for the table at the end.
step() {
    current=$1
    shift
    local start=$SECONDS
    printf '\n== %s (%s)\n' "$current" "$(date +%T)"
    "$@"
    table+=$(printf '%6s s  %s' "$((SECONDS - start))" "$current")$'\n'
}

# beside NAME COMMAND...: what has steps of its own begins, and runs beside the next ones until `joined`.
beside() {
    beside_name=$1
    shift
    (
        table="" # no && here: behind it, bash goes on after what fails
        "$@"
        printf '%s' "$table" >"$work/beside.table"
    ) >"$work/beside.log" 2>&1 &
    beside_process=$!
}

# joined: waits for what runs beside, prints what it has printed, and fails if it has failed.
joined() {
    local status=0
    current=$beside_name
    wait "$beside_process" || status=$?
    cat "$work/beside.log"
    [ "$status" -eq 0 ] || exit "$status"
    table+=$(cat "$work/beside.table")$'\n'
}

# try NAME COMMAND...: a step after which the next ones are run even if it fails; then `all_passed` fails in the end.
try() {
    local start=$SECONDS state=""
    printf '\n== %s (%s)\n' "$1" "$(date +%T)"
    "${@:2}" || { state=" FAILED" failed+=" $1;"; }
    table+=$(printf '%6s s  %s%s' "$((SECONDS - start))" "$1" "$state")$'\n'
}

all_passed() {
    printf '\n== seconds of each step\n%s%6s s  in all\n' "$table" "$((SECONDS - began))"
    current=$failed
    [ -z "$failed" ] || exit 1
    printf '\n== all passed\n'
}

# The path of a Python of the given minor version, from PATH or from pyenv.
find_python() {
    local candidate
    for candidate in "$(command -v "python$1" || true)" \
        "$(pyenv prefix "$(pyenv latest "$1" 2>/dev/null)" 2>/dev/null || true)/bin/python"; do
        if [ -n "$candidate" ] && "$candidate" -c "import sys; assert sys.version.startswith('$1.')" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

find_newest() {
    find_python 3.13 || find_python 3.12
}

# The README's command under a heading, word for word.
readme_command() {
    awk -v heading="$1" '$0 ~ heading { found = 1 } found && /^```/ { if (inside) exit; inside = 1; next } inside' README.md
}

# A clean checkout in which `python3` is the given interpreter.
checkout() { # NAME PYTHON
    mkdir -p "$work/$1/bin" "$work/$1/numpyro_dp"
    git archive HEAD | tar -x -C "$work/$1/numpyro_dp"
    ln -s "$2" "$work/$1/bin/python3"
}

in_checkout() ( # NAME COMMAND...
    cd "$work/$1/numpyro_dp"
    export PATH="$work/$1/bin:$PATH"
    shift
    bash -euo pipefail -c "$*"
)

require() { # WHAT COMMAND...: a line that says what is missing, and the end, if the command fails.
    current="looking for $1"
    shift
    "$@" || exit 1
}

has_space() {
    [ "$(df -Pk "$work" | awk 'NR == 2 { print $4 }')" -gt 6000000 ]
}

require "6 GB of free disk in ${TMPDIR:-/tmp} (set TMPDIR to another folder)" has_space
require "Python 3.11, for the oldest stack" find_python 3.11 >/dev/null
require "Python 3.12 or 3.13, for the newest stack" find_newest >/dev/null
oldest=$(find_python 3.11) newest=$(find_newest)
tests=$(readme_command "Run the tests") demo=$(readme_command "See it work")
require "the README's commands under \"Run the tests\" and \"See it work\"" test -n "$tests" -a -n "$demo"
