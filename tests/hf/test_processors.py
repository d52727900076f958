"""Hugging Face's processors that give bytes: calls, sizes, grids and, once normalised, every bit as before."""

import copy
import itertools
import math
import pickle
import random
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchFeature
from transformers.utils import is_torchvision_available

from fusedvit.errors import UnsupportedModel
from fusedvit.pixels import BytePixels, byte_processors, restore, swap
from fusedvit.pixels.byte_pixels import as_floats
from fusedvit.pixels.byte_processors import STATE, Home
from fusedvit.pixels.processor_kinds import backend_of
from fusedvit.pixels.processors import normalizations_of
from tests.support.processors import PIXELS, image_processor, noise, video_processor
from tests.support.towers import tiny_tower

Image = pytest.importorskip("PIL.Image")

TORCHVISION = is_torchvision_available()
PROCESSORS = [
    "Qwen2VLImageProcessor",
    "Glm4vImageProcessor",
    "Glm46VImageProcessor",
    "GlmgaImageProcessor",
    "Glm5NextImageProcessor",
    "CohereCompassImageProcessor",
    "Ernie4_5_VLMoeImageProcessor",
]
VIDEO_PROCESSORS = [
    "Qwen2VLVideoProcessor",
    "Qwen3VLVideoProcessor",
    "Glm4vVideoProcessor",
    "Glm46VVideoProcessor",
    "GlmgaVideoProcessor",
    "Glm5NextVideoProcessor",
    "CohereCompassVideoProcessor",
    "Ernie4_5_VLMoeVideoProcessor",
]
NOT_DRAWN: dict[str, dict[str, Any]] = {"Ernie4_5_VLMoeVideoProcessor": {"draw_on_frames": False}}
needs_torchvision = pytest.mark.skipif(not TORCHVISION, reason="needs torchvision")
BACKENDS = pytest.mark.parametrize(
    "name", ("Qwen2VLImageProcessorPil", pytest.param("Qwen2VLImageProcessor", marks=needs_torchvision))
)
CHECKING = pytest.mark.parametrize("checking", (True, False), ids=("kernels", "backend"))


def named(name: str, make: Any = image_processor, **settings: Any) -> Any:
    """A processor by name, of the backend that there is. Skips where this transformers has none of that name."""
    try:
        return make(name, **settings)
    except (AttributeError, ImportError):
        pytest.skip(f"no {name} here")


def every_image_processor() -> Iterator[str]:
    for name in PROCESSORS:
        yield f"{name}Pil"
        if TORCHVISION:
            yield name


@contextmanager
def swapped(processor: Any, checking: bool = True) -> Iterator[Any]:
    """A copy that gives bytes, on the CPU: by the reference of our kernels, or by the backend's own resizing."""
    twice = swap(copy.deepcopy(processor), "cpu")
    if checking:
        twice.__dict__[STATE] = Home(None, 0, twice.__dict__[STATE].ours, checking=True)
    yield twice
    restore(twice)
    assert twice.to_dict() == processor.to_dict()


def assert_equal(got: Any, wanted: Any, as_bytes: bool | None = True) -> None:
    """The same values, of pixels as bytes or not, or either way; or the same error."""
    if isinstance(wanted, tuple):
        assert got == wanted
        return
    assert set(got) == set(wanted)
    for name, value in wanted.items():
        assert as_bytes is None or isinstance(got[name], BytePixels) == (as_bytes and name.startswith("pixel"))
        mine = as_floats(got[name])
        ours, theirs = np.asarray(mine), np.asarray(value)
        assert type(mine) is type(value) and ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs, equal_nan=theirs.dtype.kind == "f")


