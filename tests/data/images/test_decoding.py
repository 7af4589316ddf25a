"""Images in every variant against Pillow's reading of them, and files that are none."""

import io
import os
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from mixedres.data.images import decoding
from tests.data import made

SIDES = (75, 114)


def decoded(data, *, channels=3, shrink=1, apply_exif=False):
    head = decoding.read_header(data, apply_exif=apply_exif)
    pixels = decoding.decode_image(data, head, channels=channels, shrink=shrink)
    sides = tuple(-(-side // shrink) for side in (head.height, head.width))
    assert pixels.dtype == np.uint8 and pixels.shape == (*sides, channels)
    return pixels


def pillow(data, mode="RGB"):
    pixels = np.asarray(Image.open(io.BytesIO(data)).convert(mode))
    return pixels if mode == "RGB" else pixels[..., None]


def photo(mode="RGB"):
    return Image.fromarray(made.photo(*SIDES)).convert(mode)


def ycck():
    """A JPEG as Adobe's programs write it: what Pillow stores as inverted CMYK, with the marker set to YCCK."""
    data = made.encoded(photo("CMYK"), quality=95)
    place = data.index(b"Adobe")
    return data[: place + 11] + b"\x02" + data[place + 12 :]


JPEGS = {
    "4:2:0": (made.encoded(photo(), quality=92), "YCbCr"),
    "4:4:4": (made.encoded(photo(), quality=92, subsampling=0), "YCbCr"),
    "4:2:2": (made.encoded(photo(), quality=92, subsampling=1), "YCbCr"),
    "progressive": (made.encoded(photo(), quality=92, progressive=True), "YCbCr"),
    "RGB": (made.encoded(photo(), quality=92, keep_rgb=True), "RGB"),
    "gray": (made.encoded(photo("L"), quality=92), "Gray"),
    "CMYK": (made.encoded(photo("CMYK"), quality=92), "CMYK"),
    "YCCK": (ycck(), "YCCK"),
}


@pytest.mark.parametrize("kind", JPEGS)
def test_jpegs_are_close_to_pillow(kind):
    data, colorspace = JPEGS[kind]
    assert decoding.read_header(data) == decoding.Header(*SIDES, True, 1, colorspace)
    # Two decoders may round otherwise, and CMYK has no one conversion.
    limits = (6, 2.0) if kind in ("CMYK", "YCCK") else (2, 0.1)
    found = made.difference(decoded(data), pillow(data))
    assert found.max() <= limits[0] and found.mean() <= limits[1]
    luma = made.difference(decoded(data, channels=1), pillow(data, "L"))
    assert luma.max() <= limits[0] + 1 and luma.mean() <= limits[1] + 0.5


PNGS = {
    "RGB": photo(),
    "gray": photo("L"),
    "palette": photo("P"),
    "RGBA": Image.merge("RGBA", (*photo().split(), photo("L"))),
    "gray and alpha": Image.merge("LA", (photo("L"), photo("L"))),
    "1 bit": photo("1"),
}
EXACT = {kind: made.encoded(image, "PNG") for kind, image in PNGS.items()}
EXACT |= {"WEBP": made.encoded(photo(), "WEBP"), "lossless WEBP": made.encoded(photo(), "WEBP", lossless=True)}
EXACT |= {"BMP": made.encoded(photo(), "BMP"), "TIFF": made.encoded(photo(), "TIFF", compression="tiff_lzw")}
# Of several frames the first is read.
EXACT["GIF"] = made.encoded(photo(), "GIF", save_all=True, append_images=[photo("1")])


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_images_but_jpegs_equal_pillow(kind, mode):
    data = EXACT[kind]
    assert decoding.read_header(data) == decoding.Header(*SIDES, False)
    reference = pillow(data, mode)
    assert len(np.unique(reference)) > {"1 bit": 1, "palette": 5}.get(kind, 50)
    np.testing.assert_array_equal(decoded(data, channels=len(mode)), reference)


def test_transparent_palette_becomes_opaque():
    image = photo("P")
    data = made.encoded(image, "PNG", transparency=bytes(range(256)))
    np.testing.assert_array_equal(decoded(data), pillow(made.encoded(image, "PNG")))


def test_sixteen_bits_are_rounded_to_eight():
    values = np.linspace(0, 65535, SIDES[0] * SIDES[1]).reshape(SIDES).astype(np.uint16)
    data = made.encoded(Image.fromarray(values), "PNG")
    expected = np.rint(values / 65535 * 255)
    assert set(np.unique(expected)) == set(range(256))
    np.testing.assert_array_equal(decoded(data, channels=1)[..., 0], expected)
    np.testing.assert_array_equal(decoded(data), np.repeat(expected[..., None], 3, 2))


def tiff(sides, tile, bits=8):
    """A gray TIFF of zeros with these sides, in one tile."""
    packed = zlib.compress(bytes(tile[0] * tile[1] * bits // 8))
    sizes = [(256, sides[1]), (257, sides[0]), (322, tile[1]), (323, tile[0]), (325, len(packed))]
    tags = [(tag, 4, 1, value) for tag, value in sizes]
    tags += [(tag, 3, 1, value) for tag, value in ((258, bits), (259, 8), (262, 1), (277, 1), (324, 8))]
    entries = b"".join(struct.pack("<HHII", *tag) for tag in sorted(tags))
    return b"II*\0" + struct.pack("<I", 8 + len(packed)) + packed + struct.pack("<H", len(tags)) + entries + bytes(4)


def run_length_bmp(side):
    """A gray BMP of one color, in runs."""
    rows = (b"".join(bytes([min(255, side - x), 7]) for x in range(0, side, 255)) + b"\0\0") * side + b"\0\1"
    palette = b"".join(bytes([x, x, x, 0]) for x in range(256))
    header = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, len(rows), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 1078 + len(rows), 0, 0, 1078) + header + palette + rows


# Prints how the most memory that decoding takes compares with what is reserved, for each file in a directory.
MEMORY = """
import pathlib, sys
from mixedres.data.images import decoding
decoding._BLOCK = 2**13  # so that rows that are converted together hardly count
def kilobytes(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])
for path in [path for path in sorted(pathlib.Path(sys.argv[1]).iterdir()) for _ in range(2)]:
    data = path.read_bytes()
    head, reserved = decoding.read_header(data), decoding._bytes_to_decode(decoding.open_with_pillow(data))
    open("/proc/self/clear_refs", "w").write("5")  # the peak is counted anew
    before = kilobytes("VmRSS")
    decoding.decode_image(data, head)
    print(path.name, 1024 * (kilobytes("VmHWM") - before) / reserved)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_memory_that_is_reserved_is_the_memory_that_decoding_takes(tmp_path):
    """In a process of its own, whose peak of memory is that of the decoder."""
    side = 1280
    gray = np.repeat(np.repeat(made.noise(16, 16, 1)[..., 0], side // 16, 0), side // 16, 1)
    deep, color = gray.astype(np.uint16) * 257, np.repeat(gray[..., None], 3, 2)
    files = {"gray16.png": made.encoded(Image.fromarray(deep), "PNG"), "rgb.png": made.encoded(color, "PNG")}
    files |= {"gray16.tif": made.encoded(Image.fromarray(deep), "TIFF"), "rgb.tif": made.encoded(color, "TIFF")}
    files |= {"packed.tif": made.encoded(color, "TIFF", compression="tiff_deflate"), "runs.bmp": run_length_bmp(side)}
    files |= {"tile.tif": tiff((side, side), (2 * side, 2 * side), 16), "gray.png": made.encoded(gray, "PNG")}
    files |= {"rgb.webp": made.encoded(color, "WEBP"), "palette.gif": made.encoded(Image.fromarray(gray), "GIF")}
    files["text.pgm"] = b"P2 800 800 65535\n" + b"7 " * 640_000
    made.write_files(tmp_path, files)
    returned = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # so that memory that is freed counts no more
    options = {"capture_output": True, "text": True, "check": True, "env": returned}
    ended = subprocess.run([sys.executable, "-c", MEMORY, tmp_path], **options)
    ratios = {name: float(ratio) for name, ratio in map(str.split, ended.stdout.splitlines())}  # the second of each
    assert ratios.keys() == files.keys()
    text = ratios.pop("text.pgm")  # whose words take more than its pixels
    assert {name: ratio for name, ratio in ratios.items() if not 0.9 < ratio < 1.1} == {} and text < 1.1


def test_tiles_much_larger_than_the_image_are_refused():
    assert not decoded(tiff((64, 64), (256, 256))).any()
    with pytest.raises(ValueError, match="its tiles have 4096x2048 pixels, many more than the image"):
        decoded(tiff((64, 64), (2048, 4096)))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("kind", "channels"), [("JPEG", 3), ("PNG", 1), ("WEBP", 3), ("TIFF", 3)])
def test_orientations_are_undone_as_pillow_does(orientation, kind, channels):
    options = {"lossless": True} if kind == "WEBP" else {"quality": 95} if kind == "JPEG" else {}
    data = made.turned(photo(), orientation, kind, **options)
    reference = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    if channels == 1:
        reference = np.rint(reference @ (0.299, 0.587, 0.114))[..., None]
    head = decoding.read_header(data, apply_exif=True)
    assert (head.height, head.width) == reference.shape[:2] == (SIDES[::-1] if orientation > 4 else SIDES)
    limit = 2 if kind == "JPEG" or channels == 1 else 0
    assert made.difference(decoded(data, channels=channels, apply_exif=True), reference).max() <= limit
    # Not heeded where nobody asked for it; Pillow turns every TIFF.
    assert decoding.read_header(data).orientation == 1
    assert kind == "TIFF" or decoding.read_header(data)[:2] == SIDES


@pytest.mark.parametrize("orientation", [3, 6, 7])
@pytest.mark.parametrize("shrink", [2, 8])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_rotated_image_shrinks_like_an_upright_one(orientation, shrink, kind):
    # Sides that no shrink divides would begin their boxes at another end when turned.
    image = Image.fromarray(made.photo(64, 104))
    data = made.turned(image, orientation, kind, **({"quality": 100, "subsampling": 0} if kind == "JPEG" else {}))
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert made.psnr(decoded(data, shrink=shrink, apply_exif=True), boxes(upright, shrink)) > 36


@pytest.mark.parametrize("value", [0, 9, 255, 65535])
def test_invalid_orientation_is_ignored(value):
    assert decoding.read_header(made.turned(photo(), value), apply_exif=True).orientation == 1


def boxes(pixels, shrink):
    """Averages over squares; float64. The sides must be multiples."""
    height, width, channels = pixels.shape
    parts = pixels.reshape(height // shrink, shrink, width // shrink, shrink, channels)
    return parts.mean((1, 3), dtype=np.float64)


@pytest.mark.parametrize("shrink", [2, 4, 8])
@pytest.mark.parametrize("kind", ["JPEG", "progressive", "gray", "PNG", "WEBP"])
def test_shrinking_averages_blocks_of_pixels(shrink, kind):
    pixels = made.photo(160, 240, seed=3, channels=1 if kind == "gray" else 3)
    options = {"JPEG": {"quality": 95}, "progressive": {"quality": 95, "progressive": True}}.get(kind, {})
    data = made.encoded(pixels, kind if kind in ("PNG", "WEBP") else "JPEG", **options)
    for channels in (3, 1):
        whole, small = decoded(data, channels=channels), decoded(data, channels=channels, shrink=shrink)
        assert made.psnr(small, boxes(whole, shrink)) > 38
        # Pixels that are two places off would not do.
        assert made.psnr(np.roll(small, 2, 1), boxes(whole, shrink)) < 34


@given(st.integers(4, 40), st.integers(4, 40), st.sampled_from(["JPEG", "PNG"]))
@example(4, 4, "PNG")  # as small as an image may be
@settings(max_examples=25)
def test_shrunk_sides_are_rounded_up(height, width, kind):
    data = made.encoded(made.photo(height, width), kind)
    for shrink in (1, 2, 4, 8):
        decoded(data, shrink=shrink)  # which compares the sides


# All that can be lost is the marker at the end, which nobody needs.
KINDS = {
    "JPEG": JPEGS["4:2:0"][0],
    "progressive": JPEGS["progressive"][0],
    "CMYK": JPEGS["CMYK"][0],
    "PNG": EXACT["RGB"],
    "turned PNG": made.turned(photo(), 6, "PNG"),
    "WEBP": EXACT["WEBP"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_file_is_refused(kind):
    data = KINDS[kind]
    decoded(data, apply_exif=True)
    for length in (1, 2, 3, 4, 10, 20, 50, *np.linspace(100, len(data) - 50, 12).astype(int)):
        made.message(decoded, data[:length], apply_exif=True)
    assert made.message(decoded, b"") == "the file is empty"


@pytest.mark.parametrize(
    "data",
    [b"hello, world\n" * 30, b"\0" * 500, b"%PDF-1.4\n", b"\xff\xd8\xff", b"\xff\xd8\xff\xe0" + b"\0" * 99],
    ids=["text", "zeros", "PDF", "JPEG's magic number", "JPEG without a body"],
)
def test_non_images_are_refused(data):
    assert made.message(decoded, data) == "it is not an image in a known format"
    assert made.message(decoded, b"\0\0\0\x18ftypheic" + data) == "it is HEIC or AVIF; convert it to .jpg"


def test_jpeg_with_a_huge_header_is_refused():
    data, sides = JPEGS["4:2:0"][0], (20_000, 10_000)
    place = data.index(b"\xff\xc0") + 5
    data = data[:place] + struct.pack(">HH", *sides) + data[place + 4 :]
    assert f"{sides[1]}x{sides[0]} pixels; at least 4 a side and at most 178,956,970" in made.message(decoded, data)
