# Shared by the set-up-and-run scripts: a virtual environment with everything the given extras need.
# Sourced, not run; expects $root.

say() { printf '%s\n' "$*" >&2; }

# The newest Python that is at least 3.11.
find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3; do
        [ -n "$candidate" ] || continue
        command -v "$candidate" >/dev/null 2>&1 || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    return 1
}

apt_install() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || return 1
    say "installing Debian packages: $*"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq >&2 && apt-get install -y -qq "$@" >&2
}

# ensure_command NAME PACKAGE: installs the Debian package if there is no such command; goes on without it otherwise.
ensure_command() {
    command -v "$1" >/dev/null 2>&1 || apt_install "$2" || say "there is no command $1: tests that need it are skipped"
}

# ensure_venv EXTRAS: makes $root/.venv if there is none, and installs the project with EXTRAS when needed.
ensure_venv() {
    local extras=$1 python stamp wanted
    python=$(find_python) || { apt_install python3 python3-venv && python=$(find_python); } || {
        say "Python 3.11 or newer is needed: install it (Debian: apt-get install python3 python3-venv) and run this again."
        exit 1
    }
    if [ ! -x "$root/.venv/bin/python" ]; then
        say "making .venv with $python"
        "$python" -m venv "$root/.venv" 2>/dev/null || {
            rm -rf "$root/.venv"
            apt_install python3-venv && "$python" -m venv "$root/.venv"
        } || {
            say "a virtual environment cannot be made: install the venv module (Debian: apt-get install python3-venv)."
            exit 1
        }
    fi
    stamp="$root/.venv/installed-$(printf '%s' "$extras" | tr -c 'a-z\n' '-')"
    wanted=$(cksum <"$root/pyproject.toml")
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        say "installing rnsfast[$extras]"
        PYTHONWARNINGS=ignore "$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check -e "$root[$extras]" >&2 || {
            say "the installation failed; the lines above say why."
            exit 1
        }
        printf '%s' "$wanted" >"$stamp"
    fi
}
