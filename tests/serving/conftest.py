"""Tests inside serving engines: each folder runs in the environment of its engine (`make test-serving`)."""

import importlib.util

ENGINES = ("vllm", "sglang", "ray")

collect_ignore = [engine for engine in ENGINES if importlib.util.find_spec(engine) is None]
