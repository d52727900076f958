"""GPUs by name, for what is planned or compiled where none of them is: compute capability, SMs, shared memory."""

from fusedvit.kernels.codegen_checks import MAX_SHARED
from fusedvit.kernels.tile_configs import Target

GPUS: dict[str, tuple[int, int, str]] = {  # capability, SMs, the driver's name: tuning tables are found by it
    "a100": (80, 108, "NVIDIA A100-SXM4-80GB"),
    "a30": (80, 56, "NVIDIA A30"),
    "a10": (86, 72, "NVIDIA A10"),
    "a10g": (86, 80, "NVIDIA A10G"),
    "a40": (86, 84, "NVIDIA A40"),
    "a6000": (86, 84, "NVIDIA RTX A6000"),
    "rtx-3090": (86, 82, "NVIDIA GeForce RTX 3090"),
    "l4": (89, 58, "NVIDIA L4"),
    "l40s": (89, 142, "NVIDIA L40S"),
    "rtx-4090": (89, 128, "NVIDIA GeForce RTX 4090"),
    "rtx-6000-ada": (89, 142, "NVIDIA RTX 6000 Ada Generation"),
    "h20": (90, 78, "NVIDIA H20"),
    "h100": (90, 132, "NVIDIA H100 80GB HBM3"),
    "h100-pcie": (90, 114, "NVIDIA H100 PCIe"),
    "h200": (90, 132, "NVIDIA H200"),
    "gh200": (90, 132, "NVIDIA GH200 480GB"),
    "b200": (100, 148, "NVIDIA B200"),
    "rtx-5090": (120, 170, "NVIDIA GeForce RTX 5090"),
    "rtx-pro-6000": (120, 188, "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
}


def target_named(gpu: str) -> Target:
    """The target of one of `GPUS`.

    Raises:
        ValueError: no such name.
    """
    if gpu not in GPUS:
        raise ValueError(f"no GPU {gpu!r}; there are {', '.join(GPUS)}")
    capability, sms, name = GPUS[gpu]
    return Target(capability, sms, MAX_SHARED[capability], name)