def kinds_of_images() -> dict[str, Any]:
    picture = Image.fromarray(noise(45, 62))
    alpha = Image.fromarray(np.random.default_rng(1).integers(0, 256, (45, 62, 4), dtype=np.uint8))
    transparent = picture.copy()
    transparent.info["transparency"] = picture.getpixel((3, 4))  # as of a PNG with a tRNS chunk
    return {
        "array": noise(45, 62),
        "read-only array": np.asarray(picture),
        "array, channels first": noise(45, 62).transpose(2, 0, 1).copy(),
        "array, view": noise(90, 124)[::2, ::2],
        "array, backwards": noise(45, 62)[::-1, :, ::-1],
        "array of three rows": noise(3, 62),
        "array, grey": noise(45, 62)[..., 0],
        "array of floats": noise(45, 62).astype(np.float32) / 255,
        "tensor": torch.from_numpy(noise(45, 62)).movedim(-1, 0).contiguous(),
        "tensor, channels last": torch.from_numpy(noise(45, 62)),
        "picture": picture,
        "one colour transparent": transparent,
        "alpha": alpha,
        "grey": picture.convert("L"),
        "grey with alpha": alpha.convert("LA"),
        "palette": picture.convert("P"),
        "one bit": picture.convert("1"),
        "cmyk": picture.convert("CMYK"),
        "16 bits": Image.fromarray(noise(45, 62)[..., 0].astype(np.uint16) * 257),
        "ycbcr": picture.convert("YCbCr"),
    }


def outcome(processor: Any, **given: Any) -> Any:
    """What a call gives, or the error that it raises."""
    try:
        return processor(**{"return_tensors": "pt"} | given)
    except Exception as error:  # whatever it is, both must raise it
        return type(error), str(error)


def check(processor: Any, given: dict[str, Any], checking: bool, as_bytes: bool | None = None, **asked: Any) -> None:
    """A call gives what the original's does; with `asked` in place of some that was `given` to that one."""
    wanted = outcome(processor, **given)
    with swapped(processor, checking) as ours:
        assert_equal(outcome(ours, **given | asked), wanted, as_bytes)


@CHECKING
@pytest.mark.parametrize("kind", kinds_of_images())
@BACKENDS
def test_every_kind_of_image(name: str, kind: str, checking: bool) -> None:
    check(named(name), {"images": [kinds_of_images()[kind], noise(33, 50)]}, checking, as_bytes="floats" not in kind)


@pytest.mark.parametrize(
    "settings", ({}, {"patch_size": 16}, {"merge_size": 1}, {"image_mean": [0.1, 0.2, 0.7]}), ids=str
)
@pytest.mark.parametrize("name", list(every_image_processor()))
def test_every_family(name: str, settings: dict[str, Any]) -> None:
    processor = named(name, **settings)
    images = [noise(*size) for size in ((61, 45), (61, 45), (20, 90), (130, 40), (56, 56))]
    with swapped(processor) as ours:
        assert ours.__dict__[STATE].ours
        assert_equal(ours(images=images, return_tensors="pt"), processor(images=images, return_tensors="pt"))


def random_size(chance: random.Random) -> tuple[int, int]:
    """(height, width): one pixel, thin, larger than the limit, near 200 times as wide as high, past it."""
    longest = chance.choice((1, 8, 60, 300))
    size = chance.randint(1, longest), chance.randint(1, longest)
    if chance.random() < 0.3:
        side = chance.randint(1, 8)
        size = side, side * chance.randint(100, 210) + chance.randint(0, side)
    return size if chance.random() < 0.5 else size[::-1]


