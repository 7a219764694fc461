"""A CUDA kernel of the benchmark's own, compiled by NVRTC and launched through the driver, and memory that ranks share.

Works on the context that is current in the calling thread, such as the one torch makes.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from expertwire.errors import BackendError
from expertwire.nvrtc import find_nvrtc_folders

_COMPUTE_MAJOR, _COMPUTE_MINOR = 75, 76
_LAZY_PEER_ACCESS = 1
_HANDLE_BYTES = 64
_NVRTC_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


def compile_source(source: str, architecture: str) -> bytes:
    """Return the machine code of CUDA C++ for one such as ``"sm_90"``; needs no GPU. Raises BackendError."""
    nvrtc = _load_nvrtc()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]

    def must(status: int) -> None:
        if status:
            nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise BackendError(f"NVRTC: {nvrtc.nvrtcGetErrorString(status).decode()}{_log(nvrtc, program)}")

    must(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"source.cu", 0, None, None))
    try:
        must(nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)))
        must(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        image = ctypes.create_string_buffer(size.value)
        must(nvrtc.nvrtcGetCUBIN(program, image))
        return image.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _log(nvrtc: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    if not program or nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)) or size.value <= 1:
        return ""
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    return f": {log.value.decode(errors='replace')}"


def _load_nvrtc() -> ctypes.CDLL:
    folders = [Path(folder) for folder in find_nvrtc_folders()]
    for folder in folders:
        for path in sorted(folder.glob("libnvrtc-builtins.so.*")):  # NVRTC looks for it by name alone
            _loaded(str(path))
    installed = [str(path) for folder in folders for path in sorted(folder.glob("libnvrtc.so.*"))]
    for name in (*installed, *_NVRTC_NAMES):
        if (library := _loaded(name)) is not None:
            return library
    raise BackendError("NVRTC is not installed: pip install nvidia-cuda-nvrtc")


def _loaded(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name, ctypes.RTLD_GLOBAL)
    except OSError:
        return None


class _IpcHandle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * _HANDLE_BYTES)]


class Driver:
    """The CUDA driver, as far as it is needed here. Every method raises BackendError with the driver's words."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise BackendError(f"no NVIDIA driver: {error}") from error

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver."""
        if status := getattr(self._library, name)(*arguments):
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise BackendError(f"{name}: {(text.value or b'unknown error').decode()}")

    def architecture(self, device: int) -> str:
        """Return the architecture of a GPU."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(major), _COMPUTE_MAJOR, device)
        self.call("cuDeviceGetAttribute", ctypes.byref(minor), _COMPUTE_MINOR, device)
        return f"sm_{major.value}{minor.value}"

    def kernel(self, image: bytes, name: str) -> ctypes.c_void_p:
        """Load machine code and return its entry; it stays loaded for the life of the process."""
        module, entry = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), image)
        self.call("cuModuleGetFunction", ctypes.byref(entry), module, name.encode())
        return entry

    def launch(self, entry: ctypes.c_void_p, grid: tuple[int, int], params: ctypes.Structure, stream: int) -> None:
        """Launch ``grid`` = (blocks, threads of each) with one parameter."""
        blocks, threads = grid
        address = ctypes.cast(ctypes.byref(params), ctypes.c_void_p)
        addresses = (ctypes.c_void_p * 1)(address)
        self.call(
            "cuLaunchKernel", entry, blocks, 1, 1, threads, 1, 1, 0, ctypes.c_void_p(stream), addresses, None
        )  # fmt: skip

    def allocate(self, num_bytes: int) -> int:
        """Return the address of memory of the current GPU that other processes may open."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        return address.value

    def fill(self, address: int, num_bytes: int) -> None:
        """Set all bits of memory."""
        self.call("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(0xFF), ctypes.c_size_t(num_bytes))

    def export(self, address: int) -> bytes:
        """Return what another process of this host opens memory with."""
        handle = _IpcHandle()
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, exported: bytes) -> int:
        """Return the address at which another process's memory lies here."""
        address = ctypes.c_uint64()
        handle = _IpcHandle.from_buffer_copy(exported)
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return address.value
