# Sourced by bin/engine and bin/test: makes .venv and installs what is missing. Prints to stderr alone.
# A stamp, written last, says for which files the environment was made; without it everything is checked again, so an
# interrupted run is finished by the next one. Two runs at once wait for each other.

setup_say() { printf '%s\n' "$*" >&2; }

setup_python() {
    # The interpreter to build with: $ENGINE_PYTHON, or the first one that is new enough.
    local candidate
    for candidate in ${ENGINE_PYTHON:-python3.11 python3.12 python3.13 python3.14 python3}; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return 0
        fi
    done
    setup_say "engine: Python 3.11 or newer is needed; found: $(python3 --version 2>&1 || echo none)."
    setup_say "        Install it, or name one with ENGINE_PYTHON=/path/to/python3.11."
    return 69
}

setup_stamp() {
    # What the environment is made from; the same text means the same environment.
    cat "$ENGINE_ROOT/pyproject.toml" "$ENGINE_ROOT/constraints.txt" "$ENGINE_ROOT/bin/setup.sh" | cksum
    printf '%s\n' "$ENGINE_ROOT"
}

setup_offline() {
    setup_say ""
    setup_say "engine: installing failed (the lines above say why). Nothing is broken: run the same command again."
    setup_say "        Without a network: point pip at a mirror (PIP_INDEX_URL=...) or at a folder of wheels"
    setup_say "        (PIP_NO_INDEX=1 PIP_FIND_LINKS=/path/to/wheels), then run it again."
    return 69
}

setup_install() {
    # $1: "server" or "test". Runs under the lock.
    local python venv="$ENGINE_ROOT/.venv" wanted
    if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -c 'import pip' >/dev/null 2>&1; then
        python=$(setup_python) || return 69
        setup_say "engine: making .venv with $("$python" --version) ..."
        if ! "$python" -m venv --clear "$venv" >&2; then
            rm -rf "$venv"
            setup_say "engine: $python cannot make a virtual environment (on Debian: apt install python3-venv)."
            return 69
        fi
    fi
    wanted=$("$venv/bin/python" - "$ENGINE_ROOT/pyproject.toml" "$1" <<'EOF'
import sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))
wanted = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["server"]
if sys.argv[2] == "test":
    wanted += project["dependency-groups"]["test"] + project["dependency-groups"]["check"]
print("\n".join(wanted))
EOF
    ) || return 70
    setup_say "engine: installing $(printf '%s\n' "$wanted" | wc -l) packages and what they need (torch is large) ..."
    if ! printf '%s\n' "$wanted" | "$venv/bin/python" -m pip install --disable-pip-version-check \
        --no-warn-script-location -c "$ENGINE_ROOT/constraints.txt" -r /dev/stdin >&2; then
        setup_offline
        return 69
    fi
    # The source tree itself goes on the path by a .pth file: no build, no network.
    "$venv/bin/python" - "$ENGINE_ROOT" <<'EOF' || return 70
import pathlib, sys, sysconfig
pathlib.Path(sysconfig.get_path("purelib"), "engine-source.pth").write_text(sys.argv[1] + "\n")
EOF
    setup_stamp >"$venv/.stamp-$1.new" && mv "$venv/.stamp-$1.new" "$venv/.stamp-$1"
    setup_say "engine: ready."
}

setup() {
    # $1: "server" or "test". Quick when there is nothing to do.
    local stamp="$ENGINE_ROOT/.venv/.stamp-$1" status
    [ -f "$stamp" ] && [ "$(setup_stamp)" = "$(cat "$stamp")" ] && return 0
    (
        flock 9 || exit 70
        [ -f "$stamp" ] && [ "$(setup_stamp)" = "$(cat "$stamp")" ] && exit 0
        setup_install "$1"
    ) 9>"$ENGINE_ROOT/.setup.lock"
    status=$?
    [ "$status" -eq 0 ] || exit "$status"
}
