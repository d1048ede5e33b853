"""A pod's device memory on its way back: new blocks, filled from the store while CRIU rebuilds the processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from blake3 import blake3

from moorage.errors import CorruptData, DeviceFailed
from moorage.store import Content, Store, bulk
from moorage.worker.gpu.blocks import DIGEST, Block, SavedBlock, told
from moorage.worker.gpu.clock import Clock
from moorage.worker.gpu.device import CHUNK, Device, Region, Slot
from moorage.worker.gpu.parked import KeptBlock
from moorage.worker.gpu.ring import share_out, threads_for
from moorage.worker.gpu.wire import BlockFlag, BlockName


class _Target(NamedTuple):
    device: Device
    address: int


def fill(
    store: Store,
    blocks: Sequence[SavedBlock],
    contents: Mapping[str, Content],
    device: Callable[[int], Device],
    kept: Mapping[BlockName, KeptBlock] | None = None,
    timings: dict[str, float] | None = None,
) -> dict[BlockName, Block]:
    """The blocks with their memory, as the processes left them. ``device``: by the index that the blocks speak of.

    ``kept``: what was kept of them; it stays the caller's to close, but for descriptors that are handed on.
    ``timings`` gets the seconds of the steps.

    Every byte is verified on the device after it arrived. Raises `NoCapacity`, `DeviceFailed`, `CorruptData`; then
    nothing is left.
    """
    clock = Clock({} if timings is None else timings)
    held = _usable(store, blocks, contents, kept or {})
    clock.lap("gpu_fill_plan")
    made: dict[BlockName, Block] = {}
    regions: dict[BlockName, tuple[Device, Region]] = {}
    try:
        for saved in blocks:
            name = BlockName(saved.process, saved.id)
            made[name] = Block(told(saved), placed=True)
            if saved.own:
                gpu = device(saved.device)
                one = held.get(name)
                if one is not None and one.descriptor >= 0 and one.device is gpu:
                    region = gpu.open(one.descriptor, saved.size)
                    made[name].descriptors.append(os.dup(one.descriptor))
                else:
                    region, descriptor = gpu.create(saved.size, rdma=bool(saved.flags & BlockFlag.RDMA))
                    made[name].descriptors.append(descriptor)
                    if one is not None and one.memory is not None:
                        gpu.to_device(one.memory, [(0, region.address, saved.size)])
                    else:
                        held.pop(name, None)
                regions[name] = (gpu, region)
        clock.lap("gpu_fill_make")
        lacking = [saved for saved in blocks if BlockName(saved.process, saved.id) not in held]
        _bring(store, _wanted(lacking, contents, regions))
        for gpu, _ in regions.values():
            gpu.wait()
        clock.lap("gpu_fill_bring")
        _verify(store, blocks, contents, regions, made)
        clock.lap("gpu_fill_verify")
    except BaseException:
        for block in made.values():
            block.close()
        raise
    finally:
        for gpu, region in regions.values():
            with contextlib.suppress(DeviceFailed):
                gpu.wait()  # nothing may be on its way there any more
            gpu.close(region)
        clock.lap("gpu_fill_close")
    return made


def _usable(
    store: Store, blocks: Sequence[SavedBlock], contents: Mapping[str, Content], kept: Mapping[BlockName, KeptBlock]
) -> dict[BlockName, KeptBlock]:
    """Those that are kept with the very bytes that the checkpoint names."""
    if not kept:
        return {}
    zero = blake3(bytes(CHUNK), key=store.key.chunks).digest()
    names = {BlockName(saved.process, saved.id): saved for saved in blocks if saved.own}
    return {
        name: one for name, one in kept.items() if name in names and one.holds(_content(names[name], contents), zero)
    }


def _content(saved: SavedBlock, contents: Mapping[str, Content]) -> Content:
    content = contents.get(saved.content_name)
    if content is None or content.size != saved.size:
        raise CorruptData(
            f"the checkpoint lacks the device memory of block {saved.content_name}", "use an earlier checkpoint"
        )
    return content


def _wanted(
    blocks: Sequence[SavedBlock],
    contents: Mapping[str, Content],
    regions: Mapping[BlockName, tuple[Device, Region]],
) -> dict[bytes, list[_Target]]:
    """Where each chunk goes; what is all zeros is cleared right away."""
    wanted: dict[bytes, list[_Target]] = {}
    for saved in blocks:
        if not saved.own:
            continue
        gpu, region = regions[BlockName(saved.process, saved.id)]
        at = region.address
        for chunk in _content(saved, contents).chunks:
            if chunk.name:
                wanted.setdefault(chunk.name, []).append(_Target(gpu, at))
            else:
                gpu.clear(at, chunk.length)
            at += chunk.length
    return wanted


def _bring(store: Store, wanted: Mapping[bytes, list[_Target]]) -> None:
    """Each thread reads into one slot while the other is copied to the devices."""
    devices = {target.device.index: target.device for targets in wanted.values() for target in targets}
    if not devices:
        return
    # Pinned memory is every GPU's, so all their rings serve all of them.
    slots = [slot for gpu in devices.values() for slot in gpu.slots()]

    def take(run: bulk.Run, slot: Slot) -> dict[int, list[tuple[int, int, int]]]:
        pieces: dict[int, list[tuple[int, int, int]]] = {}
        for piece in bulk.read(store, run, slot.view):
            for target in wanted[piece.name]:
                pieces.setdefault(target.device.index, []).append((piece.offset, target.address, piece.length))
        return pieces

    def work(slot: Slot, other: Slot, runs: Iterator[bulk.Run]) -> None:
        try:
            for run in runs:
                pieces = take(run, slot)
                for gpu in devices.values():
                    gpu.wait()  # the other slot's copies, while which this one was read
                for index, parts in pieces.items():
                    devices[index].to_device(slot, parts)
                slot, other = other, slot
        finally:
            for gpu in devices.values():
                gpu.wait()

    runs = bulk.runs(store, dict.fromkeys(wanted, CHUNK), len(slots[0].view))
    share_out(slots, runs, work, threads=threads_for(len(devices)))


def _verify(
    store: Store,
    blocks: Sequence[SavedBlock],
    contents: Mapping[str, Content],
    regions: Mapping[BlockName, tuple[Device, Region]],
    made: Mapping[BlockName, Block],
) -> None:
    by_device: dict[int, list[SavedBlock]] = {}
    for saved in blocks:
        if saved.own:
            by_device.setdefault(regions[BlockName(saved.process, saved.id)][0].index, []).append(saved)
    for own in by_device.values():
        names = [BlockName(saved.process, saved.id) for saved in own]
        gpu = regions[names[0]][0]
        found = gpu.digests([regions[name][1] for name in names], store.key.chunks)
        for saved, name, digests in zip(own, names, found, strict=True):
            for number, expected in _expected(_content(saved, contents)):
                if digests[number * DIGEST : (number + 1) * DIGEST] != expected:
                    raise CorruptData(
                        f"device memory of block {saved.content_name}, chunk {number}, does not match its digest",
                        "use an earlier checkpoint",
                    )
            made[name].names = digests


def _expected(content: Content) -> Iterator[tuple[int, bytes]]:
    number = 0
    for chunk in content.chunks:
        if chunk.name:
            yield number, chunk.name
        number += chunk.length // CHUNK
