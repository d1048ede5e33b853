"""A real GPU, through the CUDA driver: imports and creates shareable memory, hashes it there, moves it.

cuda-core compiles the kernels when the device is made ready; the driver calls are those of cuda-bindings.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from importlib import resources
from typing import Any

from moorage.errors import DeviceFailed, EnvironmentLacking, NoCapacity, NotFound
from moorage.worker.gpu.device import CHUNK, Region, Slot
from moorage.worker.gpu.driver import load

_SLOT_BYTES = 16 << 20
_SLOTS = 32  # two for each thread: one is copied while the other is written or read
_LEAF_GROUP = 256 << 10
_VALUE = 32
_current = threading.local()  # the device whose context is the thread's
_DESCRIPTOR_KIND = "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise EnvironmentLacking(f"the GPU broker needs cuda-bindings: {error}", "pip install 'moorage[gpu]'") from None
    return driver


class CudaDevice:
    """See `moorage.worker.gpu.device.Device`. ``index`` counts as the driver does."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._cu = cu = _driver()
        self._here = threading.local()
        self._call(cu.cuInit, 0)
        self._device = self._call(cu.cuDeviceGet, index)
        self._context = self._call(cu.cuDevicePrimaryCtxRetain, self._device)
        self._properties = self._memory_properties(rdma=False)
        self._granularity = self._call(
            cu.cuMemGetAllocationGranularity,
            self._properties,
            cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
        )
        self._lock = threading.Lock()
        self._kernels: dict[str, Any] = {}
        self._slots: list[Slot] = []

    # -- calls

    def _call(self, function: Any, *arguments: Any) -> Any:
        status, *results = function(*arguments)
        if status != self._cu.CUresult.CUDA_SUCCESS:
            name = getattr(function, "__name__", str(function))
            if status == self._cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                raise NoCapacity(f"GPU {self.index} has too little free memory ({name})", "free memory on that GPU")
            raise DeviceFailed(f"GPU {self.index}: {name} answered {status.name}")
        return results[0] if len(results) == 1 else tuple(results)

    def _enter(self) -> Any:
        """Make the context this thread's; returns the thread's stream."""
        if getattr(_current, "device", None) is not self:
            self._call(self._cu.cuCtxSetCurrent, self._context)
            _current.device = self
        stream = getattr(self._here, "stream", None)
        if stream is None:
            flags = self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING
            stream = self._here.stream = self._call(self._cu.cuStreamCreate, flags)
        return stream

    def _memory_properties(self, *, rdma: bool) -> Any:
        cu = self._cu
        properties = cu.CUmemAllocationProp()
        properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.index
        properties.requestedHandleTypes = getattr(cu.CUmemAllocationHandleType, _DESCRIPTOR_KIND)
        properties.allocFlags.gpuDirectRDMACapable = int(rdma)
        return properties

    def warm(self) -> None:
        self._enter()
        self._kernel("leaves")
        self.slots()
        load()

    # -- memory

    def open(self, descriptor: int, size: int) -> Region:
        self._enter()
        kind = getattr(self._cu.CUmemAllocationHandleType, _DESCRIPTOR_KIND)
        return self._mapped(self._call(self._cu.cuMemImportFromShareableHandle, descriptor, kind), size)

    def place(self, descriptor: int) -> int:
        self._enter()
        kind = getattr(self._cu.CUmemAllocationHandleType, _DESCRIPTOR_KIND)
        handle = self._call(self._cu.cuMemImportFromShareableHandle, descriptor, kind)
        try:
            return int(self._call(self._cu.cuMemGetAllocationPropertiesFromHandle, handle).location.id)
        finally:
            self._cu.cuMemRelease(handle)

    def create(self, size: int, *, rdma: bool) -> tuple[Region, int]:
        self._enter()
        handle = self._call(self._cu.cuMemCreate, size, self._memory_properties(rdma=rdma), 0)
        region = self._mapped(handle, size)
        kind = getattr(self._cu.CUmemAllocationHandleType, _DESCRIPTOR_KIND)
        try:
            return region, int(self._call(self._cu.cuMemExportToShareableHandle, handle, kind, 0))
        except DeviceFailed:
            self.close(region)
            raise

    def _mapped(self, handle: Any, size: int) -> Region:
        cu = self._cu
        address = None
        try:
            address = self._call(cu.cuMemAddressReserve, size, CHUNK, 0, 0)
            self._call(cu.cuMemMap, address, size, 0, handle, 0)
            access = cu.CUmemAccessDesc()
            access.location = self._properties.location
            access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            self._call(cu.cuMemSetAccess, address, size, [access], 1)
        except (DeviceFailed, NoCapacity):
            if address is not None:
                cu.cuMemUnmap(address, size)
                cu.cuMemAddressFree(address, size)
            cu.cuMemRelease(handle)
            raise
        return Region(int(address), size, int(handle))

    def close(self, region: Region) -> None:
        self._enter()
        self._call(self._cu.cuMemUnmap, region.address, region.size)
        self._call(self._cu.cuMemAddressFree, region.address, region.size)
        self._call(self._cu.cuMemRelease, region.handle)

    def free_bytes(self) -> int:
        self._enter()
        return int(self._call(self._cu.cuMemGetInfo)[0])

    # -- kernels

    def digests(self, regions: Sequence[Region], key: bytes) -> list[bytes]:
        cu, stream = self._cu, self._enter()
        groups = sum(region.size for region in regions) // _LEAF_GROUP
        if not groups:
            return [b"" for _ in regions]
        chunks = groups // (CHUNK // _LEAF_GROUP)
        leaves = self._call(cu.cuMemAlloc, groups * _VALUE)
        try:
            roots = self._call(cu.cuMemAlloc, chunks * _VALUE)
            try:
                at = 0
                for region in regions:
                    blocks = region.size // _LEAF_GROUP
                    self._launch(
                        stream, "leaves", (blocks, 1), ctypes.c_uint64(region.address),
                        ctypes.c_uint64(int(leaves) + at * _VALUE), _key_argument(key),
                    )  # fmt: skip
                    at += blocks
                self._launch(
                    stream, "roots", (-(-chunks // 256), 1), ctypes.c_uint64(int(leaves)),
                    ctypes.c_uint64(int(roots)), _key_argument(key), ctypes.c_uint32(chunks),
                )  # fmt: skip
                data = bytearray(chunks * _VALUE)
                self._call(
                    cu.cuMemcpyDtoHAsync, (ctypes.c_char * len(data)).from_buffer(data), roots, len(data), stream
                )
                self._call(cu.cuStreamSynchronize, stream)
            finally:
                cu.cuMemFree(roots)
        finally:
            cu.cuMemFree(leaves)
        found, at = [], 0
        for region in regions:
            size = region.size // CHUNK * _VALUE
            found.append(bytes(data[at : at + size]))
            at += size
        return found

    def scratch(self, size: int) -> Region:
        self._enter()
        return self._mapped(self._call(self._cu.cuMemCreate, size, self._properties, 0), size)

    def gather(self, sources: Sequence[int], region: Region) -> None:
        cu, stream = self._cu, self._enter()
        table = (ctypes.c_uint64 * len(sources))(*sources)
        list_address = self._call(cu.cuMemAlloc, ctypes.sizeof(table))
        try:
            self._call(cu.cuMemcpyHtoDAsync, list_address, table, ctypes.sizeof(table), stream)
            for first in range(0, len(sources), 32768):  # a grid's second dimension ends at 65,535
                count = min(32768, len(sources) - first)
                self._launch(
                    stream, "gather", (16, count), ctypes.c_uint64(int(list_address) + first * 8),
                    ctypes.c_uint64(region.address + first * CHUNK),
                )  # fmt: skip
            self._call(cu.cuStreamSynchronize, stream)
        finally:
            cu.cuMemFree(list_address)

    def _launch(self, stream: Any, name: str, grid: tuple[int, int], *arguments: Any) -> None:
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        self._call(
            self._cu.cuLaunchKernel, self._kernel(name), grid[0], grid[1], 1, 256, 1, 1, 0, stream,
            ctypes.addressof(pointers), 0,
        )  # fmt: skip

    def _kernel(self, name: str) -> Any:
        with self._lock:
            if not self._kernels:
                self._compile()
            return self._kernels[name]

    def _compile(self) -> None:
        try:
            from cuda.core import Program, ProgramOptions
        except ImportError as error:
            raise EnvironmentLacking(f"the GPU broker needs cuda-core: {error}", "pip install 'moorage[gpu]'") from None
        cu = self._cu
        major, minor = (
            self._call(cu.cuDeviceGetAttribute, attribute, self._device)
            for attribute in (
                cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        source = resources.files("moorage.worker.gpu").joinpath("blake3.cu").read_text()
        program = Program(source, "c++", ProgramOptions(std="c++17", arch=f"sm_{major}{minor}"))
        image = program.compile("cubin").code
        self._module = self._call(cu.cuModuleLoadData, image)
        for name in ("leaves", "roots", "gather"):
            self._kernels[name] = self._call(cu.cuModuleGetFunction, self._module, name.encode())

    def clear(self, address: int, size: int) -> None:
        stream = self._enter()
        self._call(self._cu.cuMemsetD8Async, address, 0, size, stream)
        self._call(self._cu.cuStreamSynchronize, stream)

    # -- the way to the host

    def slots(self) -> Sequence[Slot]:
        with self._lock:
            if not self._slots:
                self._enter()
                for number in range(_SLOTS):
                    address = int(self._call(self._cu.cuMemHostAlloc, _SLOT_BYTES, 0))
                    view = memoryview((ctypes.c_char * _SLOT_BYTES).from_address(address)).cast("B")
                    self._slots.append(Slot(number, view, threading.Lock()))
            return self._slots

    def pin(self, size: int) -> Slot:
        self._enter()
        address = int(self._call(self._cu.cuMemHostAlloc, size, 0))
        return Slot(-1, memoryview((ctypes.c_char * size).from_address(address)).cast("B"), threading.Lock())

    def unpin(self, slot: Slot) -> None:
        self._enter()
        self._call(self._cu.cuMemFreeHost, _address(slot.view))

    def to_host(self, slot: Slot, pieces: Sequence[tuple[int, int, int]]) -> None:
        stream = self._enter()
        base = _address(slot.view)
        for offset, address, size in pieces:
            self._call(self._cu.cuMemcpyDtoHAsync, base + offset, address, size, stream)

    def to_device(self, slot: Slot, pieces: Sequence[tuple[int, int, int]]) -> None:
        stream = self._enter()
        base = _address(slot.view)
        for offset, address, size in pieces:
            self._call(self._cu.cuMemcpyHtoDAsync, address, base + offset, size, stream)

    def wait(self) -> None:
        self._call(self._cu.cuStreamSynchronize, self._enter())


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _key_argument(key: bytes) -> Any:
    return (ctypes.c_uint32 * 8).from_buffer_copy(key)


def index_of(uuid: str) -> int:
    """The driver's number of the GPU ``uuid`` (as ``GPU-xxxxxxxx-…``). Raises `NotFound`."""
    import uuid as uuids

    cu = _driver()
    if cu.cuInit(0)[0] != cu.CUresult.CUDA_SUCCESS:
        raise EnvironmentLacking("the CUDA driver cannot be initialised", "see `nvidia-smi`")
    for number in range(cu.cuDeviceGetCount()[1]):
        found = cu.cuDeviceGetUuid(cu.cuDeviceGet(number)[1])[1]
        if f"GPU-{uuids.UUID(bytes=bytes(found.bytes))}" == uuid:
            return number
    raise NotFound(f"no GPU of this node is {uuid}")
