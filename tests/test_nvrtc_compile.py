"""The shared kernel headers mean the same to g++ and to NVRTC: same text, same sizes, same offsets, no GPU needed."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from importlib.metadata import distribution
from pathlib import Path

import pytest

import expertwire

SHARED = Path(expertwire.__file__).parent / "kernels" / "shared"
HOST_FLAGS = ["-std=c++20", "-Wall", "-Wextra", "-Wconversion", "-Werror"]
NVRTC_FLAGS = ["--std=c++20", "--gpu-architecture=compute_90a"]

# One per row format and combine mode; odd sizes, so that every alignment step shows.
SHAPES = {
    "bf16": "Shape{2, 6, 3, 8, 2, 5, 1, false, false, false}",
    "bf16_direct": "Shape{3, 10, 4, 1000, 7, 13, 2, false, false, true}",
    "fp8": "Shape{8, 256, 32, 7168, 8, 128, 2, true, false, false}",
    "fp8_ue8m0": "Shape{5, 11, 4, 640, 3, 33, 3, true, true, true}",
}


def struct_body(text: str, name: str) -> str:
    found = re.search(rf"struct {name} {{(.*?)\n}};", text, re.DOTALL)
    assert found, f"no struct {name}"
    return found[1]


def fields(text: str, name: str) -> list[str]:
    """Names of the data members of a struct, read from its text, so that a new member is covered the day it comes."""
    code = re.sub(r"//[^\n]*", "", struct_body(text, name))
    code = re.sub(r"[^;{}]*\([^;{}]*\{[^{}]*\}", "", code)  # member functions
    return [
        found[1]
        for declaration in code.split(";")
        for part in declaration.split(",")
        if (found := re.search(r"(\w+)\s*(?:=[^,]*)?$", part.strip()))
    ]


def expressions() -> list[str]:
    """Constant expressions that both compilers must agree on."""
    layout, params = ((SHARED / name).read_text() for name in ("layout.cuh", "params.cuh"))
    result = ["kScaleBlock", "kRegionAlignment", "kNumBuffers", "kSegmentHeaderBytes"]
    for text in (layout, params):
        for name in re.findall(r"^struct (\w+) {", text, re.MULTILINE):
            result.append(f"sizeof({name})")
            result += [f"__builtin_offsetof({name}, {field})" for field in fields(text, name)]
    scalars = [field for field in fields(layout, "SegmentLayout") if field not in {"row", "dispatch", "combine"}]
    for part, name in (("row", "RowLayout"), ("dispatch", "DispatchRegions"), ("combine", "CombineRegions")):
        scalars += [f"{part}.{field}" for field in fields(layout, name)]
    for shape in SHAPES.values():
        result += [f"make_segment_layout({shape}).{field}" for field in scalars]
        result += [f"make_segment_layout({shape}).{call}" for call in ("dispatch_buffer(0, 7)", "combine_buffer(0, 8)")]
    return result


def host_values(folder: Path, names: list[str]) -> list[int]:
    compiler = os.environ.get("CXX", "g++").split()
    source = folder / "host.cc"
    lines = "\n".join(
        f'  constexpr u64 v{i} = static_cast<u64>({e});\n  std::printf("%llu\\n", v{i});' for i, e in enumerate(names)
    )
    source.write_text(
        '#include <cstdio>\n#include "layout.cuh"\n#include "params.cuh"\n'
        f"using namespace expertwire;\nint main() {{\n{lines}\n}}\n"
    )
    subprocess.run(
        [*compiler, *HOST_FLAGS, f"-I{SHARED}", str(source), "-o", str(folder / "host")], check=True, timeout=100
    )
    printed = subprocess.run([str(folder / "host")], check=True, capture_output=True, text=True, timeout=10).stdout
    return [int(line) for line in printed.split()]


class Nvrtc:
    """The compiler library of the nvidia-cuda-nvrtc wheel."""

    def __init__(self) -> None:
        files = distribution("nvidia-cuda-nvrtc").files or []
        libraries = [Path(str(file.locate())) for file in files if file.name.startswith("libnvrtc")]
        # libnvrtc looks its builtins up by name alone, and finds them if they are loaded already.
        builtins = min(path for path in libraries if path.name.startswith("libnvrtc-builtins.so"))
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self.compiler = ctypes.CDLL(str(min(path for path in libraries if path.name.startswith("libnvrtc.so"))))

    def compile(self, source: str, headers: dict[str, str]) -> tuple[int, str]:
        """Status (0: compiled) and log."""
        program = ctypes.c_void_p()
        texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
        names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
        created = self.compiler.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"test.cu", len(headers), texts, names
        )
        assert created == 0, f"nvrtcCreateProgram: {created}"
        options = (ctypes.c_char_p * len(NVRTC_FLAGS))(*(flag.encode() for flag in NVRTC_FLAGS))
        status = self.compiler.nvrtcCompileProgram(program, len(options), options)
        size = ctypes.c_size_t()
        assert self.compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size)) == 0
        log = ctypes.create_string_buffer(size.value)
        assert self.compiler.nvrtcGetProgramLog(program, log) == 0
        assert self.compiler.nvrtcDestroyProgram(ctypes.byref(program)) == 0
        return status, log.value.decode()


def device_source(names: list[str], values: list[int]) -> str:
    # NVRTC 13.0 has offsetof by this name only.
    offset, in_nvrtc = re.compile(r"__builtin_offsetof\((\w+), (\w+)\)"), r"__INTADDR__(&((\1*)0)->\2)"
    asserts = "\n".join(
        f'static_assert(static_cast<u64>({offset.sub(in_nvrtc, name)}) == {value}ull, "differs from the host");'
        for name, value in zip(names, values, strict=True)
    )
    return (
        '#include "layout.cuh"\n#include "params.cuh"\nusing namespace expertwire;\n'
        f"{asserts}\n"
        'extern "C" __global__ void entry(Shape shape, DispatchParams dispatch, CombineParams combine, u64* out) {\n'
        "  const SegmentLayout layout = make_segment_layout(shape);\n"
        "  out[0] = layout.bytes + static_cast<u64>(dispatch.num_tokens) + static_cast<u64>(combine.num_tokens);\n"
        "}\n"
    )


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    return Nvrtc()


def test_member_names_are_read_from_the_text() -> None:
    members = (
        "u64 a = 0, b = 0;  // c; d",
        "const void* e = nullptr;",
        "constexpr u64 f(i32 g) const { return a * b; }",
    )
    text = "struct A {\n  " + "\n  ".join(members) + "\n};"
    assert fields(text, "A") == ["a", "b", "e"]


@pytest.mark.timeout(200)
def test_host_and_device_agree(tmp_path: Path, nvrtc: Nvrtc) -> None:
    names = expressions()
    values = host_values(tmp_path, names)
    headers = {path.name: path.read_text() for path in sorted(SHARED.glob("*.cuh"))}
    status, log = nvrtc.compile(device_source(names, values), headers)
    assert (status, log.strip()) == (0, ""), log
    # The same source with one number changed is refused, so the numbers were looked at.
    for position in (0, len(values) - 1):
        changed = [value + (i == position) for i, value in enumerate(values)]
        status, log = nvrtc.compile(device_source(names, changed), headers)
        assert status != 0
        assert "differs from the host" in log
