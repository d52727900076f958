"""`python -m fusedvit`, and the `fusedvit` command."""

import os
import sys
from importlib import import_module


def main() -> None:
    sys.exit(import_module("fusedvit.cli.ending").ended(_command))


def _command() -> None:
    if os.environ.get("COLUMNS") == "0":  # set by consoles that do not know their width; rich would print nothing
        del os.environ["COLUMNS"]
    try:
        app = import_module("fusedvit.cli.app").app  # not at the top: this file must import without the extra `cli`
        app(prog_name="fusedvit")
    except ModuleNotFoundError as error:
        said = import_module("fusedvit.cli.ending").missing_extra(error)
        if said is None:
            raise
        print(said, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
