"""Virtual environments in `target/` for tests that use packages of the Python registry.

A test that cannot have its packages prints SKIPPED with the reason and ends.
"""

import pathlib
import subprocess
import sys

from daemon_car import REPOSITORY

INSTALL_S = 900


def programs(name: str, packages: list[str], check: list[str]) -> pathlib.Path:
    """Returns the folder of the programs of the virtual environment `target/NAME`.

    Creates the environment with `packages` if it is missing. `check` is a program of it with
    arguments that must succeed.
    """
    found = REPOSITORY / "target" / name / "bin"
    try:
        if not (found / check[0]).exists():
            subprocess.run(
                [sys.executable, "-m", "venv", found.parent], check=True, capture_output=True
            )
            install = [found / "python", "-m", "pip", "install", "-q", *packages]
            subprocess.run(install, check=True, capture_output=True, timeout=INSTALL_S)
        subprocess.run([found / check[0], *check[1:]], check=True, capture_output=True)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"SKIPPED: {' '.join(packages)} cannot be installed or started here ({error})")
        sys.exit(0)
    return found


def run_inside(name: str, packages: list[str], imports: str) -> None:
    """Runs this test again, with the argument `--inside`, in an environment that has `imports`."""
    python = programs(name, packages, ["python", "-c", f"import {imports}"]) / "python"
    sys.exit(subprocess.run([python, *sys.argv, "--inside"]).returncode)
