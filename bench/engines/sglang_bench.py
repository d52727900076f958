"""SGLang's own Qwen3-VL tower, eager and in its CUDA graphs, against the same tower with our plugin: answers and times.

    PYTHONPATH=CHECKOUT:SITE python -m fusedvit.bench.engines.sglang_bench --json OUT.json [--tower Qwen3-VL-8B]

SITE holds SGLang and its dependencies; use `--tower tiny` without a GPU, where it runs in fp32. The tolerance rule
compares our answers with SGLang's and with Hugging Face's; `sglang_towers` has the rest.
"""

from importlib import import_module
from importlib.util import find_spec

from fusedvit.bench.records import arguments, run_program
from fusedvit.bench.towers import GEOMETRIES
from fusedvit.errors import InputError


def main(argv: list[str] | None = None) -> int:
    """Writes the document; 1 if one of our answers is wrong or a call did not run fused."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--tower", default="Qwen3-VL-8B", choices=[*GEOMETRIES], help="a geometry of Qwen3-VL's")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing for each workload")
    args = parser.parse_args(argv)
    if find_spec("sglang") is None:
        raise InputError("SGLang expected on Python's path, got none: PYTHONPATH=CHECKOUT:SITE")
    code: int = import_module("fusedvit.bench.engines.sglang_towers").measure(args)  # imports SGLang
    return code


if __name__ == "__main__":
    run_program(main)
