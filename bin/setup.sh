# Sourced by bin/engine, bin/check and bin/test: makes .venv and installs what is missing. Prints to stderr alone.
# A stamp, written last and by rename, says what an environment was made from; while one is being changed a mark
# (.unfinished) lies in it, so the next run finishes or repairs what an interrupted one left. Runs wait for each other.
# Knows nothing of what the environment is used for. Every failure that a person can mend exits with 69 and says how.

setup_say() { printf 'engine: %s\n' "$*" >&2; }
setup_more() { printf '        %s\n' "$*" >&2; }

setup_python() {
    # The interpreter to build with: $ENGINE_PYTHON and no other, or the first that is new enough. 3.11 comes first
    # because the pinned versions are tested with it.
    local candidate candidates=(python3.11 python3.12 python3.13 python3.14 python3) found=""
    [ -z "${ENGINE_PYTHON:-}" ] || candidates=("$ENGINE_PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$candidate"
            return 0
        fi
        found="${found:+$found, }$candidate: $("$candidate" --version 2>/dev/null || echo none)"
    done
    setup_say "Python 3.11 or newer is needed; found $found."
    setup_more "Install it, or name one with ENGINE_PYTHON=/path/to/python3.11, and run this again."
    return 69
}

setup_stamp() {
    # What the environment is made from, its interpreter (and so its Python version) included.
    cat "$ENGINE_ROOT/pyproject.toml" "$ENGINE_ROOT/constraints.txt" "$ENGINE_ROOT/bin/setup.sh" | sha256sum
    readlink -f "$ENGINE_ROOT/.venv/bin/python"
}

setup_is_chosen() {
    # An environment of another interpreter than $ENGINE_PYTHON is made anew; without the variable any will do.
    local base='import os, sys; print(os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable))'
    [ -z "${ENGINE_PYTHON:-}" ] || [ "$("$ENGINE_PYTHON" -I -c "$base" 2>/dev/null)" = "$(readlink -f "$1/bin/python")" ]
}

setup_is_ready() {
    # $1: "server" or "test". The quick question, asked by every run: no Python is started for it.
    local venv="$ENGINE_ROOT/.venv"
    [ -x "$venv/bin/python" ] && [ -f "$venv/.stamp-$1" ] && [ "$(setup_stamp)" = "$(<"$venv/.stamp-$1")" ] &&
        setup_is_chosen "$venv"
}

setup_is_whole() {
    # After an interrupt: are the files of every package there, with the size that its RECORD (written last) states?
    [ "$(<"$1/.unfinished")" != venv ] && "$1/bin/python" -I - <<'EOF'
import csv, importlib.metadata, pathlib, sys, sysconfig
root = pathlib.Path(sysconfig.get_path("purelib"))
whole = not list(root.glob("~*"))
for package in importlib.metadata.distributions(path=[str(root)]):
    record = package.read_text("RECORD") or ""
    rows = [row for row in csv.reader(record.splitlines()) if row[2]]
    whole = whole and bool(rows) and all(
        (root / name).is_file() and (root / name).stat().st_size == int(size) for name, _, size in rows
    )
sys.exit(not whole)
EOF
}

setup_make_venv() {
    # $1: where. Empties what is there.
    local python options=()
    python=$(setup_python) || return
    setup_say "making .venv with $("$python" --version) ($python) ..."
    if ! mkdir -p "$1" || ! printf venv >"$1/.unfinished" ||
        ! find "$1/" -mindepth 1 -maxdepth 1 ! -name .unfinished -exec rm -rf {} +; then
        setup_say "cannot write to $1."
        return 69
    fi
    # Debian splits ensurepip off into python3-venv; the pip of the system can serve as well.
    "$python" -c 'import ensurepip' >/dev/null 2>&1 || options=(--without-pip)
    if ! "$python" -m venv "${options[@]}" "$1" >&2; then
        setup_say "$python cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)."
        setup_more "Install what is missing, or choose another with ENGINE_PYTHON, and run this again."
        return 69
    fi
}

setup_find_pip() {
    # Sets setup_pip to a pip that installs into the environment $1: its own, or the one of the system.
    local python is_recent='import sys, pip; sys.exit([int(part) for part in pip.__version__.split(".")[:2]] < [22, 3])'
    setup_pip=("$1/bin/python" -m pip)
    "$1/bin/python" -c 'import pip' >/dev/null 2>&1 && return 0
    python=$(setup_python) || return
    setup_pip=("$python" -m pip --python "$1/bin/python")
    "$python" -c "$is_recent" >/dev/null 2>&1 && return 0
    setup_say "$python has neither ensurepip nor pip 22.3 (on Debian and Ubuntu: apt install python3-venv)."
    return 69
}

setup_wanted() {
    # The requirements of pyproject.toml, one a line. $1: the environment; $2: "server" or "test".
    "$1/bin/python" -I - "$ENGINE_ROOT/pyproject.toml" "$2" <<'EOF'
import sys, tomllib
with open(sys.argv[1], "rb") as file:
    tables = tomllib.load(file)
wanted = tables["project"]["dependencies"] + tables["project"]["optional-dependencies"]["server"]
if sys.argv[2] == "test":
    wanted += tables["dependency-groups"]["test"] + tables["dependency-groups"]["check"]
print("\n".join(wanted))
EOF
}

setup_install() {
    # $1: "server" or "test". Runs under the lock.
    local venv="$ENGINE_ROOT/.venv" wanted quiet=() options=(--disable-pip-version-check -c constraints.txt)
    local requirements=() name names=("$1")
    if [ -e "$venv/.unfinished" ] && ! setup_is_whole "$venv"; then
        setup_say "an earlier set-up was interrupted and left .venv damaged; starting again."
        printf venv >"$venv/.unfinished"
    fi
    if [ "$(cat "$venv/.unfinished" 2>/dev/null)" = venv ] || ! setup_is_chosen "$venv" ||
        ! "$venv/bin/python" -I -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
        setup_make_venv "$venv" || return
    fi
    printf packages >"$venv/.unfinished" && rm -f "$venv"/.stamp-* && setup_find_pip "$venv" || return
    wanted=$(setup_wanted "$venv" "$1") || return 70
    mapfile -t requirements <<<"$wanted"
    setup_say "installing ${#requirements[@]} packages and what they need (torch is large: this takes minutes) ..."
    [ -t 2 ] || quiet=(--quiet --progress-bar off)
    # One call, so that one resolution sees every constraint. A setting of the user's that installs elsewhere is not ours.
    if ! (cd "$ENGINE_ROOT" && env -u PIP_USER -u PIP_TARGET -u PIP_PREFIX -u PIP_ROOT \
        "${setup_pip[@]}" install "${options[@]}" "${quiet[@]}" "${requirements[@]}" >&2); then
        setup_say "installing failed; pip says why above. What was installed is kept. Then run the same command again:"
        setup_more "connect to the network,"
        setup_more "or point pip at a mirror (PIP_INDEX_URL=...) or a folder of wheels (PIP_NO_INDEX=1 PIP_FIND_LINKS=...),"
        setup_more "or install by hand:$(printf ' %q' cd "$ENGINE_ROOT") &&$(printf ' %q' "${setup_pip[@]}" install \
            "${options[@]:1}" "${requirements[@]}")"
        return 69
    fi
    # The source tree goes on the path by a .pth file: no build, no network. Relative, so that the tree may be moved.
    "$venv/bin/python" -I -c 'import pathlib, sysconfig
pathlib.Path(sysconfig.get_path("purelib"), "engine-source.pth").write_text("../../../..\n")' || return 70
    rm -f "$venv/.unfinished"
    # The larger set holds the smaller one.
    [ "$1" = server ] || names+=(server)
    for name in "${names[@]}"; do
        setup_stamp >"$venv/.stamp.new" && mv "$venv/.stamp.new" "$venv/.stamp-$name" || return
    done
    setup_say "ready."
}

setup() {
    # $1: "server" or "test". Ends the script when it cannot.
    local lock="$ENGINE_ROOT/.setup.lock" status
    setup_is_ready "$1" && return 0
    if ! : 2>/dev/null >>"$lock"; then
        setup_say "cannot write to $ENGINE_ROOT, where .venv belongs."
        exit 69
    fi
    (
        # pip and its children hold the lock too: when this script is killed, nobody starts before they have ended.
        trap 'setup_say "interrupted; run the same command again to go on."; exit 130' INT
        flock -n 9 || { setup_say "waiting for another set-up of $ENGINE_ROOT ..." && flock 9; } || exit 70
        setup_is_ready "$1" || setup_install "$1"
    ) 9>>"$lock"
    status=$?
    [ "$status" -eq 0 ] || exit "$status"
}
