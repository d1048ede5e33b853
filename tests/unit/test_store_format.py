"""The bytes of chunks, packs, objects and manifests: there and back, and what damage looks like."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.errors import CorruptData, NewerVersion
from moorage.store import format as fmt
from moorage.store import manifests
from moorage.store.keys import StoreKey
from moorage.store.manifests import Chunk, Content, GlobalManifest, PodManifest

KEY = StoreKey(bytes(range(32)))
NAME = bytes(range(32))
PACK = "0123456789abcdef0123456789abcdef"
NONCE = b"n" * 16


@given(st.binary(min_size=32, max_size=32), st.integers(0, fmt.LARGEST_CHUNK), st.integers(0, fmt.LARGEST_CHUNK))
def test_chunk_headers_come_back(name: bytes, plain: int, stored: int) -> None:
    header = fmt.ChunkHeader(name, fmt.CODEC_ZSTD, plain, stored)
    data = b"??" + fmt.chunk_header(header, KEY.id)
    assert len(data) == 2 + fmt.CHUNK_HEADER
    assert fmt.parse_chunk_header(data, 2, "here") == header


@given(st.lists(st.tuples(st.binary(min_size=32, max_size=32), st.integers(0, 2**40), *[st.integers(0, 2**31)] * 2)))
def test_index_entries_come_back(found: list[tuple[bytes, int, int, int]]) -> None:
    entries = [fmt.PackEntry(*entry) for entry in found]
    assert list(fmt.decode_entries(fmt.encode_entries(entries), "here")) == entries


def test_a_pack_header_names_pack_and_store() -> None:
    head = fmt.pack_header(KEY.id, NONCE, PACK)
    fmt.check_pack_header(head, NONCE, PACK)
    with pytest.raises(CorruptData, match="another store"):
        fmt.check_pack_header(head, b"m" * 16, PACK)
    with pytest.raises(CorruptData, match="says that it is pack"):
        fmt.check_pack_header(head, NONCE, PACK[::-1])
    with pytest.raises(CorruptData, match="cut short"):
        fmt.check_pack_header(head[:-1], NONCE, PACK)


@given(st.binary(max_size=3000) | st.just(b"again " * 500))
def test_objects_come_back(payload: bytes) -> None:
    digest = KEY.object_digest(fmt.KIND_BLOB, payload)
    data = fmt.encode_object(fmt.KIND_BLOB, payload, KEY.id, digest)
    assert fmt.decode_object(data, fmt.KIND_BLOB, "here") == (payload, digest)
    with pytest.raises(CorruptData, match="another kind"):
        fmt.decode_object(data, fmt.KIND_POD, "here")


@given(st.data())
def test_a_damaged_object_is_never_taken_for_good(data: st.DataObject) -> None:
    payload = data.draw(st.sampled_from([b"short", b"again " * 500]))
    sound = fmt.encode_object(fmt.KIND_BLOB, payload, KEY.id, KEY.object_digest(fmt.KIND_BLOB, payload))
    at = data.draw(st.integers(0, len(sound) - 1))
    bad = bytearray(sound)
    bad[at] ^= data.draw(st.integers(1, 255))
    damaged = data.draw(st.sampled_from([bytes(bad), sound[:at]]))
    try:
        found, digest = fmt.decode_object(damaged, fmt.KIND_BLOB, "here")
    except (CorruptData, NewerVersion):
        return
    # Fields that say nothing yet (key id, nonce, padding) may be anything; the payload may not.
    assert found == payload or digest != KEY.object_digest(fmt.KIND_BLOB, found)


@pytest.mark.parametrize(("offset", "what"), [(4, "format 2"), (5, "codec 2"), (6, "cipher 2")])
def test_a_chunk_of_a_later_release_is_told_apart_from_damage(offset: int, what: str) -> None:
    head = bytearray(fmt.chunk_header(fmt.ChunkHeader(NAME, 0, 1, 1), KEY.id))
    head[offset] = 2
    with pytest.raises(NewerVersion, match=what) as caught:
        fmt.parse_chunk_header(head, 0, "here")
    assert "upgrade moorage" in caught.value.hint


def test_names_depend_on_the_key_and_on_the_kind() -> None:
    other = StoreKey(bytes(32))
    assert KEY.chunk_name(b"x") != other.chunk_name(b"x") != b""
    assert KEY.object_digest(fmt.KIND_POD, b"x") != KEY.object_digest(fmt.KIND_GLOBAL, b"x")
    assert len({KEY.chunks, KEY.objects, KEY.boundaries, KEY.secret}) == 4


def pod_manifest() -> PodManifest:
    content = Content(10, [Chunk(NAME, 4), Chunk(b"", 3), Chunk(NAME, 3, 1, 4)])
    return PodManifest(
        job="j", owner="o", pod=1, incarnation=2, attempt=3, node="n", created=1.5,
        images={"b": content, "a": content}, layer=content, layer_files={"x": content}, journal=content,
        ranks=[{"rank": 0}], extra={"later": [1]},
    )  # fmt: skip


def test_manifests_come_back_and_equal_ones_have_equal_bytes() -> None:
    manifest = pod_manifest()
    data = manifests.encode(manifest)
    assert manifests.decode(data, PodManifest, "here") == manifest
    swapped = dict(reversed(manifest.images.items()))
    assert manifests.encode(PodManifest(**{**{f: getattr(manifest, f) for f in manifest.__struct_fields__},
                                           "images": swapped})) == data  # fmt: skip
    assert {kind for kind, _, _ in manifest.contents()} == {"images", "layer", "journal"}
    assert set(manifest.chunks()) == {(NAME, 4)}


def test_a_manifest_of_a_later_release_is_refused_by_name() -> None:
    manifest = GlobalManifest(
        version=manifests.MANIFEST_VERSION + 1, job="j", owner="o", attempt=1, incarnation=1, created=0.0, pods=[]
    )
    with pytest.raises(NewerVersion, match="global manifest 12"):
        manifests.decode(manifests.encode(manifest), GlobalManifest, "global manifest 12")


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x81\xa7version\x01", b"not a manifest"])
def test_bytes_that_are_no_manifest_are_corrupt_data(data: bytes) -> None:
    with pytest.raises(CorruptData):
        manifests.decode(data, PodManifest, "here")


def test_a_length_that_no_buffer_can_have_is_damage() -> None:
    with pytest.raises(CorruptData):
        fmt.decompress(b"\x28\xb5\x2f\xfd", 1 << 63, "here")
