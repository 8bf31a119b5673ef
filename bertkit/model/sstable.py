"""Sorted tables in LevelDB's file format, which TensorFlow's checkpoint indexes use.

Format: github.com/google/leveldb, doc/table_format.md. A table is blocks of sorted keys and values,
an empty "meta index" block, an index block (last key of each block → its handle), and a footer that
points at the two. A handle is an offset and a size. After each block stand one byte for the
compression (here always 0, none) and a masked CRC-32C.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from bertkit.errors import BertkitError
from bertkit.model.crc32c import masked_crc32c

MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
FOOTER_BYTES = 48
BLOCK_BYTES = 4096
"""A block is closed once it is longer."""
MOST_KEY_BYTES = 1 << 12
"""Keys share what they begin with, so long ones could grow far beyond the file."""
RESTART = 16
"""Every so many keys of a block, one is stored whole."""


def varint(value: int) -> bytes:
    """A number as seven bits a byte, least significant first."""
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])


def read_varint(data: bytes, place: int) -> tuple[int, int]:
    """A number of seven bits a byte, least significant first, and the place after it."""
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
        if shift > 63:
            raise ValueError("a number is too long")


def read_table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a table, in order.

    Raises:
        BertkitError: a block is compressed or its checksum is wrong.
        IndexError, ValueError, struct.error: the bytes are no table, or are cut short.
    """
    if data[-8:] != MAGIC or len(data) < FOOTER_BYTES:
        raise ValueError("no table")
    footer, place = data[-FOOTER_BYTES:], 0
    for _ in range(2):  # skip the handle of the meta index
        _, place = read_varint(footer, place)
    before = -1
    for _, handle in read_block(data, footer[place:]):
        offset, _ = read_varint(handle, 0)
        if offset <= before:  # a block that is named again and again
            raise ValueError("the blocks are not in order")
        before = offset
        yield from read_block(data, handle)


def read_block(data: bytes, handle: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of the block that a handle (offset, size) points at.

    A key is stored as the count of bytes it shares with the one before, and the rest.
    """
    offset, place = read_varint(handle, 0)
    size, _ = read_varint(handle, place)
    block, kind = data[offset : offset + size], data[offset + size]
    (crc,) = struct.unpack_from("<I", data, offset + size + 1)
    if masked_crc32c(data[offset : offset + size + 1]) != crc:
        raise BertkitError(f"the checksum of the block at byte {offset} is wrong")
    if kind:
        raise BertkitError("its index is compressed, which is not supported")
    end = size - 4 - 4 * struct.unpack("<I", block[-4:])[0]
    key, place = b"", 0
    while place < end:
        shared, place = read_varint(block, place)
        rest, place = read_varint(block, place)
        length, place = read_varint(block, place)
        key = key[:shared] + block[place : place + rest]
        if len(key) > MOST_KEY_BYTES:
            raise ValueError("a key is too long")
        yield key, block[place + rest : place + rest + length]
        place += rest + length


def write_table(items: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A table of keys and values; the keys must be sorted."""
    data, index = bytearray(), []
    block: list[tuple[bytes, bytes]] = []
    size = 0
    for item in items:
        block.append(item)
        size += len(item[0]) + len(item[1])
        if size > BLOCK_BYTES:
            index.append((block[-1][0], append_block(data, block)))
            block, size = [], 0
    if block:
        index.append((block[-1][0], append_block(data, block)))
    footer = append_block(data, []) + append_block(data, index)
    return bytes(data) + footer.ljust(FOOTER_BYTES - len(MAGIC), b"\0") + MAGIC


def append_block(data: bytearray, items: list[tuple[bytes, bytes]]) -> bytes:
    """Append one block to the file's bytes; its handle."""
    block, restarts, previous = bytearray(), [], b""
    for place, (key, value) in enumerate(items):
        shared = 0
        if place % RESTART == 0:
            restarts.append(len(block))
        else:
            while shared < min(len(key), len(previous)) and key[shared] == previous[shared]:
                shared += 1
        block += varint(shared) + varint(len(key) - shared) + varint(len(value))
        block += key[shared:] + value
        previous = key
    restarts = restarts or [0]
    block += struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))
    handle = varint(len(data)) + varint(len(block))
    block.append(0)  # not compressed
    data += block + struct.pack("<I", masked_crc32c(bytes(block)))
    return handle
