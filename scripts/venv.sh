# Sourced by the other scripts: makes the virtual environment $GPUAFF_VENV (default: .venv)
# with the interpreter $PYTHON (default: python3), and puts it first on the PATH.
: "${GPUAFF_VENV:=.venv}" "${PYTHON:=python3}"
if [ ! -x "$GPUAFF_VENV/bin/python" ]; then
  "$PYTHON" -m venv "$GPUAFF_VENV"
  # Dependency groups need pip 25.1.
  "$GPUAFF_VENV/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
fi
export PATH="$(cd "$GPUAFF_VENV" && pwd)/bin:$PATH"
install() { python -m pip install --quiet --disable-pip-version-check "$@"; }
