"""`python -m fusedvit`, and the `fusedvit` command."""

import os
import sys
from importlib import import_module

INTERRUPTED = 130  # as a shell says it of SIGINT
CLI_PACKAGES = {"typer", "rich", "matplotlib", "PIL", "av"}  # of the extra "cli"


def main() -> None:
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
    except KeyboardInterrupt:  # while modules are imported; later typer catches it
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
