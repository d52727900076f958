"""Bytes in a tower: fused, the answers to the processor's floats; in its original code, these very floats."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fusedvit
from fusedvit.checks import fallback
from fusedvit.errors import Reason
from fusedvit.kernels.load_inputs import BYTES, FLOATS, STILL_BYTES
from fusedvit.model.normalization import Normalization
from tests.support.byte_patches import CLIP, HALF, KINDS, bytes_for
from tests.support.families import BY_GRID, INSTALLED, each_of, family_tower
from tests.support.towers import Call, assert_rule, assert_same, copy_of, outputs_of, tiny_model, tiny_tower

GRID = [(1, 8, 4), (1, 4, 6), (1, 2, 10)]


def run(tower: Any, pixels: torch.Tensor, **arguments: Any) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return outputs_of(tower(pixels, grid_thw=torch.tensor(GRID), **arguments))


GEMMA = "Gemma4VisionModel"


@each_of(BY_GRID)
def test_every_family_takes_bytes(name: str) -> None:
    tower = family_tower(name)
    both = [bytes_for(tower, GRID, still) for still in KINDS.values()]
    refs = [run(tower, pixels.pixels()) for pixels in both]
    handle = fusedvit.fuse(tower, fusedvit.FuseConfig(strict=True))
    for pixels, ref in zip(both, refs, strict=True):
        assert_same(run(tower, pixels), ref)
        assert_same(run(tower, pixels.pixels()), ref)
    assert_same(run(tower, both[0]), refs[0])
    kinds = {pixels.shape[1] for pixels in both}  # one where a patch is of one frame
    assert handle.stats()["fused"] == 5 and handle.stats()["refreshes"] == len(kinds)
    fusedvit.unfuse(tower)
    with pytest.raises(TypeError, match="BytePixels"):
        run(tower, both[0])


@pytest.mark.skipif(GEMMA not in INSTALLED, reason="not in this transformers")
def test_rows_of_another_layout_are_refused() -> None:
    handle = fusedvit.fuse(family_tower(GEMMA))
    with pytest.raises(ValueError, match="takes no bytes"):
        handle.normalizations.expect(Normalization(1 / 255, None, None, 4, temporal_patch=1), still=True)


@pytest.mark.parametrize("numbers", [HALF, {"mean": None, "std": None}, {"rescale_factor": None}, {"backend": "pil"}])
def test_any_normalization(numbers: dict[str, Any]) -> None:
    tower = tiny_tower()
    for still in KINDS.values():
        pixels = bytes_for(tower, GRID, still, **numbers)
        ref = run(copy_of(tower), pixels.pixels())
        fusedvit.fuse(tower, fusedvit.FuseConfig(strict=True))
        assert_same(run(tower, pixels), ref)


@pytest.mark.parametrize("numbers", [{"rescale_factor": 1e-9}, {"std": 1e8}], ids=str)
def test_numbers_that_no_weights_can_absorb(numbers: dict[str, Any]) -> None:
    """In half precision a factor of 1e-9 would be 0, and the shift, which is divided by it, would be lost."""
    exact = tiny_tower()
    pixels, tower = bytes_for(exact, GRID, still=True, **(HALF | numbers)), copy_of(exact, torch.float16)
    ref, pt = run(exact, pixels.pixels()), run(tower, pixels.pixels().half())
    handle = fusedvit.fuse(tower, fusedvit.FuseConfig(strict=True))
    assert_rule(run(tower, pixels.half()), ref, pt)
    assert handle.normalizations.known == {} and handle.stats()["fused"] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("still", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("numbers", [CLIP, HALF], ids=["clip", "half"])
@pytest.mark.parametrize("page", [False, True], ids=["photo", "page"])
def test_within_the_rule_in_16_bits(dtype: torch.dtype, still: bool, numbers: dict[str, Any], page: bool) -> None:
    """Of a page the white is 1.0 to Hugging Face, exact in 16 bits."""
    exact = tiny_tower()
    pixels = bytes_for(exact, GRID, still, page=page, **numbers)
    tower = copy_of(exact, dtype)
    ref, pt = run(exact, pixels.pixels()), run(tower, pixels.pixels().to(dtype))
    fusedvit.fuse(tower, fusedvit.FuseConfig(strict=True))
    assert_rule(run(tower, pixels.to(dtype)), ref, pt)


def test_another_normalization_is_made_floats() -> None:
    """One is folded for still images and one for all frames; pixels of any other are normalised first."""
    tower = tiny_tower()
    other, reference = bytes_for(tower, GRID, True, **HALF), copy_of(tower)
    handle = fusedvit.fuse(tower, fusedvit.FuseConfig(strict=True))
    run(tower, bytes_for(tower, GRID, True))
    assert_same(run(tower, other), run(reference, other.pixels()))
    video = bytes_for(tower, GRID, False, **HALF)
    assert_same(run(tower, video), run(reference, video.pixels()))
    assert handle.stats()["fused"] == 3 and handle.stats()["refreshes"] == 2


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that nobody has written to is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def moved(tower: Any, handle: Any) -> None:
    for p in tower.parameters():
        p.data = p.data.clone()


def moved_and_back(tower: Any, handle: Any) -> None:
    tower.double().float()


def written_the_same(tower: Any, handle: Any) -> None:
    tower.load_state_dict({name: t.clone() for name, t in tower.state_dict().items()})


def other_objects(tower: Any, handle: Any) -> None:
    tower.load_state_dict({name: t.clone() for name, t in tower.state_dict().items()}, assign=True)
    tower.requires_grad_(False)


def written(tower: Any, handle: Any) -> None:
    with torch.no_grad():
        tower.patch_embed.proj.weight.mul_(1.1)


def written_past_its_version(tower: Any, handle: Any) -> None:
    tower.patch_embed.proj.bias.data.add_(0.1)


def refused_meanwhile(tower: Any, handle: Any) -> None:
    hook = tower.blocks[0].register_forward_hook(lambda *_: None)
    Call.of(tower, [(1, 2, 2)]).run(tower)
    hook.remove()


PATHS: dict[str, Callable[[Any, Any], object]] = {
    "nothing": lambda tower, handle: None,
    **{f.__name__: f for f in (moved, moved_and_back, written_the_same, other_objects, written)},
    **{f.__name__: f for f in (written_past_its_version, refused_meanwhile)},
    "moved twice": lambda tower, handle: (moved(tower, handle), moved(tower, handle)),
    "release": lambda tower, handle: handle.release(),
    "refresh": lambda tower, handle: handle.refresh(),
    "warmup": lambda tower, handle: handle.warmup(),
    "moved, warmup": lambda tower, handle: (moved(tower, handle), handle.warmup()),
    "outdate": lambda tower, handle: handle.weights.outdate(),
    "drop_graphs": lambda tower, handle: handle.drop_graphs(),
    "pause": lambda tower, handle: handle._pause.begin(Reason(fallback.CHANGED_BETWEEN_CALLS, "")),
}
STEPS = {"floats": None, **KINDS}


def brought(tower: Any, kind: str, seed: int) -> Any:
    pixels = bytes_for(tower, GRID, STEPS[kind] or False, seed)
    return pixels.pixels() if STEPS[kind] is None else pixels


def assert_brought(tower: Any, handle: Any, kind: str, seed: int) -> None:
    """A call of pixels of `kind` gives the answer of the original code, and weights have their patch embedding."""
    pixels, fused = brought(tower, kind, seed), handle.stats()["fused"]
    floats = pixels if kind == "floats" else pixels.pixels()
    assert_same(run(tower, pixels), run(fusedvit.unfuse(copy_of(tower)), floats))
    number = {"floats": FLOATS, "frames": BYTES, "still": STILL_BYTES}[kind]
    assert number in handle.weights.kinds or handle.stats()["fused"] == fused


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("after", STEPS)
@pytest.mark.parametrize("before", STEPS)
@pytest.mark.parametrize("path", PATHS)
def test_a_new_kind_of_pixels_on_every_path_to_weights(path: str, before: str, after: str) -> None:
    tower = tiny_tower()
    handle = fusedvit.fuse(tower)
    assert_brought(tower, handle, before, 1)
    PATHS["written_the_same"](tower, handle)
    assert_brought(tower, handle, before, 2)
    PATHS[path](tower, handle)
    assert_brought(tower, handle, after, 3)
    if path != "pause":
        assert handle.stats()["fused"] == 3


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("seed", range(12))
def test_kinds_and_paths_in_any_order(seed: int) -> None:
    draw, tower = random.Random(seed), tiny_tower()
    handle = fusedvit.fuse(tower)
    for i in range(10):
        PATHS[draw.choice([*PATHS])](tower, handle)
        assert_brought(tower, handle, draw.choice([*STEPS]), i)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("still", KINDS.values(), ids=KINDS)
def test_a_kind_that_is_expected_is_prepared_by_a_warmup_after_a_move(still: bool) -> None:
    tower = tiny_tower()
    handle = fusedvit.fuse(tower, fusedvit.FuseConfig(strict=True))
    handle.warmup()
    pixels = bytes_for(tower, GRID, still)
    assert handle.normalizations.expect(pixels.normalization, still)
    moved(tower, handle)
    handle.warmup()
    prepared = handle.stats()["refreshes"]
    assert_same(run(tower, pixels), run(fusedvit.unfuse(copy_of(tower)), pixels.pixels()))
    assert handle.stats()["refreshes"] == prepared == 2


@pytest.mark.parametrize("still", KINDS.values(), ids=KINDS)
def test_the_original_code_sees_hugging_faces_pixels(still: bool) -> None:
    """Bit for bit, in the dtype that the model cast them to."""
    for dtype in (torch.float32, torch.bfloat16):
        tower = copy_of(tiny_tower(), dtype)
        pixels = bytes_for(tower, GRID, still)
        seen: list[torch.Tensor] = []
        handle = fusedvit.fuse(tower)
        hook = tower.patch_embed.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
        answer = run(tower, pixels.type(dtype))
        assert handle.stats()["original"] == {"hooks": 1} and type(seen[0]) is torch.Tensor
        assert seen[0].dtype == dtype and torch.equal(seen[0], pixels.pixels().to(dtype))
        hook.remove()
        fusedvit.unfuse(tower)
        ref = run(tower, pixels.pixels().to(dtype))
        assert all(torch.equal(answer[name], ref[name]) for name in ref)


def test_gradients_take_the_original_code() -> None:
    tower = tiny_tower().requires_grad_(True)
    pixels, reference = bytes_for(tower, GRID, True), copy_of(tower)
    fusedvit.fuse(tower)
    tower(pixels, grid_thw=torch.tensor(GRID)).pooler_output.sum().backward()
    reference(pixels.pixels(), grid_thw=torch.tensor(GRID)).pooler_output.sum().backward()
    for ours, theirs in zip(tower.parameters(), reference.parameters(), strict=True):
        assert ours.grad is None if theirs.grad is None else torch.equal(ours.grad, theirs.grad)


def test_hidden_states_read_later() -> None:
    tower = tiny_tower()
    pixels, reference = bytes_for(tower, GRID, True), copy_of(tower)
    handle = fusedvit.fuse(tower)
    with torch.no_grad():
        found = tower(pixels, grid_thw=torch.tensor(GRID), output_hidden_states=True)
        ref = reference(pixels.pixels(), grid_thw=torch.tensor(GRID), output_hidden_states=True)
    assert handle.stats()["fused"] == 1
    for ours, theirs in zip(found.hidden_states, ref.hidden_states, strict=True):
        torch.testing.assert_close(ours, theirs)
    changed = tower(pixels, grid_thw=torch.tensor(GRID), output_hidden_states=True)
    pixels.unmarked()[0] += 1
    with pytest.raises(RuntimeError, match="pixel_values or grid_thw have changed"):
        _ = changed.hidden_states[0]


def test_hidden_states_of_bytes_that_were_cast() -> None:
    """They are of the pixels that the fused call took, which leaves casts undone."""
    tower = tiny_tower()
    pixels = bytes_for(tower, GRID, True)
    ref = run(copy_of(tower), pixels.pixels(), output_hidden_states=True)
    fusedvit.fuse(tower, fusedvit.FuseConfig(strict=True))
    assert_same(run(tower, pixels.to(torch.bfloat16), output_hidden_states=True), ref)


def test_what_is_refused() -> None:
    tower = tiny_tower()
    pixels = bytes_for(tower, GRID, True)
    fusedvit.fuse(tower)
    run(tower, pixels)
    for plain in (pixels.unmarked(), bytes_for(tower, GRID, False).unmarked(), pixels.unmarked().long()):
        with pytest.raises(TypeError, match="normalised floats"):
            run(tower, plain)
    for layout in ({"patch": 2, "temporal_patch": 8}, {"channels": 12, "patch": 2, "mean": 0.5, "std": 0.5}):
        with pytest.raises(ValueError, match="patches of"):
            run(tower, bytes_for(tower, GRID, False, **layout))
    with pytest.raises(ValueError, match="pixel_values has 75"):
        run(tower, bytes_for(tower, GRID, True)[1:])
    ref = run(tower, pixels)
    assert_same(run(tower, pixels[None]), ref)
    assert_same(run(tower, pixels.view(2, -1, pixels.shape[1])), ref)


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
def test_parents_cast_and_split_what_they_are_given(kind: str) -> None:
    """A whole model: its own casts, and its features as with floats."""
    model = tiny_model(kind)
    images, videos = bytes_for(model.model.visual, GRID, True), bytes_for(model.model.visual, GRID, False, seed=3)
    grid = torch.tensor(GRID)
    with torch.no_grad():
        ref = [model.get_image_features(images.pixels(), grid), model.get_video_features(videos.pixels(), grid)]
        handle = fusedvit.fuse(model.requires_grad_(False), fusedvit.FuseConfig(strict=True))
        found = [model.get_image_features(images, grid), model.get_video_features(videos, grid)]
    for ours, theirs in zip(found, ref, strict=True):
        torch.testing.assert_close(ours.pooler_output, theirs.pooler_output)
    assert handle.stats()["fused"] == 2


def test_behind_torch_compile() -> None:
    """The tower runs fused between two graphs, as with floats."""
    model = tiny_model().requires_grad_(False)
    pixels, grid = bytes_for(model.model.visual, GRID, True), torch.tensor(GRID)
    with torch.no_grad():
        ref = model.get_image_features(pixels.pixels(), grid).pooler_output
        handle = fusedvit.fuse(model)
        found = torch.compile(model.get_image_features, backend="eager")(pixels, grid).pooler_output
    torch.testing.assert_close(torch.cat(found), torch.cat(ref))
    assert handle.stats()["fused"] == 1


def test_behind_accelerates_hooks() -> None:
    """Inputs are sent to where the hooks say, and the mark with them."""
    accelerate = pytest.importorskip("accelerate")
    tower = tiny_tower()
    pixels, reference = bytes_for(tower, GRID, True), copy_of(tower)
    handle = fusedvit.fuse(tower)
    accelerate.hooks.add_hook_to_module(tower, accelerate.hooks.AlignDevicesHook("cpu", io_same_device=True))
    assert_same(run(tower, pixels), run(reference, pixels.pixels()))
    assert handle.stats()["fused"] == 1
    sent = accelerate.utils.send_to_device({"pixel_values": [pixels]}, "cpu")["pixel_values"][0]
    batch = accelerate.utils.concatenate([{"pixel_values": sent}, {"pixel_values": sent}])["pixel_values"]
    assert type(sent) is type(batch) is type(pixels) and torch.equal(batch.pixels()[: len(sent)], pixels.pixels())
