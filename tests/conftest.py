"""What every test shares: the interpreter where there is no GPU, the `gpu` and `slow` markers, the device."""

import os
from collections.abc import Iterator

import pytest
import torch

HAS_GPU = torch.cuda.is_available()

# Triton reads this when a kernel is decorated, that is when fusedvit.kernels is imported: hence before any test is.
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(1)  # PyTorch's OpenMP threads do not survive a fork: tests that fork would hang


# What `make test` leaves to `make test-all`: whole files, or tests, with processor seconds on one core; besides them
# classes of a shape that another one stands for (`each_of` in tests/support/families.py).
SLOW = (
    "tests/emulator/kernels/test_emulated_kernels.py",  # 300
    "tests/unit/test_emulated_tower.py",  # 75
    "tests/kernels/test_aot.py::test_command_passes_on_what_ships",  # 10
    "tests/kernels/test_aot.py::test_what_is_compiled_is_what_whole_towers_launch",  # 28
    "tests/kernels/test_hopper_attention.py::test_what_is_found_by_address_lies_where_shared_memory_begins",  # 21
    "tests/kernels/test_hopper_attention.py::test_what_ships_compiles_clean",  # 8
    "tests/kernels/test_hopper_gemm.py::test_what_the_tuner_may_choose_compiles_clean",  # 16
    "tests/kernels/test_hopper_swap_ab.py::test_compiled_code_has_its_operands_where_shared_memory_begins",  # 9
    "tests/hf/test_compiled_receiver.py::test_mixed_traffic_compiles_no_more_than_behind_the_original",  # 27
    "tests/hf/test_compiled_receiver.py::test_the_count_sees_features_of_another_kind",  # 21, of the one above
    "tests/hf/test_compiled.py::test_a_compiled_model",  # 23
    "tests/hf/test_weights.py::test_threads_after_a_change",  # 16
    "tests/hf/test_data_parallel.py::test_any_change_that_comes_and_goes",  # 40
    "tests/hf/test_interrupts.py::test_a_call_that_takes_other_weights",  # 15
    "tests/hf/test_numbers.py::test_attributes_that_matter_in_the_other_families",  # 60
    "tests/hf/test_own_code.py::test_every_function_that_a_tower_runs",  # 40
    "tests/unit/bench/test_tune.py::test_checking_survives_a_crash_and_a_hang",  # 32
    "tests/unit/test_family_encoders.py::test_buffers_of_a_budget_and_nan_in_their_rest",  # 49
    "tests/unit/test_compile_service.py::test_a_full_disk",  # 6
    "tests/unit/test_compile_service.py::test_a_program_that_dies_is_started_again",  # 6
    "tests/unit/test_compile_service.py::test_a_program_that_cannot_run_is_said_once",  # 7
    "tests/unit/test_cli_kernel_checks.py::test_one_block_in_the_interpreter",  # 5
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.split("[")[0].startswith(SLOW):
            item.add_marker(pytest.mark.slow)
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: the GPU, or the CPU under Triton's interpreter."""
    return torch.device("cuda", torch.cuda.current_device()) if HAS_GPU else torch.device("cpu")


@pytest.fixture
def without_tf32() -> Iterator[None]:
    """fp32 in earnest on a GPU: cuDNN would take TF32 for the patch embedding's convolution."""
    kept = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = kept


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans as on a Hopper GPU; the interpreter, which runs no Gluon, is not asked."""
    monkeypatch.setattr("fusedvit.kernels.hopper.gluon_compat.usable", lambda capability: capability == 90)
