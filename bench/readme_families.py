"""The README's tables of families: what was measured of which, and what is known and not fused."""

from typing import Any

from fusedvit.bench.readme_speed import turns_explained
from fusedvit.families.registry import FAMILIES, family_of
from fusedvit.families.unsupported import UNSUPPORTED

Table = tuple[list[str], list[list[str]]]
PATCHES = ("1024", "4096", "6272")
_ACTIVATIONS = {"gelu_tanh": "GELU (tanh)", "gelu": "GELU", "quick_gelu": "quick GELU", "swiglu": "SwiGLU"}
_TAILS = {
    "merger": "merger",
    "downsample": "convolution and gated merger",
    "norm": "last norm (what merges is outside)",
}
NOT_MEASURED = "not measured"
ELSEWHERE = {"Qwen3-VL-8B": "see Measurements"}  # what other documents have


def explanation(gpu: dict[str, Any]) -> list[str]:
    """What stands in the table of families."""
    rows = [row for found in gpu.values() for row in found.get("cost", {}).values()]
    return [
        "Of every tower the whole forward pass is fused, from pixels to outputs: patch embedding, positions, rotary",
        "embedding, attention, MLPs and what is named above. Error: ours over Hugging Face's, the largest and the rms",
        "over all outputs, images, videos and mixes (1.00 = as exact; the rule allows 2.00 and 1.25): in bf16 on the",
        "GPU against fp32 at full depth, in fp32 on a CPU against fp64 at the depth given. Times: wall milliseconds of",
        "Hugging Face (`sdpa`, eager) → ours through graphs, in turns in one run, and the median of their ratios; 6272",
        "patches are 8 images. Random weights.",
        *turns_explained(rows),
    ]


def family_table(gpu: dict[str, Any], cpu: dict[str, Any]) -> Table:
    """A row for every geometry that was measured on either, in the order of the registry.

    Raises:
        ValueError: a registered family that was not.
    """
    cpu, gpu = ({name: found for name, found in each.items() if "tower" in found} for each in (cpu, gpu))
    measured = cpu | gpu
    rows = []
    for family in FAMILIES:
        names = [name for name, found in measured.items() if found["class"] in family.class_names]
        if not names:
            raise ValueError(f"{family.name} is registered and was measured nowhere")
        rows += [_row(name, measured[name], gpu.get(name, {}), cpu.get(name, {})) for name in names]
    times = [f"{patches} patches" for patches in PATCHES]
    return ["family", "tower classes", "checkpoint", "tower", "fused", "error, bf16", "error, fp32", *times], rows


def unsupported_table() -> Table:
    """Tower classes that are known and left alone."""
    return ["tower class", "why not"], [[f"`{name}`", why] for name, why in UNSUPPORTED.items()]


def _row(name: str, found: dict[str, Any], gpu: dict[str, Any], cpu: dict[str, Any]) -> list[str]:
    family = family_of(found["class"])
    assert family is not None, "rows are made of registered families"
    classes = ", ".join(f"`{cls}`" for cls in family.class_names)
    also = f"; also in {', '.join(f'`{kind}`' for kind in family.also_in)}" if family.also_in else ""
    others = f" (also {found['others']})" if found["others"] else ""
    cost, missing = gpu.get("cost", {}), ELSEWHERE.get(name, NOT_MEASURED)
    return [
        family.name,
        f"{classes}{also}",
        f"{name}{others}",
        _numbers(found["tower"]),
        _parts(found["tower"]),
        _error(gpu, missing),
        _error(cpu, NOT_MEASURED) + (f", {cpu['blocks']} blocks" if "blocks" in cpu else ""),
        *(_time(cost.get(patches), missing) for patches in PATCHES),
    ]


def _numbers(tower: dict[str, Any]) -> str:
    heads = f"{tower['num_heads']} heads of {tower['head_dim']}"
    if "kv_heads" in tower:
        heads += f" ({tower['kv_heads']} of k and v)"
    return (
        f"{tower['depth']} x {tower['hidden_size']}, {heads}, MLP {tower['intermediate_size']}, "
        f"patch {tower['patch_size']}, out {tower['out_size']}"
    )


def _parts(tower: dict[str, Any]) -> str:
    """What sets a family apart, of a spec's numbers without its defaults."""
    limit = f" up to {tower['glu_limit']:g}" if "glu_limit" in tower else ""
    parts = ["RMSNorm" if tower.get("norm") == "rms" else "LayerNorm"]
    parts.append(_ACTIVATIONS[tower.get("activation", "gelu_tanh")] + limit)
    if tower.get("qk_norm"):
        parts.append("norms of q and k")
    if "position_side" in tower:
        parts.append(f"{'bicubic' if tower.get('position_taps') == 16 else 'bilinear'} position table")
    if "window" in tower:
        blocks = ", ".join(map(str, tower["full_attention"]))
        parts.append(f"windows of {tower['window']} x {tower['window']} tokens but in blocks {blocks}")
    parts.append(_TAILS[tower.get("tail", "merger")])
    if tower.get("deepstack"):
        parts.append(f"{len(tower['deepstack'])} deepstack mergers")
    return ", ".join(parts)


def _error(found: dict[str, Any], missing: str) -> str:
    parity = found.get("parity", {}).values()
    if not parity:
        return missing
    if not all(verdict["passed"] for verdict in parity):
        return "breaks the rule"
    return f"{max(v['largest'] for v in parity):.2f} / {max(v['rms'] for v in parity):.2f}"


def _time(cost: dict[str, Any] | None, missing: str) -> str:
    if cost is None:
        return missing
    first = f", first {cost['first_ms']['ours']['median']:.1f}" if cost.get("first_ms") else ""
    return f"{cost['hf']['median']:.1f} → {cost['ours']['median']:.1f}{first} ({cost['speedup']['median']:.2f} x)"
