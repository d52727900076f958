"""Specs of released towers."""

from fusedvit.bench.towers import GEOMETRIES, spec_of

QWEN2_VL_7B, QWEN25_VL_7B, QWEN3_VL_8B, QWEN3_VL_4B, GLM_41V = (
    spec_of(GEOMETRIES[name]) for name in ("Qwen2-VL-7B", "Qwen2.5-VL-7B", "Qwen3-VL-8B", "Qwen3-VL-4B", "GLM-4.1V-9B")
)