@pytest.mark.parametrize("name", list(every_image_processor()))
def test_sizes_and_grids_of_random_images(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """400 sizes a processor, 2,800 in all: the grid, or the refusal, is the original's."""

    def no_pixels(sources: Any, layout: Any, *others: Any) -> torch.Tensor:
        rows = sum(math.prod(source.grid) for source in sources)
        return torch.zeros(rows, 3 * layout.temporal * layout.patch**2, dtype=torch.uint8)

    chance = random.Random(name)
    processor = named(name)
    with swapped(processor) as ours:
        monkeypatch.setattr("fusedvit.pixels.byte_processors.patches_of", no_pixels)
        for _ in range(400):
            size = random_size(chance)
            image = np.zeros((*size, 3), np.uint8)
            given = {"images": [image], "return_tensors": "pt", "input_data_format": "channels_last"}
            wanted, got = outcome(processor, **given), outcome(ours, **given)
            if isinstance(wanted, tuple):
                assert got == wanted, size
            else:
                assert torch.equal(got["image_grid_thw"], wanted["image_grid_thw"]), size
                assert got["pixel_values"].pixels().shape == wanted["pixel_values"].shape, size


FEW_ROWS = ((1, 40), (3, 40), (4, 40), (4, 4), (3, 3), (40, 3))  # which may pass for channels


# what no weights can hold: a factor that is 0, denormal, or out of the range of half precision
UNFOLDABLE: list[dict[str, Any]] = [
    *({"rescale_factor": factor} for factor in (0.0, 1e-45, 1e-20, 1e30, float("inf"), float("nan"))),
    {"image_std": [0.5, 0.5, 1e-9]},
    {"image_mean": [0.5, 0.5, 1e9]},
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@CHECKING
@pytest.mark.parametrize("setting", UNFOLDABLE, ids=str)
@BACKENDS
def test_a_normalisation_that_no_weights_hold(name: str, setting: dict[str, Any], checking: bool) -> None:
    """The processor's own or a call's: the original's floats."""
    given = {"images": [noise(56, 84)]}
    wanted = outcome(named(name, **setting), **given)
    calls = [(named(name), setting)] + [(named(name, **setting), {})] * ("rescale_factor" in setting)
    for processor, asked in calls:
        with swapped(processor, checking) as ours:
            assert_equal(outcome(ours, **given, **asked), wanted, as_bytes=False)  # torchvision's may divide by 0
            assert normalizations_of(ours).keys() == ({True} if asked else set())


@CHECKING
@pytest.mark.parametrize("size", FEW_ROWS, ids=str)
@BACKENDS
def test_images_of_few_rows(name: str, size: tuple[int, int], checking: bool) -> None:
    """Pictures, and arrays whose channels are said to be last, are what the original makes of the pictures."""
    given, pixels = {"images": [Image.fromarray(noise(*size))]}, noise(*size)
    for asked in ({}, {"images": [pixels], "input_data_format": "channels_last"}):
        check(named(name), given, checking, True, **asked)


@needs_torchvision
@CHECKING
@pytest.mark.parametrize("size", FEW_ROWS, ids=str)
def test_videos_of_few_rows(size: tuple[int, int], checking: bool) -> None:
    """Of a processor that takes such sizes: equal to the same frames with their channels first."""
    video = noise(4, *size)
    first = np.ascontiguousarray(video.transpose(0, 3, 1, 2))
    given = {"videos": [first], "input_data_format": "channels_first", "do_sample_frames": False}
    asked = {"videos": [video], "input_data_format": "channels_last"}
    check(named("Qwen2VLVideoProcessor", video_processor), given, checking, True, **asked)


@CHECKING
@pytest.mark.parametrize("shape", ((1, 8, 3), (1, 56, 84), (7, 8, 3)), ids=str)
@BACKENDS
def test_an_array_of_four_axes_among_images(name: str, shape: tuple[int, ...], checking: bool) -> None:
    """Is the original's business, whatever it makes of it."""
    check(named(name), {"images": [noise(56, 84), noise(*shape)]}, checking)


@needs_torchvision
@CHECKING
@pytest.mark.parametrize("frames", (2, 3, 5))
@pytest.mark.parametrize("name", VIDEO_PROCESSORS)
def test_every_video_processor(name: str, frames: int, checking: bool) -> None:
    processor = named(name, video_processor, **NOT_DRAWN.get(name, {}))
    videos: list[Any] = [noise(frames, 50, 71), noise(4, 30, 90), noise(frames, 50, 71)]
    if frames == 3:
        videos = [torch.from_numpy(video).movedim(-1, 1) for video in videos]
    given = {"videos": videos, "return_tensors": "pt", "do_sample_frames": False}
    with swapped(processor, checking) as ours:
        assert ours.__dict__[STATE].ours
        assert_equal(ours(**given), processor(**given))


@needs_torchvision
def test_times_that_are_drawn_on_frames() -> None:
    """By the processor's own code, as ever."""
    font = Path(pytest.importorskip("matplotlib").get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    processor = named("Ernie4_5_VLMoeVideoProcessor", video_processor, font=str(font))
    video = noise(20, 50, 71)
    given = {"videos": [video], "return_tensors": "pt", "video_metadata": [{"total_num_frames": 20, "fps": 4.0}]}
    with swapped(processor) as ours:
        got, wanted = ours(**given), processor(**given)
    assert_equal(got, wanted)
    assert not torch.equal(
        processor(**given, draw_on_frames=False)["pixel_values_videos"], wanted["pixel_values_videos"]
    )


@needs_torchvision
@pytest.mark.parametrize("name", ("Qwen3VLVideoProcessor", "Ernie4_5_VLMoeVideoProcessor", "Gemma4VideoProcessor"))
def test_videos_go_where_the_call_asks(name: str) -> None:
    """And not where other calls go."""
    sizes = {"size": None} if name.startswith("Gemma") else {}
    processor = swap(named(name, video_processor, **sizes, **NOT_DRAWN.get(name, {})), "meta")
    given = {"videos": [noise(4, 50, 71)], "return_tensors": "pt", "do_sample_frames": False}
    assert processor(**given, device="cpu")["pixel_values_videos"].device.type == "cpu"


@needs_torchvision
def test_a_videos_frames_are_sampled_as_before() -> None:
    from transformers.video_utils import VideoMetadata

    processor = named("Qwen3VLVideoProcessor", video_processor)
    metadata = [VideoMetadata(total_num_frames=40, fps=8.0, duration=5.0)]
    given = {"videos": [noise(40, 30, 40)], "return_tensors": "pt", "video_metadata": metadata, "return_metadata": True}
    with swapped(processor) as ours:
        got, wanted = ours(**given), processor(**given)
    assert list(got["video_metadata"][0].frames_indices) == list(wanted["video_metadata"][0].frames_indices)
    assert_equal(*({k: v for k, v in found.items() if k != "video_metadata"} for found in (got, wanted)))


# arguments that change what follows the sizes
ARGUMENTS: list[dict[str, Any]] = [
    {"do_normalize": False},
    {"do_rescale": False},
    {"do_rescale": False, "do_normalize": False},
    {"do_resize": False},
    {"do_resize": False, "patch_size": 16},
    {"do_convert_rgb": False},
    {"rescale_factor": 1 / 100},
    {"rescale_factor": 0},
    {"image_mean": [0.2, 0.3, 0.4], "image_std": [0.5, 0.6, 0.7]},
    {"image_std": (1.0, 2.0, 3.0)},
    {"image_mean": [0.5]},
    {"resample": 0},
    {"resample": 2},
    {"resample": 1},
    {"size": {"shortest_edge": 56 * 56, "longest_edge": 56 * 56}},
    {"patch_size": 4},
    {"temporal_patch_size": 1},
    {"merge_size": 4},
    {"return_tensors": "np"},
    {"return_tensors": None},
    {"input_data_format": "channels_last"},
    {"device": "cpu"},
    {"nonsense": 3},
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@CHECKING
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@BACKENDS
def test_arguments_of_a_call(name: str, arguments: dict[str, Any], checking: bool) -> None:
    """Handled exactly, as bytes, or by the original code."""
    check(named(name), {"images": [noise(56, 84), noise(56, 28)]} | arguments, checking)


@pytest.mark.parametrize("kind", ("pt", "np"))
@pytest.mark.parametrize("device", ("nonsense", "cuda:99", 1.5), ids=str)
@pytest.mark.parametrize("home", (None, "cpu"))
def test_devices_that_are_not_there(home: str | None, device: Any, kind: str) -> None:
    """Pillow's own code reads no device; bytes are made on one."""
    processor = named("Qwen2VLImageProcessorPil")
    given = {"images": noise(56, 84), "return_tensors": kind, "device": device}
    ours = swap(copy.deepcopy(processor), home)
    if kind == "np":
        assert np.array_equal(ours(**given)["pixel_values"], processor(**given)["pixel_values"])
        return
    error = TypeError if device == 1.5 else ValueError
    with pytest.raises(error, match="^fusedvit: device must be .*, got ") as raised:
        ours(**given)
    with pytest.raises(error, match=f"^{re.escape(str(raised.value))}$"):
        swap(ours, device)


@needs_torchvision
@CHECKING
def test_devices_that_torchvisions_code_refuses_too(checking: bool) -> None:
    for processor, given in (
        (named("Qwen2VLImageProcessor"), {"images": noise(56, 84)}),
        (named("Qwen3VLVideoProcessor", video_processor), {"videos": [noise(4, 50, 71)], "do_sample_frames": False}),
    ):
        with swapped(processor, checking) as ours:
            for device in ("nonsense", "cuda:99"):
                with pytest.raises(ValueError, match=f"^fusedvit: device must be .*, got '{device}'$"):
                    ours(**given, return_tensors="pt", device=device)


@pytest.mark.parametrize(
    "given",
    ([], None, [noise(9, 9), "none.png"], [np.zeros((2, 2, 2, 2))]),
    ids=("none", "None", "no file", "no image"),
)
def test_what_the_original_refuses(given: Any) -> None:
    processor = named("Qwen2VLImageProcessor")
    with swapped(processor) as ours:
        assert outcome(ours, images=given, return_tensors="pt") == outcome(processor, images=given, return_tensors="pt")


def test_what_a_processor_is_stays() -> None:
    """Its class's name, what it saves and prints, copies and pickles; and `restore` leaves nothing behind."""
    processor = named("Qwen2VLImageProcessor", patch_size=16)
    before, cls, text = processor.to_dict(), type(processor), repr(processor)
    attributes = dict(processor.__dict__)
    assert swap(processor) is processor
    assert isinstance(processor, cls) and type(processor).__name__ == cls.__name__
    assert processor.to_dict() == before and repr(processor) == text
    image, again = [noise(40, 50)], swap(processor)
    wanted = again(images=image, return_tensors="pt")["pixel_values"]
    for other in (copy.copy(processor), copy.deepcopy(processor), pickle.loads(pickle.dumps(processor))):
        got = other(images=image, return_tensors="pt")["pixel_values"]
        assert isinstance(got, BytePixels) and torch.equal(got.pixels(), wanted.pixels())
    fresh = type(processor)(patch_size=16)  # nobody swapped it
    assert type(fresh(images=image, return_tensors="pt")["pixel_values"]) is torch.Tensor
    assert restore(processor) is processor and type(processor) is cls and processor.__dict__ == attributes
    assert type(processor(images=image, return_tensors="pt")["pixel_values"]) is torch.Tensor
    assert restore(processor) is processor  # of a processor that is its own


def test_wrong_arguments_of_swap_and_restore() -> None:
    with pytest.raises(ValueError, match="^fusedvit: device must be 'cpu', 'cuda' or 'cuda:N', got 'tpu'"):
        swap(named("Qwen2VLImageProcessor"), "tpu")
    processor = named("Qwen2VLImageProcessor")
    config = tiny_tower().config
    model, cls = torch.nn.Linear(2, 2), type(processor)
    model.save_pretrained = None  # as transformers' models have it
    for wrong, got in (
        (5, "int"),
        (cls, "the class Qwen2VLImage.*"),
        (config, "Qwen3VLVisionConfig"),
        (model, "Linear"),
    ):
        with pytest.raises(TypeError, match=f"^fusedvit: processor must be a processor of transformers, .* got {got}$"):
            restore(wrong)


def test_saved_and_loaded(tmp_path: Any) -> None:
    processor = swap(named("Qwen2VLImageProcessor"))
    processor.save_pretrained(tmp_path)
    loaded = type(restore(processor)).from_pretrained(tmp_path)
    assert type(loaded) is type(processor) and loaded.to_dict() == processor.to_dict()


def test_settings_changed_later_count() -> None:
    processor = named("Qwen2VLImageProcessor")
    image = [noise(70, 90)]
    with swapped(processor) as ours:
        for setting, value in (("image_mean", (0.1, 0.2, 0.3)), ("patch_size", 8), ("do_normalize", False)):
            for each in (processor, ours):
                setattr(each, setting, value)
            got, wanted = (each(images=image, return_tensors="pt")["pixel_values"] for each in (ours, processor))
            assert torch.equal(got.pixels() if isinstance(got, BytePixels) else got, wanted)


@CHECKING
@pytest.mark.parametrize(
    "setting, other, value",
    (
        ("patch_size", 14.0, 14),
        ("temporal_patch_size", 2.0, 2),
        ("merge_size", True, 1),
        ("merge_size", 2.0, 2),
        ("merge_size", torch.tensor(2), 2),
    ),
    ids=str,
)
@pytest.mark.parametrize(
    "name",
    (
        "Qwen2VLImageProcessorPil",
        "Glm5NextImageProcessorPil",
        pytest.param("Glm5NextImageProcessor", marks=needs_torchvision),
    ),
)
def test_an_equal_setting_of_another_type_leaves_no_trace(
    name: str, setting: str, other: Any, value: int, checking: bool
) -> None:
    """Whatever it led to; with a mean that no other test has."""
    processor, given = named(name, **{setting: value}), {"images": [noise(30, 90)], "return_tensors": "pt"}
    with swapped(processor, checking) as ours:
        for each in (processor, ours):
            each.image_mean = 0.11, 0.22, random.Random(f"{name} {setting} {other} {checking}").random()
        setattr(ours, setting, other)
        outcome(ours, **given)
        setattr(ours, setting, value)
        assert_equal(ours(**given), processor(**given))


def test_settings_in_turn_are_decided_on_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two processors of one class, or of a call's arguments."""
    decided: list[Any] = []
    original = byte_processors._decided
    monkeypatch.setattr(byte_processors, "_decided", lambda *given: decided.append(given) or original(*given))
    processor, sizes = named("Qwen2VLImageProcessor"), [PIXELS | {"longest_edge": most} for most in (3136, 6272)]
    with swapped(processor) as ours:
        for size in sizes * 3:
            given = {"images": [noise(83, 71)], "return_tensors": "pt", "size": size}
            assert_equal(ours(**given), processor(**given))
    own = [shape for _, _, shape, _ in decided if shape == (3, 83, 71)]  # the rest: the check before the swap
    assert len(own) == len(sizes)


class Uncopied:
    """What a subclass's own arguments may be: neither copied nor compared."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("not to be copied")

    def __eq__(self, other: object) -> bool:
        raise KeyError(other)

    __hash__ = object.__hash__


@pytest.mark.parametrize("copied", (False, True))
def test_arguments_that_are_not_remembered(copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if copied:
        monkeypatch.setattr(Uncopied, "__deepcopy__", lambda self, memo: Uncopied())
    processor, given = named("Qwen2VLImageProcessor"), {"images": [noise(84, 71)], "return_tensors": "pt"}
    with swapped(processor) as ours:
        for each in (processor, ours):
            each.data_format = Uncopied()
        for _ in range(2):
            assert_equal(ours(**given), processor(**given))
        for each in (processor, ours):
            each.data_format = None


class Brighter(type(named("Qwen2VLImageProcessor"))):  # type: ignore[misc]
    """Somebody's processor that changes what is resized."""

    def resize(self, *args: Any, **kwargs: Any) -> Any:
        return super().resize(*args, **kwargs) // 2


class Larger(type(named("Qwen2VLImageProcessor"))):  # type: ignore[misc]
    """Somebody's processor whose methods are transformers' own."""

    patch_size = 16

    def greeting(self) -> str:
        return "hello"


class Both:
    def __init__(self, image: Any, video: Any = None) -> None:
        self.image_processor, self.video_processor = image, video


def test_processors_of_others(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UnsupportedModel, match="Brighter.*has code of its own: resize"):
        swap(Brighter())
    with pytest.raises(UnsupportedModel, match="Both cannot give bytes: image_processor"):
        swap(Both(Brighter()))
    with caplog.at_level("WARNING", "fusedvit"):
        both = swap(Both(named("Qwen2VLImageProcessor"), Brighter()))
    assert "left as it is, giving floats: video_processor (Brighter)" in caplog.text
    assert type(both.video_processor) is Brighter and STATE in both.image_processor.__dict__
    processor = Larger(size=PIXELS)
    given = {"images": [noise(70, 90)], "return_tensors": "pt"}
    with swapped(processor) as ours:
        assert ours.greeting() == "hello"
        assert_equal(ours(**given), processor(**given))


def changed(result: Any) -> Any:
    return (result[0] * 2, *result[1:]) if isinstance(result, tuple) else result // 2


@pytest.mark.parametrize("method", ("resize", "patchify", "convert_to_rgb"))
def test_a_method_replaced_on_the_instance(method: str) -> None:
    """Before the swap it is refused; after it, the original code runs."""
    processor, other = named("Qwen2VLImageProcessor"), named("Qwen2VLImageProcessor")
    given = {"images": [noise(70, 90)], "return_tensors": "pt"}
    swap(processor, "cpu").__dict__[STATE] = Home(None, 0, checking=True)
    for each in (processor, other):
        original = getattr(each, method)
        setattr(each, method, lambda *args, original=original, **kwargs: changed(original(*args, **kwargs)))
    got, wanted = processor(**given), other(**given)
    assert type(got["pixel_values"]) is torch.Tensor and torch.equal(got["pixel_values"], wanted["pixel_values"])
    with pytest.raises(UnsupportedModel, match=f"has code of its own: {method}"):
        swap(other)


PARTS = ("resize", "patchify", "_preprocess", "process_image", "convert_to_rgb", "normalize")


@CHECKING
@pytest.mark.parametrize("method", PARTS)
@pytest.mark.parametrize("of_backend", (False, True), ids=("class", "backend's class"))
@BACKENDS
def test_a_method_replaced_on_a_class(
    name: str, of_backend: bool, method: str, checking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the instance, and bytes again when it is gone."""
    processor, given = named(name), {"images": [noise(70, 90)], "return_tensors": "pt"}
    cls = backend_of(type(processor)).base if of_backend else type(processor)
    if not hasattr(cls, method):
        pytest.skip("no such method")
    original = getattr(cls, method)

    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        return BatchFeature({k: v * 2 for k, v in found.items()}) if method == "_preprocess" else changed(found)

    with swapped(processor, checking) as ours:
        before = ours(**given)
        with monkeypatch.context() as patch:
            patch.setattr(cls, method, replaced)
            got, wanted = ours(**given), processor(**given)
            assert all(torch.equal(as_floats(got[key]), wanted[key]) for key in wanted)
            if not (of_backend and method in vars(type(processor))):  # where nobody calls the backend's
                assert not torch.equal(as_floats(before["pixel_values"]), wanted["pixel_values"]), "nothing replaced"
            if method in ("resize", "patchify"):
                with pytest.raises(UnsupportedModel, match=f"has code of its own: {method}"):
                    swap(copy.deepcopy(processor))
        assert_equal(ours(**given), processor(**given))


@pytest.mark.parametrize("module", ("the processor's", "the backend's"))
def test_a_function_replaced_in_a_module(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are decided by whatever is there now; any other function leads to the original code."""
    processor, given = named("Qwen2VLImageProcessorPil"), {"images": [noise(70, 90)], "return_tensors": "pt"}
    home = sys.modules[(type(processor) if module == "the processor's" else type(processor).__mro__[1]).__module__]
    name = "smart_resize" if module == "the processor's" else "np_resize"
    original = getattr(home, name)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        return (found[0] + 28, found[1]) if name == "smart_resize" else 255 - found

    with swapped(processor) as ours:
        assert_equal(ours(**given), processor(**given))
        monkeypatch.setattr(home, name, replaced)
        got, wanted = ours(**given), processor(**given)
        assert all(torch.equal(as_floats(got[key]), wanted[key]) for key in wanted)
        assert isinstance(got["pixel_values"], BytePixels) == (name == "smart_resize")


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16), ids=str)
@BACKENDS
def test_another_default_dtype(name: str, dtype: torch.dtype) -> None:
    processor, given = named(name), {"images": [noise(70, 90)], "return_tensors": "pt"}
    with swapped(processor) as ours:
        earlier, wanted = ours(**given)["pixel_values"], processor(**given)["pixel_values"]
        torch.set_default_dtype(dtype)
        try:
            assert torch.equal(earlier.pixels(), wanted)
            fresh = named(name)(**given)  # a processor keeps what it computed from mean and deviation once
            assert torch.equal(as_floats(ours(**given)["pixel_values"]), fresh["pixel_values"])
        finally:
            torch.set_default_dtype(torch.float32)


def test_processors_of_other_families() -> None:
    """Of transformers, and of no family that we know: their patches are another thing."""
    for name in ("PaddleOCRVLImageProcessor", "VideoLlama3ImageProcessor", "CLIPImageProcessor"):
        with pytest.raises(UnsupportedModel, match=name):
            swap(named(name))


class Images(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        found = self.processor(images=[noise(40 + index, 50)], return_tensors="pt")
        return found["pixel_values"], found["image_grid_thw"]


@pytest.mark.parametrize("workers", (0, 2))
def test_data_loader_workers(workers: int) -> None:
    """Forked ones too: nothing there touches the GPU."""
    processor = named("Qwen2VLImageProcessor")
    images = Images(swap(copy.deepcopy(processor)))
    loader = torch.utils.data.DataLoader(images, batch_size=None, num_workers=workers)
    for (pixels, grid), index in zip(loader, itertools.count()):
        wanted = processor(images=[noise(40 + index, 50)], return_tensors="pt")
        assert isinstance(pixels, BytePixels) and torch.equal(pixels.pixels().cpu(), wanted["pixel_values"])
        assert torch.equal(grid, wanted["image_grid_thw"])
        assert not workers or pixels.device.type == "cpu"
