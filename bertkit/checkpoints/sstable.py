"""Sorted tables in LevelDB's file format, which TensorFlow's checkpoint indexes use, and CRC-32C.

Format: github.com/google/leveldb, doc/table_format.md. A table consists of blocks of sorted keys
and values, an empty "meta index" block, an index block (the last key of each block → its handle),
and a footer that points to the last two. A handle is an offset and a size. Each block is followed
by one byte for the compression (here always 0: no compression) and a masked CRC-32C.

CRC-32C (Castagnoli; RFC 3720, appendix B.4): a byte-by-byte loop in Python takes minutes for a
BERT. However, the remainder is linear: the remainder of two concatenated parts is that of the
first, advanced by as many zero bytes as the second has, XOR that of the second. So the 32-bit words
of a block are combined in pairs, then these pairs are combined, in a few vectorised steps.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from functools import cache

import numpy as np

from bertkit.errors import BertkitError

POLYNOMIAL = 0x82F63B78
"""Castagnoli's polynomial, lowest bit first."""
CHECKSUM_BLOCK_WORDS = 1 << 18
"""The number of words combined at a time: 1 MiB."""
MASK_DELTA = 0xA282EAD8
"""LevelDB stores the rotated CRC plus this, as a CRC of data that contains its CRC is weak."""


@cache
def crc32c_zeros(doublings: int) -> np.ndarray:
    """Return a table, (4, 256) with a row per byte, that advances by 2^doublings zero bytes."""
    if doublings == 0:
        low = np.arange(256, dtype=np.uint32)
        for _ in range(8):
            low = (low >> np.uint32(1)) ^ (low & np.uint32(1)) * np.uint32(POLYNOMIAL)
        high = [np.arange(256, dtype=np.uint32) << (8 * (row - 1)) for row in (1, 2, 3)]
        return np.stack([low, *high])
    half = crc32c_zeros(doublings - 1)
    return crc32c_shift(half, half)


def crc32c_shift(table: np.ndarray, register: np.ndarray) -> np.ndarray:
    """Advance uint32 registers of any shape by the zero bytes that `table` represents."""
    result = table[3][register >> 24]
    for row in range(3):
        result ^= table[row][(register >> (8 * row)) & 255]
    return result


def crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C of `data`."""
    words = -(-len(data) // 4)
    padded = np.zeros(words * 4, dtype=np.uint8)
    padded[words * 4 - len(data) :] = np.frombuffer(data, dtype=np.uint8)
    values = padded.view("<u4").astype(np.uint32, copy=False)
    # Leading zero bytes do not change a register of 0; the standard initial register of all ones
    # is added at the end, advanced by the length of the data.
    first = words % CHECKSUM_BLOCK_WORDS
    register = block_register(values[:first])
    # a block is a power of 2 words of 2^2 bytes
    block = crc32c_zeros(CHECKSUM_BLOCK_WORDS.bit_length() + 1)
    for start in range(first, words, CHECKSUM_BLOCK_WORDS):
        register = crc32c_shift(block, register) ^ block_register(
            values[start : start + CHECKSUM_BLOCK_WORDS]
        )
    register = crc32c_shift(crc32c_zeros(2), register)
    ones = np.array([0xFFFFFFFF], dtype=np.uint32)
    for bit in range(len(data).bit_length()):
        if len(data) >> bit & 1:
            ones = crc32c_shift(crc32c_zeros(bit), ones)
    return int(register[0] ^ ones[0]) ^ 0xFFFFFFFF


def block_register(values: np.ndarray) -> np.ndarray:
    """Combine a block's words to one register, (1,), except for the advance by the last word."""
    doublings = 2  # a word is 2^2 bytes
    while len(values) > 1:
        if len(values) % 2:
            values = np.concatenate([np.zeros(1, dtype=np.uint32), values])
        values = crc32c_shift(crc32c_zeros(doublings), values[0::2]) ^ values[1::2]
        doublings += 1
    return values if len(values) else np.zeros(1, dtype=np.uint32)


def masked_crc32c(data: bytes | memoryview) -> int:
    """Return the masked checksum that LevelDB and TensorFlow store."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + MASK_DELTA) & 0xFFFFFFFF


MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
FOOTER_BYTES = 48
TABLE_BLOCK_BYTES = 4096
"""A block is written once it is longer than this."""
MAX_KEY_BYTES = 1 << 12
"""The longest key; keys share prefixes, so they could otherwise outgrow the file by far."""
RESTART = 16
"""The number of keys in a block from one that is stored in full to the next."""


def varint(value: int) -> bytes:
    """Encode a number with seven bits per byte, least significant first."""
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])


def read_varint(data: bytes, place: int) -> tuple[int, int]:
    """Decode a number at a position; return it and the position after it."""
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
    """Yield the keys and values of a table, in order.

    Raises:
        BertkitError: a block is compressed or its checksum is wrong.
        IndexError, ValueError, struct.error: the bytes are not a table, or are truncated.
    """
    if data[-8:] != MAGIC or len(data) < FOOTER_BYTES:
        raise ValueError("not a table")
    footer, place = data[-FOOTER_BYTES:], 0
    for _ in range(2):  # skip the handle of the meta index
        _, place = read_varint(footer, place)
    before = -1
    for _, handle in read_block(data, footer[place:]):
        offset, _ = read_varint(handle, 0)
        if offset <= before:  # the index could refer to one block many times
            raise ValueError("the blocks are not in order")
        before = offset
        yield from read_block(data, handle)


def read_block(data: bytes, handle: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of the block that a handle (offset, size) points to.

    A key is stored as the number of bytes it shares with the previous key, and its other bytes.
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
        if len(key) > MAX_KEY_BYTES:
            raise ValueError("a key is too long")
        yield key, block[place + rest : place + rest + length]
        place += rest + length


def write_table(items: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the bytes of a table of keys and values; the keys must be sorted."""
    data, index = bytearray(), []
    block: list[tuple[bytes, bytes]] = []
    size = 0
    for item in items:
        block.append(item)
        size += len(item[0]) + len(item[1])
        if size > TABLE_BLOCK_BYTES:
            index.append((block[-1][0], append_block(data, block)))
            block, size = [], 0
    if block:
        index.append((block[-1][0], append_block(data, block)))
    footer = append_block(data, []) + append_block(data, index)
    return bytes(data) + footer.ljust(FOOTER_BYTES - len(MAGIC), b"\0") + MAGIC


def append_block(data: bytearray, items: list[tuple[bytes, bytes]]) -> bytes:
    """Append one block to the file's bytes, and return its handle."""
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
