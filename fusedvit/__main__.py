"""`python -m fusedvit`, and the `fusedvit` command."""

import os
import sys
from importlib import import_module

CLI_PACKAGES = {"typer", "rich", "matplotlib", "PIL", "av"}  # of the extra "cli"


def main() -> None:
    sys.exit(import_module("fusedvit.cli.ending").ended(_command))


def _command() -> None:
    if os.environ.get("COLUMNS") == "0":  # consoles that do not know their width; rich would print nothing
        del os.environ["COLUMNS"]
    try:
        app = import_module("fusedvit.cli.app").app  # not at the top: without the extra this file must still import
        app(prog_name="fusedvit")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in CLI_PACKAGES:
            raise
        print(f'The command needs {error.name}: pip install "fusedvit[cli]"', file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
