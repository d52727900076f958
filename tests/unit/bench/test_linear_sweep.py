"""The sweep of the Hopper GEMM's tiles, on a CPU: what it would try, and the shape of a record."""

import torch

from fusedvit.bench.linear_sweep import questions, timed, variants
from fusedvit.kernels.tile_configs import Target


def test_every_tile_begun_early_and_not() -> None:
    names = {q.task.name: q for q in questions("Qwen3-VL-8B", (896, 4096), ())}
    assert {"patch", "qkv", "proj", "fc1", "fc2", "merger_fc1", "merger_fc2"} == set(names)
    few = {q.task.name: variants(q, Target()) for q in questions("Qwen3-VL-8B", (896,), ("proj", "fc2"))}
    many = variants(names["proj"], Target())
    for found in (*few.values(), many):
        assert len(set(found)) == len(found)
        assert {c.pdl for c in found} == {False, True}


def test_a_record_says_what_each_candidate_and_peer_took() -> None:
    (question,) = questions("Qwen3-VL-2B", (64,), ("proj",))
    found = variants(question, Target())[:2]
    records = list(timed(question, found, torch.device("cpu")))
    assert [record["content"] for record in records] == [64, 32]
    for record in records:
        assert (record["name"], record["rows"], len(record["ours"])) == ("proj", 64, 2)
        assert all(entry["us"] > 0 for entry in record["ours"]) and record["triton_us"] > 0
        assert record["peers_us"]["cuBLAS + bias"] > 0
