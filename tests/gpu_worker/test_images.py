"""Encoded images, compared with transformers' own models and processors."""

from __future__ import annotations

import io
import os
import signal
import struct
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.image_utils import load_image
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from gpu_worker.models import image_files
from gpu_worker.models.image_files import ImageFiles
from gpu_worker.models.images import ImageEncoder
from midstream.errors import ConfigError, InvalidArgumentError, UnsupportedError
from midstream.model.folder import open_model_folder
from protos import generation_pb2 as pb
from protos import scheduler_pb2
from router.pipeline.prompt import PromptBuilder
from tests.gpu_worker.core_with_runners import CoreWithRunners, outputs
from tests.gpu_worker.test_models import Recorder
from tests.gpu_worker.tiny_models import make_runner
from tests.gpu_worker.vision_model import CASES, TOKENS_PER_TILE, inputs_of, make_vision_model, picture

CPU = torch.device("cpu")
ORIENTATION = 0x0112  # a tag of EXIF


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("idefics3")
    make_vision_model(folder)
    return folder


@pytest.mark.parametrize("case", CASES)
async def test_a_prompt_with_images_gives_the_logits_and_tokens_of_transformers(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of different sizes, in any order, and one of them twice; each is encoded alone."""
    model, tokenizer = make_vision_model(tmp_path, case)
    wide, high, small = picture(60, 31), picture(20, 50, seed=1, kind="JPEG"), picture(7, 9, seed=2)
    images, prompt = [wide, high, small, wide], "See <image> and <image>?<image> Or\n<image>"
    folder = open_model_folder(str(tmp_path))
    request = pb.GenerateRequest(prompt=prompt, images=[pb.Image(data=data) for _, data in images], max_tokens=6)
    with closing(ImageEncoder(folder, CPU, torch.float32)) as encoder:

        async def encode(data: bytes) -> scheduler_pb2.EncodeImageResponse:
            made = encoder.encode(data)
            table = pb.Tensor(dtype=pb.Tensor.DTYPE_FLOAT32, shape=made.embeddings.shape)
            table.data = made.embeddings.numpy().tobytes()
            return scheduler_pb2.EncodeImageResponse(text=made.text, embeddings=table)

        with closing(PromptBuilder(folder, 1, encode)) as builder:
            tokens = await builder.token_ids(request)
    inputs = inputs_of(case, tokenizer, prompt, [image for image, _ in images])
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    assert [min(token, folder.vocab_size) for token in tokens] == [
        folder.vocab_size if token == image_token else token for token in inputs["input_ids"][0].tolist()
    ]
    made = model.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=None)
    wanted = made[0, len(tokens) :].tolist()
    with torch.inference_mode():
        last = model(**inputs).logits[0, -1:]

    runner = make_runner(tmp_path, implementation="native", kv="f32")
    recorder = Recorder(runner, monkeypatch)
    system = CoreWithRunners(runner, (), max_context_chunk=512)
    request.token_ids.values.extend(tokens)
    request.sampling.temperature = 0
    request.stopping.ignore_eos = True
    (found,) = system.run([request])
    assert outputs(found) == [wanted]
    assert float((recorder.logits[0] - last).abs().max()) <= 1e-4 * max(1.0, float(last.abs().max()))


def test_older_names_of_tensors_are_read_and_quantized_ones_refused(tmp_path: Path) -> None:
    """Published files of LLaVA have the names of earlier versions of transformers."""
    make_vision_model(tmp_path, "llava")
    file, data = tmp_path / "model.safetensors", picture(60, 31)[1]
    with closing(ImageEncoder(open_model_folder(str(tmp_path)), CPU, torch.float32)) as encoder:
        wanted = encoder.encode(data)
    tensors = {name.replace("vision_tower.", "vision_tower.vision_model."): t for name, t in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    (tmp_path / "midstream.json").unlink()
    with closing(ImageEncoder(open_model_folder(str(tmp_path)), CPU, torch.float32)) as encoder:
        found = encoder.encode(data)
    assert torch.equal(found.embeddings, wanted.embeddings)
    assert found.text == wanted.text

    name = "multi_modal_projector.linear_1.weight"
    for changed, error, reason in (
        (tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, UnsupportedError, "quantized"),
        ({other: tensor for other, tensor in tensors.items() if other != name}, ConfigError, "lack"),
    ):
        save_file(changed, file, {"format": "pt"})
        (tmp_path / "midstream.json").unlink()
        with pytest.raises(error, match=reason):
            ImageEncoder(open_model_folder(str(tmp_path)), CPU, torch.float32)


@pytest.mark.parametrize("case", ["pixtral", "mistral3"])
def test_an_image_that_cannot_be_scaled_is_refused(case: str, tmp_path: Path) -> None:
    """Pixtral's processor scales the shorter side of a narrow image to nothing."""
    make_vision_model(tmp_path, case)
    with closing(ImageEncoder(open_model_folder(str(tmp_path)), CPU, torch.float32)) as encoder:
        with pytest.raises(InvalidArgumentError, match="has 1 x 400 pixels"):
            encoder.encode(picture(1, 400)[1])
        # transformers fails if the only image of a prompt becomes a single embedding.
        assert encoder.encode(picture(1, 1)[1]).text == "<image>[IMG_END]"


def test_an_image_without_tiles_is_one_tile(folder: Path) -> None:
    config = folder / "preprocessor_config.json"
    text = config.read_text()
    config.write_text(text.replace('"do_image_splitting": true', '"do_image_splitting": false'))
    with closing(ImageEncoder(open_model_folder(str(folder)), CPU, torch.float32)) as encoder:
        found = encoder.encode(picture(60, 31)[1])
    config.write_text(text)
    wanted = get_image_prompt_string(0, 0, TOKENS_PER_TILE, "<fake_token_around_image>", "<image>", "<global-img>")
    assert found.text == wanted
    assert len(found.embeddings) == TOKENS_PER_TILE


def header_of(width: int, height: int) -> bytes:
    """Return a PNG file that has only the header of an image of this size."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in (header, b"IDAT")
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.fixture(scope="module")
def files() -> Iterator[ImageFiles]:
    with closing(ImageFiles()) as files:
        yield files


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "AVIF", "BMP", "TIFF"])
def test_a_file_is_read_as_by_pillow(files: ImageFiles, kind: str) -> None:
    image, data = picture(9, 7, kind=kind)
    assert files.read(data).tobytes() == image.tobytes()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "AVIF", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_upright_as_by_transformers(files: ImageFiles, kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    file = io.BytesIO()
    picture(9, 7)[0].save(file, kind, exif=exif)
    wanted, found = load_image(Image.open(file)), files.read(file.getvalue())
    assert wanted.size == ((7, 9) if orientation >= 5 else (9, 7))
    assert (found.size, found.tobytes()) == (wanted.size, wanted.tobytes())


def test_damaged_metadata_do_not_matter(files: ImageFiles) -> None:
    image, _ = picture(9, 7)
    file = io.BytesIO()
    image.save(file, "PNG", exif=b"no directory of tags")
    assert files.read(file.getvalue()).tobytes() == image.tobytes()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not an image"),
        (b"no image", "not an image"),
        (picture(9, 9, kind="PPM")[1], "not an image"),
        (picture(90, 90)[1][:2000], "cannot be read"),
        (header_of(1 << 13, (1 << 12) + 1), "33562624 pixels"),
        (header_of((1 << 14) + 1, 1), "each side"),
    ],
    ids=["empty", "text", "other_type", "cut_off", "too_large", "too_long"],
)
def test_what_is_no_image_is_refused(files: ImageFiles, data: bytes, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason) as raised:
        files.read(data)
    assert raised.value.field == "data"


@pytest.mark.parametrize(
    ("limit", "value", "reason"),
    [("MEMORY_BYTES", 1 << 26, "too much memory"), ("CPU_LIMIT_S", 0.02, "takes too long"), ("", 0, "crashes")],
)
def test_an_image_that_exceeds_a_limit_is_refused_and_harms_no_other(
    limit: str, value: float, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child process has a smaller limit, or a decoder that crashes on large images."""
    large, small = picture(2048, 2048, kind="JPEG")[1], picture(9, 9)[1]
    code = "import ctypes, sys\nfrom gpu_worker.models import image_file_reader as reader\n"
    if limit:
        code += f"reader.{limit} = {value}\n"
        monkeypatch.setattr(image_files, limit, value)
    else:
        code += "read = reader.read_image\n"
        code += "reader.read_image = lambda data: read(data) if len(data) < 5000 else ctypes.string_at(0)\n"
    _replace_reader(f"{code}reader.main()\n", tmp_path, monkeypatch)
    with closing(ImageFiles()) as files:
        assert files.read(small).size == (9, 9)
        with pytest.raises(InvalidArgumentError, match=reason):
            files.read(large)
        assert files.read(small).size == (9, 9)


def _replace_reader(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "child.py").write_text(code)
    command = [sys.executable, str(folder / "child.py")]
    monkeypatch.setattr(image_files, "python_command", lambda _: command)


_HOSTILE_READER = """
import contextlib, signal, socket, time
from gpu_worker.models import image_file_reader as reader
from midstream.socket_messages import send

reader.WALL_LIMIT_S = 3.0
files, read = [], reader.read_image

def read_image(data):
    files.append(data)
    if data == b"forge":  # a second answer
        for number in range(20):
            with contextlib.suppress(OSError):
                connection = socket.socket(fileno=number)
                send(connection, {"error": "forged"})
                connection.detach()
    if data == b"sleep":
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
        while True:
            time.sleep(1)
    if data == b"tell":
        return {"error": repr([file for file in files if len(file) < 9])}, b""  # without those at the start
    if data == b"huge":
        return {"width": 16384, "height": 16384}, bytes(3 * reader.MAX_PIXELS + (1 << 20))
    if data == b"wrong":
        return {"width": 1 << 40, "height": "x"}, b"abc"
    return read(data)

reader.read_image = read_image
reader.main()
"""


def test_a_file_that_takes_over_its_reader_affects_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that a hostile file controls must neither see another file nor produce the result for another file."""
    image, data = picture(9, 7)
    _replace_reader(_HOSTILE_READER, tmp_path, monkeypatch)
    with closing(ImageFiles()) as files:
        for attack in (b"forge", b"huge", b"wrong", b"sleep"):
            with pytest.raises(InvalidArgumentError):
                files.read(attack)
            assert files.read(data).tobytes() == image.tobytes(), attack
        with pytest.raises(InvalidArgumentError) as raised:
            files.read(b"tell")
        assert raised.value.message == "[b'tell']"


def test_a_killed_child_is_replaced() -> None:
    image, data = picture(9, 9)
    with closing(ImageFiles()) as files:
        files.read(data)
        assert files._child is not None
        os.kill(files._child._process.pid, signal.SIGKILL)
        assert files.read(data).tobytes() == image.tobytes()


def test_a_folder_without_processor_is_refused(folder: Path) -> None:
    config = folder / "preprocessor_config.json"
    config.rename(folder / "other.json")
    try:
        with pytest.raises(ConfigError, match="image processor"):
            ImageEncoder(open_model_folder(str(folder)), CPU, torch.float32)
    finally:
        (folder / "other.json").rename(config)
